"""The rewards of the examples give the answers they promise."""

from __future__ import annotations

import torch

from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.registry import build_reward

CALLABLE = "examples.image_reward:room_to_move"


def _score(images_BCHW: torch.Tensor, prompts: list[str]) -> list[float]:
    reward = build_reward({"callable": CALLABLE}).reward
    ids = [str(row) for row in range(len(prompts))]
    return score_safely(reward, RewardBatch(prompts, ids, images_BCHW, "image")).scores.tolist()


def test_room_is_what_lies_before_the_shape() -> None:
    images = torch.zeros(6, 3, 9, 9)
    images[:4, 1, 4, 8] = 1.0  # at the right edge, half way down
    images[4, 1, 0, 4] = 1.0  # at the top edge
    prompts = [f"a dot moving {word}" for word in ("left", "right", "up", "down", "down", "up")]
    scores = _score(images, prompts)
    assert scores[:5] == [1.0, 0.0, 0.5, 0.5, 1.0]
    assert scores[5] != scores[5], "an image without light has failed"
    assert _score(images[:1], ["a dot"]) != [1.0]
