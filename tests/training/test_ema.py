"""The moving average and its cap."""

from __future__ import annotations

import pytest
import torch

from workflow_rl.training.ema import ExponentialMovingAverage


def _after(decay: float, updates: int) -> float:
    """Return the average that began at 1 after ``updates`` of weights 0."""
    ema = ExponentialMovingAverage({"w": torch.ones(1)}, decay)
    for _ in range(updates):
        ema.update({"w": torch.zeros(1, dtype=torch.bfloat16)})
    return float(ema.average["w"])


def test_recursion_with_the_cap() -> None:
    """Decays 1/10, 2/11, 3/12 at first: the average of zeros is their product."""
    assert _after(0.9, 3) == pytest.approx(1 / 10 * 2 / 11 * 3 / 12)


def test_the_cap_ends_after_about_nine_over_one_minus_decay() -> None:
    decay = 0.8  # (1 + n) / (10 + n) reaches it at n = 35
    assert _after(decay, 36) / _after(decay, 35) == pytest.approx(decay)
    assert _after(decay, 37) / _after(decay, 36) == pytest.approx(decay)
    assert _after(decay, 34) / _after(decay, 33) == pytest.approx(34 / 43)


def test_the_average_is_a_float32_copy() -> None:
    weights = {"w": torch.ones(2, dtype=torch.bfloat16)}
    ema = ExponentialMovingAverage(weights, 0.9)
    weights["w"].zero_()
    assert ema.average["w"].dtype is torch.float32
    assert ema.average["w"].tolist() == [1.0, 1.0]
