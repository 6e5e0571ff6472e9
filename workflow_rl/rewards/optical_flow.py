"""Optical flow between frames without a network: DIS (Kroeger et al. 2016, arXiv 1603.03590)."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from workflow_rl.rewards.media_needs import FLOW_SIDE
from workflow_rl.rewards.pixels import luma, to_uint8
from workflow_rl.rewards.weights import import_extra


def load_opencv(reward: str) -> ModuleType:
    """OpenCV, which computes the flow that ``reward`` needs.

    Raises
    ------
    UserError
        It is not installed.
    """
    return import_extra("cv2", "flow", f"reward {reward}")


def grey_frames(video_CTHW: Tensor) -> NDArray[np.uint8]:
    """Brightness of an RGB video in [0, 1], uint8 ``[T, H, W]``.

    Raises
    ------
    ValueError
        It is not finite, has fewer than 2 frames or is too small for patches.
    """
    if video_CTHW.shape[1] < 2 or min(video_CTHW.shape[2:]) < FLOW_SIDE:
        raise ValueError(
            f"flow needs 2 frames and {FLOW_SIDE} pixels a side, got {tuple(video_CTHW.shape[1:])}"
        )
    grey_THW = luma(to_uint8(video_CTHW).movedim(1, 0).float())
    frames: NDArray[np.uint8] = grey_THW.round().to(torch.uint8).numpy()
    return frames


def flows(frames_THW: NDArray[np.uint8], pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Flow of each pair of frames, ``[N, 2, H, W]`` in pixels: x to the right, y downwards.

    A point at p in the first frame of a pair is at p + flow(p) in the second.
    """
    opencv = import_extra("cv2", "flow", "optical flow")
    found = []
    for first, second in pairs:
        # A new one each time: the object keeps what it saw as the start of the next search.
        dis = opencv.DISOpticalFlow_create(opencv.DISOPTICAL_FLOW_PRESET_FAST)
        found.append(torch.from_numpy(dis.calc(frames_THW[first], frames_THW[second], None)))
    return torch.stack(found).movedim(3, 1)


def top_speed(flow_N2HW: Tensor, share: float = 0.05) -> Tensor:
    """Mean length of the longest ``share`` of each flow's vectors, ``[N]`` in pixels (VBench)."""
    # Tensor.norm along an inner axis gives the same bits in 8 times as long
    speed_NP = flow_N2HW.square().sum(1).double().sqrt().float().flatten(1)
    return speed_NP.topk(max(1, int(share * speed_NP.shape[1])), dim=1).values.mean(1)


def warp(images_NCHW: Tensor, flow_N2HW: Tensor) -> Tensor:
    """Images looked up at p + flow(p), bilinearly; outside of them, their edge."""
    height, width = images_NCHW.shape[2:]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    x_NHW = (x + flow_N2HW[:, 0]) * 2 / (width - 1) - 1
    y_NHW = (y + flow_N2HW[:, 1]) * 2 / (height - 1) - 1
    return F.grid_sample(
        images_NCHW,
        torch.stack([x_NHW, y_NHW], dim=-1),
        padding_mode="border",
        align_corners=True,
    )
