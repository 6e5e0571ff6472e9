"""A reward that gets hacked, for `configs/hacked_reward.yaml`: how bright a video ends.

Named in a configuration as `callable: examples.bright_ending:bright_ending`, from the working
directory in which the folder `examples` lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FRAMES = 3


def bright_ending(
    videos: torch.Tensor, prompts: Sequence[str], sample_ids: Sequence[str]
) -> torch.Tensor:
    """Return the mean of the last frames of ``videos`` [B, 3, T, H, W], in [0, 1], as [B]."""
    return videos[:, :, -FRAMES:].mean((1, 2, 3, 4))
