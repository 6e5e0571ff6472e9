"""How much the samples of one prompt differ from seed to seed.

The distance of two samples is the root mean square difference of their pixels, in [0, 1], after
every one was brought to ``FRAMES`` evenly spaced frames of ``SIDE`` x ``SIDE`` pixels (area
average): samples of other sizes, lengths or compression can be set side by side. It needs no
network, and it sees what a collapse looks like: the same picture from every seed. It does not see
meaning: a camera that shakes is as good to it as another scene.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import adaptive_avg_pool2d

FRAMES = 8
SIDE = 32

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def signature(media: torch.Tensor) -> torch.Tensor:
    """Return what the distance is taken of, float32 ``[F * 3 * SIDE * SIDE]``.

    Parameters
    ----------
    media : Tensor
        ``[3, H, W]`` or ``[3, T, H, W]`` in [0, 1]; a value that is not finite makes the result
        NaN or infinite, and the sample's distances NaN.
    """
    video_CTHW = media.unsqueeze(1) if media.dim() == 3 else media
    length = video_CTHW.shape[1]
    # An image is one frame; a video of any length is always the same number of them.
    frames = 1 if length == 1 else FRAMES
    picks = torch.linspace(0, length - 1, frames).round().long()
    frames_TCHW = video_CTHW[:, picks].movedim(1, 0).float()
    return adaptive_avg_pool2d(frames_TCHW, SIDE).flatten()


def distances(signatures: Sequence[torch.Tensor], prompts: Sequence[Hashable]) -> list[FloatArray]:
    """Return the distance of each two samples of a prompt: per prompt a matrix ``[S, S]``.

    Prompts are in the order of their first sample. NaN where one of the two is not finite, and
    between a sample and itself.
    """
    blocks = []
    for rows in rows_of_prompts(prompts):
        block = np.full((len(rows), len(rows)), np.nan)
        for i, first in enumerate(rows):
            for j, second in enumerate(rows[:i]):
                difference = signatures[first].double() - signatures[second].double()
                distance = float(difference.square().mean().sqrt())
                block[i, j] = block[j, i] = distance if math.isfinite(distance) else math.nan
        blocks.append(block)
    return blocks


def prompt_diversity(
    blocks: Sequence[FloatArray], prompts: Sequence[Hashable], valid_N: BoolArray
) -> FloatArray:
    """Return each prompt's mean distance between two of its valid samples, ``[P]``.

    NaN with fewer than two samples left. ``blocks`` as of :func:`distances`.
    """
    values = []
    for block, rows in zip(blocks, rows_of_prompts(prompts), strict=True):
        kept = np.flatnonzero(valid_N[rows])
        known = block[np.ix_(kept, kept)]
        known = known[~np.isnan(known)]
        values.append(float(known.mean()) if len(known) else math.nan)
    return np.array(values)


def rows_of_prompts(prompts: Sequence[Hashable]) -> list[list[int]]:
    """Return the rows of each prompt, in the order of their first one."""
    rows: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(prompt, []).append(row)
    return list(rows.values())
