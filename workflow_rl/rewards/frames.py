"""Rewards of images as rewards of videos: score frames, then reduce them to one number."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores, checked

HowToReduce = Literal["mean", "min", "top_fraction", "first", "last"]
ScoreImages = Callable[[RewardBatch], RewardScores]

FramesArg = str | Mapping[str, object]
"""``frames`` as written in YAML: ``min``, or ``{reduce: top_fraction, fraction: 0.3}``."""


@dataclass(frozen=True)
class FrameReduction:
    """Which frames of a video are scored, and how their scores become one.

    Attributes
    ----------
    reduce : {"mean", "min", "top_fraction", "first", "last"}
        ``top_fraction`` is the mean of the best ``fraction`` of the frames; ``first`` and ``last``
        score one frame only.
    fraction : float
        In (0, 1]; at least one frame counts.
    every : int
        Score every n-th frame, from the first on.
    """

    reduce: HowToReduce = "mean"
    fraction: float = 0.3
    every: int = 1

    @classmethod
    def parse(cls, frames: FramesArg) -> "FrameReduction":
        """Read the ``frames`` argument of a reward.

        Raises
        ------
        UserError
            An unknown key or value.
        """
        given = {"reduce": frames} if isinstance(frames, str) else dict(frames)
        known = [item.name for item in fields(cls)]
        for key in given:
            if key not in known:
                raise UserError(f"frames has no key {key!r}: known: {', '.join(known)}")
        reduction = cls(**given)
        if reduction.reduce not in get_args(HowToReduce):
            raise UserError(
                f"frames.reduce is {reduction.reduce!r}: give one of "
                f"{', '.join(get_args(HowToReduce))}"
            )
        if not (isinstance(reduction.fraction, float | int) and 0 < reduction.fraction <= 1):
            raise UserError(f"frames.fraction is {reduction.fraction}: give one in (0, 1]")
        if not (isinstance(reduction.every, int) and reduction.every >= 1):
            raise UserError(f"frames.every is {reduction.every}: give a whole number above 0")
        return reduction

    def positions(self, length: int) -> list[int]:
        """Frames to score, of a video of ``length`` frames."""
        if self.reduce == "first":
            return [0]
        if self.reduce == "last":
            return [length - 1]
        return list(range(0, length, self.every))

    def __call__(self, frames_BT: Tensor) -> Tensor:
        """Reduce the scores ``[B, T]`` of the scored frames to ``[B]``; a NaN stays one."""
        if self.reduce == "min":
            return frames_BT.amin(1)
        if self.reduce == "top_fraction":
            count = max(1, math.ceil(self.fraction * frames_BT.shape[1] - 1e-9))
            best_BT = frames_BT.topk(count, dim=1).values.mean(1)
            return torch.where(frames_BT.isnan().any(1), math.nan, best_BT)
        return frames_BT.mean(1)


def score_frames(
    batch: RewardBatch, reduction: FrameReduction, score_images: ScoreImages, chunk: int = 16
) -> RewardScores:
    """Score images, or the frames of videos reduced to one score per video.

    A video of which one frame fails has failed: leaving that frame out would reward what breaks
    the reward.

    Parameters
    ----------
    score_images : callable
        From a batch of images to their scores.
    chunk : int
        Images per call: the frames of 64 videos do not fit in memory at once.

    Returns
    -------
    RewardScores
        Components are reduced as the scores are.
    """
    if batch.media_kind == "image":
        positions = [0]
        images = batch.media.unsqueeze(2)
    else:
        positions = reduction.positions(batch.media.shape[2])
        images = batch.media
    pairs = [(row, frame) for row in range(len(batch)) for frame in positions]
    parts = [
        checked(score_images(part), len(part)) for part in _chunks(batch, images, pairs, chunk)
    ]
    shape = (len(batch), len(positions))
    components: dict[str, Tensor] = {}
    for name in parts[0].components if parts else ():
        joined = torch.cat([part.components[name] for part in parts])
        components[name] = reduction(joined.view(shape))
    failures: dict[int, str] = {}
    reasons = [part.failures.get(i) for part in parts for i in range(len(part.scores))]
    for (row, frame), reason in zip(pairs, reasons, strict=True):
        if reason is not None:
            where = "" if batch.media_kind == "image" else f"frame {frame}: "
            failures.setdefault(row, where + reason)
    scores = torch.cat([part.scores for part in parts]) if parts else torch.zeros(0)
    return RewardScores(reduction(scores.view(shape)), failures, components)


def _chunks(
    batch: RewardBatch, media_BCTHW: Tensor, pairs: list[tuple[int, int]], chunk: int
) -> Iterator[RewardBatch]:
    """Batches of at most ``chunk`` images, the frames named by ``pairs`` of (row, frame)."""
    for start in range(0, len(pairs), chunk):
        part = pairs[start : start + chunk]
        yield RewardBatch(
            prompts=[batch.prompts[row] for row, _ in part],
            sample_ids=[f"{batch.sample_ids[row]}/{frame}" for row, frame in part],
            media=torch.stack([media_BCTHW[row, :, frame] for row, frame in part]),
            media_kind="image",
        )
