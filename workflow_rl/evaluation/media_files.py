"""Writes the media of an evaluation or a rollout below a run directory."""

from __future__ import annotations

from pathlib import Path

import torch

from workflow_rl.enums import MediaKind
from workflow_rl.media import write_mp4, write_png
from workflow_rl.workflow import StageOutput

DEFAULT_FPS = 8.0
"""Frames per second of a video whose model tells none."""


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
    run_dir: Path, folder: str, outputs: tuple[StageOutput, ...], rows: list[int]
) -> dict[str, list[str]]:
    """Write the samples in ``rows`` of every stage of an evaluation (one leaf per prompt and seed).

    Pixels that are not finite are black.

    Returns
    -------
    dict
        Stage name to paths relative to ``run_dir``, in the order of ``rows``.
    """
    return {
        output.stage.name: [
            str(
                write_media(
                    run_dir / folder,
                    f"{output.stage.name}_{row:03d}",
                    shown(output.media[row]),
                    output.media_kind,
                    output.fps,
                ).relative_to(run_dir)
            )
            for row in rows
        ]
        for output in outputs
    }
