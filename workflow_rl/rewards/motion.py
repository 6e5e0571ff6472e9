"""Amount and smoothness of motion in a video, by optical flow without a network.

VBench (Huang et al. 2023, arXiv 2311.17982) measures both with networks, RAFT and AMT. These are
its formulas with DIS flow in their place: their numbers rank videos, but are not VBench's.
"""

import torch
from torch import Tensor

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.media_needs import VBENCH_FPS
from workflow_rl.rewards.optical_flow import flows, grey_frames, load_opencv, top_speed, warp

VBENCH_SIDE = 256
"""Speeds are in pixels of a video of this size, and of the rate `VBENCH_FPS`."""

VBENCH_THRESHOLD = 6.0
"""Speed from which VBench calls a pair of frames dynamic."""


def _fps(batch: RewardBatch) -> float:
    if batch.fps is None or not batch.fps > 0:
        raise ValueError(f"speed needs the frames per second of the video, which are {batch.fps}")
    return batch.fps


def _speeds(video_CTHW: Tensor, step: int) -> Tensor:
    """Top speed between every ``step``-th frame, in pixels of a video 256 pixels wide."""
    frames_THW = grey_frames(video_CTHW[:, ::step])
    pairs = [(t, t + 1) for t in range(len(frames_THW) - 1)]
    return top_speed(flows(frames_THW, pairs)) * VBENCH_SIDE / min(video_CTHW.shape[2:])


class MotionAmount:
    """How fast the fastest 5 % of a video move, in [0, 1]; linear up to ``cap``, then flat.

    Speed is in 256ths of the shorter side per 1/8 s, so size and frame rate do not count; 6 is
    what VBench calls dynamic. A camera that pans moves everything. The cap keeps "faster" from
    being always better. The uncapped mean speed is the component ``speed``.

    Parameters
    ----------
    cap : float
        Speed that scores 1.
    """

    name = "motion_amount"
    media_kind = "video"

    def __init__(self, cap: float = 12.0) -> None:
        self.cap = cap

    def load(self) -> None:
        """Import OpenCV."""
        load_opencv(self.name)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame, or without ``fps``, fails."""
        rate = _fps(batch) / VBENCH_FPS
        speeds_BP = torch.stack([_speeds(video, step=1) * rate for video in batch.media])
        return RewardScores(
            (speeds_BP / self.cap).clamp(max=1).mean(1), components={"speed": speeds_BP.mean(1)}
        )


class DynamicDegree:
    """1 if a video moves, else 0: VBench's rule, with DIS flow in place of RAFT.

    Of frames taken about 8 times a second, 4 in 16 must have a top speed above 6 to the next. The
    share of pairs that have is the component ``moving``. As a reward :class:`MotionAmount` tells
    more: most groups agree on a yes or no.
    """

    name = "dynamic_degree"
    media_kind = "video"

    def load(self) -> None:
        """Import OpenCV."""
        load_opencv(self.name)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame, or without ``fps``, fails."""
        step = max(1, round(_fps(batch) / VBENCH_FPS))  # as in MediaNeeds.frames_seen
        speeds_BP = torch.stack([_speeds(video, step) for video in batch.media])
        moving_BP = speeds_BP > VBENCH_THRESHOLD
        needed = round(4 * (speeds_BP.shape[1] + 1) / 16)
        return RewardScores(
            (moving_BP.sum(1) >= max(1, needed)).float(),
            components={"moving": moving_BP.float().mean(1)},
        )


class MotionSmoothness:
    """How well each frame is predicted from its two neighbours, in [0, 1]; higher is smoother.

    (255 − mean absolute error) / 255, VBench's formula; the prediction takes half of the flow
    between the neighbours, where VBench's takes AMT. A frozen video scores 1: pair it with
    :class:`MotionAmount`.
    """

    name = "motion_smoothness"
    media_kind = "video"

    def load(self) -> None:
        """Import OpenCV."""
        load_opencv(self.name)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of fewer than 3 frames fails."""
        if batch.media.shape[2] < 3:
            raise ValueError("smoothness needs 3 frames or more")
        return RewardScores(torch.stack([1 - _middle_error(video) for video in batch.media]))


def _middle_error(video_CTHW: Tensor) -> Tensor:
    """Mean absolute error, in [0, 1], of predicting each frame from those beside it.

    A point seen in the middle frame at p was at about p − flow/2 and will be at p + flow/2.
    """
    frames_THW = grey_frames(video_CTHW)
    before = [(t - 1, t + 1) for t in range(1, len(frames_THW) - 1)]
    half_N2HW = flows(frames_THW, before) / 2
    pixels_TCHW = video_CTHW.movedim(1, 0).float().cpu()
    middle_NCHW = (warp(pixels_TCHW[:-2], -half_N2HW) + warp(pixels_TCHW[2:], half_N2HW)) / 2
    return (middle_NCHW - pixels_TCHW[1:-1]).abs().mean()
