"""The C2 gate's figure."""

from __future__ import annotations

import math

import pytest
import torch

from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.request import DiffusionParams
from workflow_rl.training.update import C2Error, LargestLogRatio

RECORD = BehaviourRecord(("a", "b"), DiffusionParams(), (), (), "k", "d", "none", {})  # type: ignore[arg-type]


def test_the_gate_sees_finite_samples_only() -> None:
    gate = LargestLogRatio()
    gate.see(torch.tensor([0.25, 0.5]), 1, RECORD, torch.tensor([True, False]))
    gate.see(torch.tensor([0.0, math.nan]), 2, RECORD, torch.tensor([True, False]))
    assert (gate.value, gate.step, gate.sample) == (0.25, 1, "a")
    gate.check(0.25, "t2i")
    with pytest.raises(C2Error, match="stage 't2i', step 1, sample a"):
        gate.check(0.2, "t2i")


def test_a_recomputation_that_is_not_finite_is_caught() -> None:
    gate = LargestLogRatio()
    gate.see(torch.tensor([0.0, math.nan]), 0, RECORD, torch.tensor([True, True]))
    with pytest.raises(C2Error, match="sample b"):
        gate.check(1e9, "t2i")
