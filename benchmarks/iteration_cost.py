"""What the framework costs: one training iteration over the same model calls made by hand.

Run with ``make bench`` (or ``python -m benchmarks.iteration_cost``). Prints three figures:

- iteration time / model-call time: same shapes, forward and backward, nothing around them;
- text encoder calls per distinct prompt and stage, over all iterations of the run;
- peak resident memory with 4 times the prompts per iteration / with the prompts as configured.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workflow_rl.config import load_config, load_prompts
from workflow_rl.loop.denoise import DenoiseLoop
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.training.build import build_method
from workflow_rl.training.data import PromptSchedule
from workflow_rl.training.methods.chain import ChainRLMethod
from workflow_rl.training.policy import StagePolicy
from workflow_rl.workflow import StageOutput

CONFIG = Path("configs/quickstart.yaml")
ROUNDS = 8


def build(prompts_per_iteration: int | None = None) -> tuple[ChainRLMethod, PromptSchedule]:
    """Return the quickstart's method and prompts."""
    overrides = (
        []
        if prompts_per_iteration is None
        else [f"data.prompts_per_iteration={prompts_per_iteration}"]
    )
    config = load_config(CONFIG, overrides)
    records = tuple(load_prompts(config.data.prompts, list(config.stages)))
    schedule = PromptSchedule(records, config.data.prompts_per_iteration, config.seed)
    return build_method(config), schedule


def train_iteration(method: ChainRLMethod, schedule: PromptSchedule, iteration: int) -> None:
    """Run one training iteration."""
    prompts = schedule.at(iteration)
    method.managed_train_step({"prompts": prompts, "seeds": [0] * len(prompts)}, iteration)


class BareCalls:
    """The model calls of one iteration, on tensors kept from a real one.

    Those of the text encoders are among them, once per prompt and stage, as for the new prompts of
    a run's first epoch.
    """

    def __init__(self, method: ChainRLMethod) -> None:
        if method.last is None:
            raise RuntimeError("run an iteration first")
        self.stages = list(zip(method.policies, method.last.outputs, strict=True))
        self.batches = {
            policy.name: self._batches(policy, output) for policy, output in self.stages
        }

    @staticmethod
    def _batches(policy: StagePolicy, output: StageOutput) -> list[list[Any]]:
        record: BehaviourRecord | None = output.record
        if record is None:
            raise RuntimeError("every stage must train")
        size = policy.settings.plan.slots
        device = policy.student.platform.device
        return [
            DenoiseLoop.replay(record.rows(start, start + size), device)
            for start in range(0, len(record), size)
        ]

    def run(self) -> None:
        """Make every model call of an iteration once."""
        for policy, output in self.stages:
            self._rollout(policy, output)
        for policy, _ in self.stages:
            self._train(policy)

    @staticmethod
    def _encode_texts(policy: StagePolicy, output: StageOutput) -> None:
        adapter = policy.student.adapter
        length = adapter.text_length(output.requests[0].params)
        for text in dict.fromkeys(request.prompt for request in output.requests):
            adapter.encode_text(text, length)

    @torch.no_grad()
    def _rollout(self, policy: StagePolicy, output: StageOutput) -> None:
        adapter = policy.student.adapter
        size = policy.settings.plan.slots
        self._encode_texts(policy, output)
        for number, steps in enumerate(self.batches[policy.name]):
            requests = output.requests[number * size : (number + 1) * size]
            if requests[0].image_CHW is not None:
                adapter.encode_media(requests, steps[0].params)
            for index in range(steps[0].num_steps):
                step = steps[min(index, len(steps) - 1)]
                adapter.velocity(
                    step.component, step.latents, step.timestep, step.conditioning, step.params
                )
            adapter.decode(steps[-1].latents, steps[-1].params)

    def _train(self, policy: StagePolicy) -> None:
        for steps in self.batches[policy.name]:
            for step in steps:
                arguments = (
                    step.component, step.latents, step.timestep, step.conditioning, step.params
                )  # fmt: skip
                if policy.reference is not None:
                    with torch.no_grad():
                        policy.reference.adapter.velocity(*arguments)
                policy.student.adapter.velocity(*arguments).square().mean().backward()
        for parameter in policy.parameters().values():
            parameter.grad = None


def timed(function: Callable[[], None]) -> float:
    """Return the wall-clock seconds of one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def cost_ratio() -> dict[str, float]:
    """Time iterations and bare calls in turns; return medians and the median of their ratios."""
    method, schedule = build()
    for iteration in range(2):
        train_iteration(method, schedule, iteration)
    bare = BareCalls(method)
    bare.run()
    pairs = [
        (timed(partial(train_iteration, method, schedule, i + 2)), timed(bare.run))
        for i in range(ROUNDS)
    ]
    return {
        "iteration_s": statistics.median(whole for whole, _ in pairs),
        "model_calls_s": statistics.median(calls for _, calls in pairs),
        "ratio": statistics.median(whole / calls for whole, calls in pairs),
    }


@contextmanager
def counted_text_encoders(method: ChainRLMethod) -> Any:
    """Count the forward passes of every stage's text encoder."""
    counts = {policy.name: 0 for policy in method.policies}
    hooks = []
    for policy in method.policies:

        def count(*_: object, name: str = policy.name) -> None:
            counts[name] += 1

        hooks.append(policy.student.component("text_encoder").register_forward_hook(count))
    yield counts
    for hook in hooks:
        hook.remove()


def text_encoder_calls() -> dict[str, float]:
    """Return text encoder calls per distinct prompt, by stage, over several passes of prompts."""
    method, schedule = build()
    seen: set[str] = set()
    with counted_text_encoders(method) as counts:
        for iteration in range(4):
            seen |= {record.prompt for record in schedule.at(iteration)}
            train_iteration(method, schedule, iteration)
        for iteration in range(2):
            train_iteration(method, schedule, iteration)
    return {name: count / len(seen) for name, count in counts.items()}


def peak_memory(prompts_per_iteration: int) -> int:
    """Return the peak resident bytes of a fresh process that runs two iterations."""
    command = [sys.executable, "-m", "benchmarks.iteration_cost", str(prompts_per_iteration)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(printed)["peak_bytes"])


def main() -> None:
    """Print the figures; with a number of prompts as argument, only that run's peak memory."""
    if len(sys.argv) > 1:
        method, schedule = build(int(sys.argv[1]))
        for iteration in range(2):
            train_iteration(method, schedule, iteration)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"peak_bytes": peak}))
        return
    prompts = load_config(CONFIG).data.prompts_per_iteration
    cost = cost_ratio()
    print(
        f"iteration / model calls: {cost['ratio']:.3f} "
        f"({cost['iteration_s']:.3f} s / {cost['model_calls_s']:.3f} s, median of {ROUNDS})"
    )
    for name, calls in text_encoder_calls().items():
        print(f"text encoder calls per prompt, {name}: {calls:g}")
    small, large = peak_memory(prompts), peak_memory(4 * prompts)
    print(
        f"peak memory, {4 * prompts} prompts / {prompts} prompts: {large / small:.3f} "
        f"({large / 2**20:.0f} MiB / {small / 2**20:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
