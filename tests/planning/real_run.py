"""A real iteration on the CPU beside its plan: memory tensor by tensor, and FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from workflow_rl.config import PromptRecord, RunConfig
from workflow_rl.instance import ContentCache
from workflow_rl.planning.architecture import Architecture
from workflow_rl.planning.measure import Meter
from workflow_rl.planning.run import Hardware, Planner
from workflow_rl.planning.texts import TextLengths
from workflow_rl.training.build import build_method

PHASES = ("encode", "rollout", "decode", "training", "publication")
"""Phases of an iteration. The optimiser's step is another on the CPU: tensor by tensor."""


class Iteration(NamedTuple):
    """Most bytes that are there at once in an iteration, and its FLOPs."""

    peak: int
    flops: int


def planned(
    config: RunConfig,
    architectures: Mapping[str, Architecture],
    num_prompts: int,
    texts: Mapping[str, TextLengths],
) -> Iteration:
    """Return what the plan says of an iteration, the CPU's memory included."""
    planner = Planner(architectures, num_prompts, 1, texts)
    numbers = planner.count(config, Hardware(1, 10**12, 1.0, 1.0))
    bottlenecks = numbers.bottlenecks(swapped=False)
    peak = max(b.bytes + numbers.host_bytes_in(b) for b in bottlenecks if b.phase in PHASES)
    return Iteration(peak, numbers.total_flops)


def real(config: RunConfig, prompts: list[PromptRecord]) -> Iteration:
    """Return what the second iteration of a run takes: the first made the optimiser's state.

    Its texts are encoded as if they were new.
    """
    with Meter() as meter:
        method = build_method(config)
        for policy in method.policies:
            for module in policy.student.adapter.modules.values():
                meter.take([*module.parameters(), *module.buffers()])
        for iteration in range(2):
            for policy in method.policies:
                policy.student.caches = ContentCache()
            meter.peak, meter.flops = meter.now, 0
            method.managed_train_step({"prompts": prompts, "seeds": [0] * len(prompts)}, iteration)
    return Iteration(meter.peak, meter.flops)
