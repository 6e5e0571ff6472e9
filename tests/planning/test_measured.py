"""The plan's peak against that of a real run, both counted tensor by tensor.

Resident memory says the same where freed memory is given back (``benchmarks.plan_vs_measured``),
but depends on the allocator and on what else the process has loaded.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from workflow_rl.cli.plan import with_model_defaults
from workflow_rl.config import RunConfig, load_config, load_prompts
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.planning.architecture import find_architecture
from workflow_rl.planning.measure import Meter
from workflow_rl.planning.memory import CHECKSUM
from workflow_rl.planning.run import Hardware, Planner, RunNumbers
from workflow_rl.training.build import build_method
from workflow_rl.training.weight_sync import weights_checksum

SMALL = (
    "data.prompts_per_iteration=1",
    "stages.t2i.samples=4",
    "stages.t2i.num_inference_steps=3",
    "stages.i2v.num_inference_steps=3",
    "stages.i2v.sde.window={mode: all}",
    "rewards=[{name: frame_change}]",
    "training.c2_tolerance=1.0",
)
LORA = ("stages.t2i.lora={rank: 4}", "stages.i2v.lora={rank: 4}")
CHECKPOINTED = tuple(f"stages.{n}.memory.gradient_checkpointing=true" for n in EMBEDDED_FOLDERS)
GUIDED = ("stages.t2i.guidance_scale=2.0", "stages.i2v.guidance_scale=2.0")
PHASES = ("encode", "rollout", "decode", "training", "publication")
"""Phases of an iteration. The optimiser's step is another on the CPU: tensor by tensor."""


def _config(overrides: tuple[str, ...], folder: Path) -> RunConfig:
    fixed = [*SMALL, f"output_dir={folder}", *overrides]
    return with_model_defaults(load_config("configs/quickstart.yaml", fixed))


def planned_peak(config: RunConfig) -> int:
    """Return the plan's bytes of an iteration, those of the CPU's memory included."""
    architectures = {name: find_architecture(f, name) for name, f in EMBEDDED_FOLDERS.items()}
    planner = Planner(architectures, num_prompts=1, num_evaluated=1)
    numbers: RunNumbers = planner.count(config, Hardware(1, 10**12, 1.0, 1.0))
    bottlenecks = numbers.bottlenecks(swapped=False)
    peak = max(b.bytes for b in bottlenecks if b.phase in PHASES)
    return peak + numbers.iteration_host_bytes


def counted_peak(config: RunConfig) -> int:
    """Return the most bytes of tensors alive in a real second iteration."""
    prompts = load_prompts(config.data.prompts, list(config.stages))[:1]
    with Meter() as meter:
        method = build_method(config)
        for iteration in range(2):
            meter.peak = meter.now
            method.managed_train_step({"prompts": prompts, "seeds": [0]}, iteration)
    return meter.peak


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        CHECKPOINTED,
        LORA,
        (*GUIDED, "stages.t2i.cfg_batching=batched", "stages.i2v.micro_batch_size=2"),
    ],
    ids=["full", "checkpointed", "lora", "guided"],
)
def test_planned_peak_is_that_of_a_run(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = _config(overrides, tmp_path)
    assert planned_peak(config) == pytest.approx(counted_peak(config), rel=0.1)


def test_the_optimizers_step_as_a_gpu_takes_it() -> None:
    """All tensors at once: beside the gradients a working copy of each."""
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Meter() as meter:
        optimizer.step()
    assert meter.peak == pytest.approx(8 * 1000 * 4, rel=0.1)


def test_a_checksum_takes_what_is_planned_for_it() -> None:
    weights = {"a": torch.ones(100), "b": torch.ones(100_000), "c": torch.ones(100)}
    with Meter() as meter:
        weights_checksum(weights)
    assert meter.peak == pytest.approx(CHECKSUM * 100_000, rel=0.1)
