"""Measure what a set of generated videos shows: which shape, which colour, which way it moves.

The reader is a template match, independent of any model: every frame is compared with the drawn
world.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from workflow_rl.embedded import world


@dataclass(frozen=True)
class Quality:
    """Shares in [0, 1] of videos that show what their caption says."""

    colour: float
    shape: float
    direction: float
    all_three: float
    motion_pixels: float
    """Mean distance travelled along the caption's direction."""


def foreground(frames_N3HW: Tensor, grounds_N3HW: Tensor) -> tuple[Tensor, Tensor]:
    """Split frames in [0, 1] by the colour that explains best how they differ from their grounds.

    Returns
    -------
    tuple
        Soft masks `[N, H, W]` in [0, 1] and colour indices `[N]` into `world.COLOURS`.
    """
    colours_K3 = torch.tensor(list(world.COLOURS.values()))
    axes_NK3HW = colours_K3.view(1, -1, 3, 1, 1) - grounds_N3HW.unsqueeze(1)
    excess_N13HW = (frames_N3HW - grounds_N3HW).unsqueeze(1)
    amount_NK1HW = (excess_N13HW * axes_NK3HW).sum(2, keepdim=True)
    amount_NK1HW = (amount_NK1HW / axes_NK3HW.square().sum(2, keepdim=True)).clamp(0, 1)
    error_NK = (excess_N13HW - amount_NK1HW * axes_NK3HW).square().sum(dim=(2, 3, 4))
    colour = error_NK.argmin(dim=1)
    return amount_NK1HW[torch.arange(len(colour)), colour, 0], colour


def locate_shapes(masks_NHW: Tensor) -> tuple[Tensor, Tensor]:
    """Find the best shape and its centre by least squares over templates at every pixel.

    Returns
    -------
    tuple
        Shape indices `[N]` into `world.SHAPES` and centres `[N, 2]` as (x, y) in pixels.
    """
    middle = torch.full((1, 2), world.SIZE / 2)
    offsets = torch.tensor([(x, y) for y in (0.0, 0.5) for x in (0.0, 0.5)])
    scores = []
    for shape in world.SHAPES:
        templates = world.coverage(shape, middle + offsets)[:, 9:24, 9:24].unsqueeze(1)
        match = conv2d(masks_NHW.unsqueeze(1), templates, padding=7)
        # |mask - template|^2 up to |mask|^2, which is the same for all
        scores.append(templates.square().sum(dim=(1, 2, 3)).view(1, -1, 1, 1) - 2 * match)
    stacked = torch.stack(scores, dim=1).flatten(2)
    best = stacked.amin(dim=2).argmin(dim=1)
    place = stacked[torch.arange(len(best)), best].argmin(dim=1)
    offset, pixel = place // world.SIZE**2, place % world.SIZE**2
    corner = torch.stack([pixel % world.SIZE, pixel // world.SIZE], dim=1)
    return best, corner + offsets[offset]


def measure(videos_BTCHW: Tensor, captions: list[world.Caption]) -> Quality:
    """Compare videos `[B, T, 3, H, W]` in [0, 1] with their captions.

    Colour and shape are the majority over the frames. The direction is right when the centre
    travels at least half a pixel along it and less than that across it.
    """
    count, frames = videos_BTCHW.shape[:2]
    grounds = torch.stack([world.ground(caption.direction) for caption in captions])
    masks, colour = foreground(videos_BTCHW.flatten(0, 1), grounds.repeat_interleave(frames, dim=0))
    shape, centre = locate_shapes(masks)
    colour_B = colour.view(count, frames).mode(dim=1).values
    shape_B = shape.view(count, frames).mode(dim=1).values
    path = centre.view(count, frames, 2)
    travel = path[:, -2:].mean(dim=1) - path[:, :2].mean(dim=1)
    way = torch.tensor([world.DIRECTIONS[c.direction] for c in captions])
    along, across = (travel * way).sum(dim=1), (travel * way.flip(1)).sum(dim=1).abs()
    colours, shapes = list(world.COLOURS), list(world.SHAPES)
    colour_right = colour_B == torch.tensor([colours.index(c.colour) for c in captions])
    shape_right = shape_B == torch.tensor([shapes.index(c.shape) for c in captions])
    moves_right = (along > 0.5) & (across < along)
    return Quality(
        colour=colour_right.float().mean().item(),
        shape=shape_right.float().mean().item(),
        direction=moves_right.float().mean().item(),
        all_three=(colour_right & shape_right & moves_right).float().mean().item(),
        motion_pixels=along.mean().item(),
    )
