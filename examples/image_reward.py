"""A reward on images, for `configs/t2i_only.yaml`: is there room for the motion to come?

Named in a configuration as `callable: examples.image_reward:room_to_move`, from the working
directory in which the folder `examples` lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

TOWARDS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
"""Last word of a caption → direction (x, y), y downwards."""
GROUND = 0.4
"""What is darker than this is ground."""


def room_to_move(
    images: torch.Tensor, prompts: Sequence[str], sample_ids: Sequence[str]
) -> list[float | None]:
    """Score how far the bright part of an image lies from the edge that its caption names.

    Parameters
    ----------
    images
        [B, 3, H, W] in [0, 1], bright shapes on a dark ground.
    prompts
        Captions such as ``a red circle moving left``.

    Returns
    -------
    list of float
        0 (at that edge) to 1 (at the opposite one), 0.5 in the middle; None for a caption that
        names no direction, or an image without light.
    """
    light_BHW = (images.amax(1) - GROUND).clamp_min(0.0)
    height, width = light_BHW.shape[1:]
    total_B = light_BHW.sum((1, 2))
    x_B = (light_BHW.sum(1) * torch.linspace(-0.5, 0.5, width)).sum(1) / total_B
    y_B = (light_BHW.sum(2) * torch.linspace(-0.5, 0.5, height)).sum(1) / total_B
    scores: list[float | None] = []
    for prompt, x, y, light in zip(
        prompts, x_B.tolist(), y_B.tolist(), total_B.tolist(), strict=True
    ):
        direction = TOWARDS.get(prompt.split()[-1])
        if direction is None or light == 0:
            scores.append(None)
        else:
            scores.append(0.5 - x * direction[0] - y * direction[1])
    return scores
