"""The control: a reward that says nothing. No weight may move under it."""

import torch

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores


class ConstantReward:
    """The same score for every sample.

    Parameters
    ----------
    value : float
        The score.
    """

    name = "constant"
    media_kind: AcceptedKind = "any"

    def __init__(self, value: float = 0.0) -> None:
        self.value = float(value)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score every sample ``value``."""
        return RewardScores(torch.full((len(batch),), self.value))
