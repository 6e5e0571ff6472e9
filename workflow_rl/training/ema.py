"""Exponential moving average of trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class ExponentialMovingAverage:
    """Keeps avg <- decay * avg + (1 - decay) * weights, in float32.

    After n updates the decay is capped at (1 + n) / (10 + n), so that a short run is not held at
    its start. The cap acts for about the first 9 / (1 - decay) updates.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], decay: float) -> None:
        self.decay = decay
        self.num_updates = 0
        self.average = {name: w.detach().float().clone() for name, w in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take in the weights after an optimiser step."""
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.num_updates += 1
        for name, average in self.average.items():
            average.lerp_(weights[name].detach().float(), 1 - decay)
