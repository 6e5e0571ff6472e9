"""What the guards measure: one number per sample, cheap, from pixels alone.

Of a video at most ``PAIRS`` pairs of consecutive frames are looked at, the last frame among
them; frames are averaged down to a shorter side of ``SIDE`` to twice that, but for sharpness,
which is of two frames at full size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from workflow_rl.workflow import StageOutput

PAIRS = 2
SIDE = 32
FLAT = 1e-4
"""Squared gradient below which a frame has no edges whose motion could be seen."""


def sample_statistics(media: Tensor) -> dict[str, Tensor]:
    """Return each kind's value per sample, float32 ``[N]``, NaN where a sample is not finite.

    - ``brightness``: mean luma (Rec. 601), in [0, 1].
    - ``saturation``: mean of the largest minus the smallest of R, G and B, in [0, 1]; unlike
      that of HSV it does not jump in the dark.
    - ``sharpness``: variance of the Laplacian of the luma (0 to 255).
    - ``motion`` (videos): speed along the gradient, Σ|∂t||∇| / Σ|∇|², in shares of the shorter side
      per frame (brightness constancy, Horn & Schunck 1981). Contrast does not change it.
    - ``frame_change`` (videos): mean absolute change of the luma between consecutive frames.

    Parameters
    ----------
    media : Tensor
        ``[N, 3, H, W]`` or ``[N, 3, T, H, W]`` in [0, 1].
    """
    video = media if media.dim() == 5 else media.unsqueeze(2)
    rows = [_of_samples(part) for part in video.split(16)]
    return {kind: torch.cat([row[kind] for row in rows]) for kind in rows[0]}


def _of_samples(video_NCTHW: Tensor) -> dict[str, Tensor]:
    length = video_NCTHW.shape[2]
    small_NCTHW = _small(video_NCTHW[:, :, pair_frames(length)])
    luma_NTHW = _luma(small_NCTHW)
    found = {
        "brightness": luma_NTHW.flatten(1).mean(1),
        "saturation": (small_NCTHW.amax(1) - small_NCTHW.amin(1)).flatten(1).mean(1),
        "sharpness": _sharpness(_luma(video_NCTHW[:, :, sorted({length // 2, length - 1})])),
    }
    if length > 1:
        found |= _motion(luma_NTHW[:, 0::2], luma_NTHW[:, 1::2])
    finite_N = video_NCTHW.flatten(1).sum(1).isfinite()
    return {kind: torch.where(finite_N, values, torch.nan) for kind, values in found.items()}


def pair_frames(length: int) -> list[int]:
    """Return the frames to look at: first, second, first, second, ... of each pair."""
    if length == 1:
        return [0]
    count = min(PAIRS, length - 1)
    starts = torch.linspace(0, length - 2, count).round().long().tolist()
    starts[-1] = length - 2
    return [frame for start in starts for frame in (start, start + 1)]


def _small(video_NCTHW: Tensor) -> Tensor:
    factor = min(video_NCTHW.shape[3:]) // SIDE
    if factor <= 1:
        return video_NCTHW.float()
    frames = video_NCTHW.float().transpose(1, 2).flatten(0, 1)
    pooled = avg_pool2d(frames, factor)
    return pooled.unflatten(0, (video_NCTHW.shape[0], -1)).transpose(1, 2)


def _luma(video_NCTHW: Tensor) -> Tensor:
    red, green, blue = video_NCTHW.float().unbind(1)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _sharpness(luma_NTHW: Tensor) -> Tensor:
    x = luma_NTHW * 255
    around = x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:]
    laplacian = around - 4 * x[..., 1:-1, 1:-1]
    return laplacian.flatten(2).var(2, correction=0).mean(1)


def _motion(first_NPHW: Tensor, second_NPHW: Tensor) -> dict[str, Tensor]:
    change = (second_NPHW - first_NPHW).abs()
    middle = (first_NPHW + second_NPHW) / 2
    dy = (middle[..., 2:, 1:-1] - middle[..., :-2, 1:-1]) / 2
    dx = (middle[..., 1:-1, 2:] - middle[..., 1:-1, :-2]) / 2
    squared = dx.square() + dy.square()
    weighted = (change[..., 1:-1, 1:-1] * squared.sqrt()).flatten(1).sum(1)
    energy = squared.flatten(1).sum(1)
    pixels = squared[0].numel()
    side = min(first_NPHW.shape[2:])
    return {
        "motion": weighted / (energy + FLAT * pixels) / side,
        "frame_change": change.flatten(1).mean(1),
    }


def group_diversity(media: Tensor, groups: Tensor) -> Tensor:
    """Return how much the samples of each group differ, float32 ``[G]``; NaN with fewer than two.

    The root mean square difference of two samples' pixels over all pairs, in [0, 1]: √(2·variance),
    so that it costs no pairs. Samples that are not finite are left out.

    Parameters
    ----------
    media : Tensor
        ``[N, 3, ...]`` in [0, 1].
    groups : Tensor
        int64 ``[N]``, the group of each sample.
    """
    video = media if media.dim() == 5 else media.unsqueeze(2)
    length = video.shape[2]
    pixels_ND = _small(video[:, :, sorted({length // 2, length - 1})]).flatten(1)
    finite_N = pixels_ND.sum(1).isfinite()
    values = []
    for group in groups.unique().tolist():
        own = pixels_ND[(groups == group) & finite_N]
        if len(own) < 2:
            values.append(pixels_ND.new_tensor(torch.nan))
            continue
        squares = (own - own.mean(0)).square().sum()  # Tensor.var is ten times as slow
        values.append((2 * squares / (len(own) - 1) / own.shape[1]).sqrt())
    return torch.stack(values)


def diversity_groups(outputs: tuple[StageOutput, ...]) -> list[Tensor]:
    """Return each stage's groups, int64 ``[N]``: the samples of one parent.

    Where a parent has one sample, the groups of the stage before are taken.
    """
    found: list[Tensor] = []
    for output in outputs:
        parents = torch.as_tensor(output.parents, dtype=torch.int64)
        single = len(parents.unique()) == len(parents)
        found.append(found[-1][parents] if single and found else parents)
    return found
