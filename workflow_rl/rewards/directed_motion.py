"""How far the named shape travels in the named direction: the reward of the embedded world.

It looks at the video and the caption alone. Travel counts only as far as every frame shows one
shape of the named colour, form and size, so that colour, smears, second shapes and jumps do not
pay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workflow_rl.embedded.world import (
    COLOURS,
    DIRECTIONS,
    GLOW,
    GROUND,
    SHAPES,
    SIZE,
    Caption,
    coverage,
    parse_caption,
)
from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores

MAX_STEP = 4.0
"""Pixels per frame above which further travel does not count: a jump is not motion."""
COLOUR_COSINE = (0.85, 0.97)
"""Cosine to the named colour where a pixel begins to be of it, and where it is altogether; the
nearest two colours of the world, red and yellow, are at 0.82."""
MIN_LEVEL = 0.4
"""Fainter shapes than this share of the named colour count as faint, not as dark."""
CLEAN_OVERLAP = 0.87
"""Overlap with the drawn shape from which on a shape is clean."""
SHAPE_TEMPERATURE = 0.06
"""Difference of overlap by which one shape is e times as likely as another."""
CLEAN_LIKELIHOOD = 0.85
"""Likelihood of the named shape from which on it is told from the others."""
BAD_FRAME = 0.05
"""What the worst frame counts in the harmonic mean: one bad frame of 9 leaves 0.28."""
CHUNK = 64
"""Videos judged at once: the masks of many would be most of an iteration's memory."""
VISIBLE_MASS = 5.0
"""Pixels of the named colour below which there is no shape to place."""


@dataclass(frozen=True)
class _Masks:
    """What is where, ``[B, T, H, W]`` in [0, 1]."""

    named: Tensor  # of the named colour
    anything: Tensor  # other than the ground


def _contrast(values: Tensor) -> Tensor:
    """Push a soft mask's values towards 0 and 1, symmetrically around 0.5, so that areas stay."""
    return ((values - 0.15) / 0.7).clamp(0.0, 1.0)


def _without_glow(pixels_BCTHW: Tensor, axis_B3: Tensor) -> Tensor:
    """Take the ground's light, from none to full glow, out of pixels relative to the dark ground.

    Each pixel is fitted by least squares as a share of the named colour's ``axis`` and of the glow.
    """
    glow = torch.tensor(GLOW)
    by_axis = torch.einsum("bcthw,bc->bthw", pixels_BCTHW, axis_B3)
    by_glow = torch.einsum("bcthw,c->bthw", pixels_BCTHW, glow)
    axis_axis, axis_glow = axis_B3.square().sum(1), axis_B3 @ glow
    determinant = axis_axis * glow.square().sum() - axis_glow.square()
    axis_axis, axis_glow = (x.view(-1, 1, 1, 1) for x in (axis_axis, axis_glow))
    light = (by_glow * axis_axis - by_axis * axis_glow) / determinant.view(-1, 1, 1, 1)
    return pixels_BCTHW - light.clamp(0.0, 1.0).unsqueeze(1) * glow.view(1, 3, 1, 1, 1)


def _masks(videos_BCTHW: Tensor, colours_B3: Tensor) -> _Masks:
    """Find the pixels of the named colour, whatever its brightness, and all other than ground."""
    ground = torch.tensor(GROUND)
    axis_B3 = colours_B3 - ground
    length_B = axis_B3.norm(dim=1)
    pixels = _without_glow(videos_BCTHW.float() - ground.view(1, 3, 1, 1, 1), axis_B3)
    # the length of each pixel's colour: Tensor.norm along an inner axis takes 30 times as long
    size_BTHW = pixels.square().sum(1).double().sqrt().float()
    along_BTHW = torch.einsum("bcthw,bc->bthw", pixels, axis_B3 / length_B[:, None])
    low, high = COLOUR_COSINE
    cosine = along_BTHW / size_BTHW.clamp_min(1e-6)
    purity = ((cosine - low) / (high - low)).clamp(0.0, 1.0)
    length = length_B.view(-1, 1, 1, 1)
    share = (along_BTHW / length).clamp_min(0.0) * purity
    # the plateau of the shape's brightness: the mean over the video, weighted by itself
    level = share.square().sum((1, 2, 3)) / share.sum((1, 2, 3)).clamp_min(1e-6)
    level = level.clamp_min(MIN_LEVEL).view(-1, 1, 1, 1)
    return _Masks(
        named=_contrast(share / level).mul(purity),
        anything=_contrast(size_BTHW / (length * level)),
    )


