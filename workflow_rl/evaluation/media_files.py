"""Writes the media of an evaluation or a rollout below a run directory."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from workflow_rl.enums import MediaKind
from workflow_rl.media import write_mp4, write_png
from workflow_rl.workflow import StageOutput

DEFAULT_FPS = 8.0
"""Frames per second of a video whose model tells none."""


class LostMedia:
    """Counts the files that the disk refused, by cause: a run does not end for a picture."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()

    def add(self, error: OSError) -> None:
        """Count one file."""
        self.causes[error.strerror or type(error).__name__] += 1

    def write(
        self, folder: Path, stem: str, media: torch.Tensor, kind: MediaKind, fps: float | None
    ) -> Path | None:
        """Write one sample as `write_media` does; None, and counted, where the disk refuses."""
        try:
            return write_media(folder, stem, media, kind, fps)
        except OSError as error:  # FFmpeg's of a full disk is one too
            self.add(error)
            return None

    def to_json(self) -> dict[str, Any]:
        """Return what a line of a log says of it: the count and the causes, always both."""
        return {
            "media_failed": self.causes.total(),
            "media_failure_causes": dict(sorted(self.causes.items())),
        }

    def __str__(self) -> str:
        causes = ", ".join(f"{cause} ({count})" for cause, count in sorted(self.causes.items()))
        return f"{self.causes.total()} files of images and videos were not written: {causes}"


def write_media(
    folder: Path, stem: str, media: torch.Tensor, kind: MediaKind, fps: float | None
) -> Path:
    """Write one sample as ``stem.png`` or ``stem.mp4`` in ``folder``; return the path.

    ``fps`` are a video's frames per second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if kind is MediaKind.IMAGE:
        return write_png(folder / f"{stem}.png", media)
    return write_mp4(folder / f"{stem}.mp4", media, fps or DEFAULT_FPS)


def shown(media: torch.Tensor) -> torch.Tensor:
    """Return media with black for what is not finite: a failed sample is looked at too."""
    return torch.where(media.isfinite(), media, 0.0)


def write_first_samples(
    run_dir: Path,
    folder: str,
    outputs: tuple[StageOutput, ...],
    rows: list[int],
    lost: LostMedia,
) -> dict[str, list[str | None]]:
    """Write the samples in ``rows`` of every stage of an evaluation (one leaf per prompt and seed).

    Pixels that are not finite are black. Files that the disk refuses are counted in ``lost``.

    Returns
    -------
    dict
        Stage name to paths relative to ``run_dir``, in the order of ``rows``; None where lost.
    """
    written = {
        output.stage.name: [
            lost.write(
                run_dir / folder,
                f"{output.stage.name}_{row:03d}",
                shown(output.media[row]),
                output.media_kind,
                output.fps,
            )
            for row in rows
        ]
        for output in outputs
    }
    return {
        stage: [None if path is None else str(path.relative_to(run_dir)) for path in paths]
        for stage, paths in written.items()
    }
