"""Executes the steps that loops describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.contracts import (
    DecodeStep,
    DenoiseStep,
    EncodeStep,
    Loop,
    LoopOutput,
    Step,
    StepResult,
)
from workflow_rl.loop.denoise import DenoiseLoop
from workflow_rl.loop.sampler import SDEStep, flow_sde_step_with_logprob
from workflow_rl.request import Request

LOOPS: dict[str, Loop[Any]] = {DenoiseLoop.loop_id: DenoiseLoop()}
"""Loops by id. A new loop adds one entry."""


@dataclass(frozen=True)
class ProgressEvent:
    """One executed step: ``step`` of ``num_steps`` denoising steps, for a batch of requests."""

    model_id: str
    step: int
    num_steps: int
    batch_size: int


OnProgress = Callable[[ProgressEvent], None]


def execute_denoise(instance: ModelInstance, step: DenoiseStep) -> SDEStep:
    """Execute one denoising step in the caller's gradient mode: the model, then the sampler.

    Serving, rollout and training all come through here.
    """
    velocity = instance.adapter.velocity(
        step.component, step.latents, step.timestep, step.conditioning, step.params
    )
    if step.scheduler is not None:
        return _scheduler_step(step.scheduler, step, velocity)
    return flow_sde_step_with_logprob(
        step.latents,
        velocity,
        step.sigma_t,
        step.sigma_next,
        noise=step.noise,
        prev_sample=step.recorded_sample,
        noise_scale=step.params.sde_noise_scale,
        kind=step.kind,
        sigma_max=step.sigma_second,
        mask=step.mask,
        kernel=step.kernel,
    )


def _scheduler_step(scheduler: Any, step: DenoiseStep, velocity: torch.Tensor) -> SDEStep:
    """Take the step that a checkpoint's scheduler takes; it has no density."""
    timestep = scheduler.timesteps[step.index]
    stepped = scheduler.step(
        velocity.to(step.latents.dtype), timestep, step.latents, return_dict=False
    )[0]
    sample = stepped if step.mask is None else torch.where(step.mask, stepped, step.latents)
    nothing_B = torch.zeros(len(sample), device=sample.device)
    return SDEStep(sample, nothing_B, sample, nothing_B)


@torch.no_grad()
def execute(instance: ModelInstance, step: Step) -> StepResult:
    """Execute any step without gradient."""
    match step:
        case EncodeStep(requests=requests):
            return instance.adapter.encode(instance, requests)
        case DenoiseStep():
            return execute_denoise(instance, step)
        case DecodeStep(latents=latents, params=params):
            return instance.adapter.decode(latents, params)


def get_loop(instance: ModelInstance, loop_id: str) -> Loop[Any]:
    """Return the loop ``loop_id``; raise a UserError if ``instance`` cannot be driven by it."""
    if loop_id not in LOOPS or loop_id not in instance.card.loops:
        raise UserError(
            f"{instance.card.model_id} has no loop {loop_id!r}; it has {list(instance.card.loops)}"
        )
    return LOOPS[loop_id]


class Job:
    """One batch of requests in flight on one instance, advanced one step at a time."""

    def __init__(
        self,
        instance: ModelInstance,
        loop_id: str,
        requests: Sequence[Request],
        profile: ExecutionProfile,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.instance = instance
        self._loop = get_loop(instance, loop_id)
        self._state = self._loop.init(instance, requests, profile)
        self._on_progress = on_progress
        self.output: LoopOutput | None = None

    def step(self) -> bool:
        """Execute one step; return whether there is more to do."""
        if self.output is not None:
            return False
        step = self._loop.next(self._state)
        if step is None:
            self.output = self._loop.finalize(self._state)
            return False
        self._loop.advance(self._state, execute(self.instance, step))
        if self._on_progress is not None and isinstance(step, DenoiseStep):
            self._on_progress(
                ProgressEvent(
                    self.instance.card.model_id, step.index + 1, step.num_steps, len(step.latents)
                )
            )
        return True

    def run(self) -> LoopOutput:
        """Execute every remaining step and return the output."""
        while self.step():
            pass
        if self.output is None:
            raise RuntimeError("the loop ended without an output")
        return self.output