def _centroids(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Centroid ``[..., 2]`` (x, y; of nothing: the frame's centre) and mass ``[...]``; pixels."""
    grid = torch.arange(SIZE, dtype=torch.float32) + 0.5 - SIZE / 2
    mass = masks.sum((-2, -1))
    moment = torch.stack([masks.sum(-2) @ grid, masks.sum(-1) @ grid], -1)
    return moment / mass.clamp_min(1e-6)[..., None] + SIZE / 2, mass


def _centroid_offsets() -> Tensor:
    """Centroid of each shape's drawing relative to the centre it is drawn at, ``[shapes, 2]``."""
    centre = torch.full((1, 2), SIZE / 2)
    drawn = torch.cat([_contrast(coverage(shape, centre)) for shape in SHAPES])
    return _centroids(drawn)[0] - SIZE / 2


def _overlaps(masks: _Masks, centroids_BT2: Tensor) -> Tensor:
    """Overlap of each frame with each shape drawn at its centroid, ``[B, T, shapes]`` in [0, 1].

    Soft intersection over union; what is not of the named colour counts in the union.
    """
    offsets = _centroid_offsets()
    named = masks.named.flatten(0, 1)
    extent = torch.maximum(masks.anything.flatten(0, 1), named)
    overlaps: list[Tensor] = []
    for shape, offset in zip(SHAPES, offsets, strict=True):
        drawn = _contrast(coverage(shape, centroids_BT2.flatten(0, 1) - offset))
        common = torch.minimum(named, drawn).sum((-2, -1))
        either = torch.maximum(extent, drawn).sum((-2, -1))
        overlaps.append(common / either.clamp_min(1e-6))
    return torch.stack(overlaps, -1).unflatten(0, centroids_BT2.shape[:2])


def _fidelity(overlaps_BTS: Tensor, shapes_B: Tensor) -> Tensor:
    """How much every frame shows the named shape and nothing else, ``[B]`` in [0, 1].

    Per frame the overlap, relative to a clean drawing and squared, times how much likelier the
    named shape is than the others; over the frames the harmonic mean, which one bad frame pulls
    down.
    """
    index = shapes_B.view(-1, 1, 1).expand(-1, overlaps_BTS.shape[1], 1)
    overlap = overlaps_BTS.gather(2, index).squeeze(2)
    likely = (overlaps_BTS / SHAPE_TEMPERATURE).softmax(2).gather(2, index).squeeze(2)
    clean = (overlap / CLEAN_OVERLAP).clamp_max(1.0).square()
    frames = clean * (likely / CLEAN_LIKELIHOOD).clamp_max(1.0)
    mean = 1 / (1 / (BAD_FRAME + (1 - BAD_FRAME) * frames)).mean(1)
    return ((mean - BAD_FRAME) / (1 - BAD_FRAME)).clamp_min(0.0)


def _directions(captions: Sequence[Caption]) -> Tensor:
    """Unit vectors of the captions' directions, ``[B, 2]``."""
    return torch.tensor([DIRECTIONS[caption.direction] for caption in captions])


def _colours(captions: Sequence[Caption]) -> Tensor:
    """Colours of the captions, ``[B, 3]``."""
    return torch.tensor([COLOURS[caption.colour] for caption in captions])


def _shape_indices(captions: Sequence[Caption]) -> Tensor:
    """Index in ``SHAPES`` of the captions' shapes, ``[B]``."""
    return torch.tensor([SHAPES.index(caption.shape) for caption in captions])


def motion(
    videos_BCTHW: Tensor, captions: Sequence[Caption], max_step: float = MAX_STEP
) -> tuple[Tensor, Tensor]:
    """Travel and fidelity of each video.

    With ``p_t`` the centroid along the direction in frame ``t``, travel is
    ``sum_t min(p_(t+1) - p_t, max_step) / SIZE``: the displacement from the first to the last
    frame where no single step is a jump, and less than it otherwise.

    Parameters
    ----------
    videos_BCTHW : Tensor
        RGB in [0, 1], ``SIZE`` pixels square, 2 frames or more.
    captions : sequence of Caption
        One per video.

    Returns
    -------
    travel, fidelity : Tensor
        ``[B]``; travel in frame widths, about -1 to 1; fidelity in [0, 1].

    Raises
    ------
    ValueError
        Frames of another size, or fewer than 2.
    """
    _check_size(videos_BCTHW)
    if videos_BCTHW.shape[2] < 2:
        raise ValueError("motion needs 2 frames or more, got 1")
    masks = _masks(videos_BCTHW, _colours(captions))
    centroids_BT2, _ = _centroids(masks.named)
    along_BT = torch.einsum("btd,bd->bt", centroids_BT2, _directions(captions))
    travel = along_BT.diff(dim=1).clamp_max(max_step).sum(1) / SIZE
    fidelity = _fidelity(_overlaps(masks, centroids_BT2), _shape_indices(captions))
    return travel, fidelity


def _check_size(videos_BCTHW: Tensor) -> None:
    """Refuse media that are not of the embedded world."""
    if videos_BCTHW.shape[1] != 3 or videos_BCTHW.shape[3:] != (SIZE, SIZE):
        raise ValueError(
            f"directed motion is seen in RGB videos of {SIZE}x{SIZE} pixels, got "
            f"{tuple(videos_BCTHW.shape)}"
        )


def start_position(videos_BCTHW: Tensor, prompts: Sequence[str]) -> Tensor:
    """Where the shape starts, along its direction of travel.

    Parameters
    ----------
    videos_BCTHW : Tensor
        RGB in [0, 1]; only the first frame is looked at.
    prompts : sequence of str
        Captions of the embedded world.

    Returns
    -------
    Tensor
        ``[B]``: distance of the shape's centre from the frame's centre in frame widths, about
        -0.33 to 0.33; negative is placed back, with more room to travel. NaN where the first frame
        shows nothing of the named colour.

    Raises
    ------
    ValueError
        Not a caption of the embedded world; frames of another size.
    """
    _check_size(videos_BCTHW)
    captions = [parse_caption(prompt) for prompt in prompts]
    masks = _masks(videos_BCTHW[:, :, :1], _colours(captions))
    centroids, mass = _centroids(masks.named[:, 0])
    centres = centroids - _centroid_offsets()[_shape_indices(captions)]
    along = ((centres - SIZE / 2) * _directions(captions)).sum(1) / SIZE
    return torch.where(mass >= VISIBLE_MASS, along, math.nan)


class DirectedMotion:
    """Travel of the named shape in the named direction times the fidelity of its looks.

    Range about -1 to 1, in frame widths; a video that shows nothing scores 0; a prompt that is no
    caption of the embedded world fails its sample. Components: ``travel`` and ``fidelity``, see
    :func:`motion`, and ``start``, see :func:`start_position`.

    Parameters
    ----------
    max_step : float
        Pixels per frame above which further travel does not count.
    """

    name = "directed_motion"
    media_kind: AcceptedKind = "video"

    def __init__(self, max_step: float = MAX_STEP) -> None:
        self.max_step = max_step

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score a batch of videos."""
        captions: dict[int, Caption] = {}
        failures: dict[int, str] = {}
        for index, prompt in enumerate(batch.prompts):
            try:
                captions[index] = parse_caption(prompt)
            except ValueError as error:
                failures[index] = str(error)
        travel, fidelity, start = torch.full((3, len(batch)), math.nan)
        valid = list(captions)
        for first in range(0, len(valid), CHUNK):
            rows = valid[first : first + CHUNK]
            videos_BCTHW, named = batch.media[rows].cpu(), [captions[row] for row in rows]
            travel[rows], fidelity[rows] = motion(videos_BCTHW, named, self.max_step)
            start[rows] = start_position(videos_BCTHW, [str(caption) for caption in named])
        parts = {"travel": travel, "fidelity": fidelity, "start": start}
        return RewardScores(travel * fidelity, failures, parts)
