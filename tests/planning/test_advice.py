"""What the plan says to change lowers what it counts."""

from __future__ import annotations

import pytest

from workflow_rl.config import RunConfig, load_config
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.planning.advice import advise
from workflow_rl.planning.architecture import find_architecture
from workflow_rl.planning.run import Hardware, Planner, RunNumbers

SMALL = (
    "stages.i2v.num_frames=5",
    "stages.t2i.rollout_batch_size=4",
    "stages.i2v.rollout_batch_size=8",
    "evaluation.batch_size=2",
)
CHECKPOINTED = tuple(f"stages.{n}.memory.gradient_checkpointing=true" for n in EMBEDDED_FOLDERS)
HELD = (
    *CHECKPOINTED,
    *(f"stages.{name}.rollout_batch_size=1" for name in EMBEDDED_FOLDERS),
    "evaluation.batch_size=1",
)
"""What is held all the time peaks."""


@pytest.fixture(scope="module")
def planner() -> Planner:
    """Return one planner for all: what the configurations share is counted once."""
    architectures = {name: find_architecture(f, name) for name, f in EMBEDDED_FOLDERS.items()}
    return Planner(architectures, num_prompts=4, num_evaluated=2)


def _hardware(memory: int) -> Hardware:
    return Hardware(1, memory, 1.0, 1.0)


def _count(planner: Planner, overrides: tuple[str, ...]) -> tuple[RunConfig, RunNumbers]:
    config = load_config("configs/quickstart.yaml", [*SMALL, *overrides])
    return config, planner.count(config, _hardware(1))


@pytest.mark.parametrize(
    ("overrides", "goal", "key"),
    [
        ((), 0.95, "stages.i2v.memory.gradient_checkpointing"),
        ((*CHECKPOINTED, "stages.i2v.micro_batch_size=32"), 0.8, "stages.i2v.micro_batch_size"),
        ((*HELD, "evaluation.batch_size=8"), 0.9, "evaluation.batch_size"),
        (HELD, 0.9, "training.swap_stages"),
        ((*HELD, "training.swap_stages=true"), 0.9, "stages.t2i.lora.rank"),
    ],
)
def test_each_change_lowers_the_counted_peak(
    planner: Planner, overrides: tuple[str, ...], goal: float, key: str
) -> None:
    config, start = _count(planner, overrides)
    memory = int(goal * start.peak.bytes)
    advice = advise(planner, config, _hardware(memory), planner.count(config, _hardware(memory)))
    assert advice.after.fits
    assert key in [change.key for change in advice.changes]
    peak, applied = start.peak.bytes, list(overrides)
    for change in advice.changes:
        applied.append(change.override)
        _, now = _count(planner, tuple(applied))
        assert now.peak.bytes == change.peak
        assert now.peak.bytes < peak
        peak = now.peak.bytes
    assert peak == advice.after.peak.bytes <= memory
