"""Reads media made elsewhere, and scores them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from workflow_rl.enums import MediaKind
from workflow_rl.errors import UserError
from workflow_rl.evaluation.folders import Files
from workflow_rl.evaluation.job import Row
from workflow_rl.media import read_mp4, read_png
from workflow_rl.rewards.base import RewardBatch
from workflow_rl.rewards.composite import CompositeReward, StageMedia
from workflow_rl.serving.evaluate_batches import ScoredBatch

WEBP_FPS = 10.0
"""Of an animated WebP whose frames have no duration."""


def score_files(
    rows: Sequence[Row], files: Files, kind: MediaKind, reward: CompositeReward
) -> ScoredBatch:
    """Read the files of some rows and score them.

    Files of one size, length and frame rate are scored in one call.

    Raises
    ------
    UserError
        A file that cannot be read.
    """
    read = [read_medium(files[row.record.prompt, row.seed], kind) for row in rows]
    alike: dict[tuple[torch.Size, float | None], list[int]] = {}
    for index, (media, fps) in enumerate(read):
        alike.setdefault((media.shape, fps), []).append(index)
    total = torch.full((len(rows),), math.nan)
    components: dict[str, torch.Tensor] = {}
    failures: dict[int, str] = {}
    for (_, fps), places in alike.items():
        batch = RewardBatch(
            prompts=[rows[i].record.prompt for i in places],
            sample_ids=[str(files[rows[i].record.prompt, rows[i].seed]) for i in places],
            media=torch.stack([read[i][0] for i in places]),
            media_kind=kind.value,
            fps=fps,
        )
        scores = reward.score_tree({kind.value: StageMedia(batch)})
        total[places] = scores.total
        for name, values in scores.components.items():
            empty = torch.full((len(rows),), math.nan)
            components.setdefault(name, empty)[places] = values
        failures |= {places[row]: why for row, why in scores.failures.items()}
    return ScoredBatch(
        [media for media, _ in read],
        [fps for _, fps in read],
        [True] * len(rows),
        total,
        components,
        dict(sorted(failures.items())),
    )


def check_files(files: Files, kind: MediaKind) -> None:
    """Open every file as far as its header or first frame, before anything slow is done.

    Raises
    ------
    UserError
        A file that cannot be read.
    """
    for path in files.values():
        if not _opens(path):
            read_medium(path, kind)  # says what is wrong


def _opens(path: Path) -> bool:
    import av
    from PIL import Image

    try:
        if path.suffix.lower() == ".mp4":
            with av.open(path) as container:
                next(container.decode(video=0))
        else:
            with Image.open(path):
                pass
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return True


def read_medium(path: Path, kind: MediaKind) -> tuple[torch.Tensor, float | None]:
    """Return ``[3, H, W]`` or ``[3, T, H, W]`` in [0, 1], and a video's frames per second.

    Raises
    ------
    UserError
        The file cannot be read.
    """
    if kind is MediaKind.IMAGE:
        return read_png(path), None
    if path.suffix.lower() == ".webp":
        return _read_webp(path)
    return read_mp4(path), _mp4_fps(path)


def _mp4_fps(path: Path) -> float | None:
    import av

    with av.open(path) as container:
        rate = container.streams.video[0].average_rate
    return None if rate is None else float(rate)


def _read_webp(path: Path) -> tuple[torch.Tensor, float]:
    from PIL import Image, ImageSequence

    try:
        with Image.open(path) as image:
            frames = []
            milliseconds = 0
            for frame in ImageSequence.Iterator(image):
                frames.append(np.array(frame.convert("RGB")))
                milliseconds += int(frame.info.get("duration", 0))
    except OSError as error:
        raise UserError(f"{path} is not a whole image; replace or remove it") from error
    video_CTHW = torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2).float() / 255
    fps = 1000 * len(frames) / milliseconds if milliseconds else WEBP_FPS
    return video_CTHW, fps
