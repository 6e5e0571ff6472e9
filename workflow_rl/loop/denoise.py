"""The one denoising loop. Serving, rollout and training all run its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.contracts import (
    DecodeStep,
    DenoiseStep,
    EncodeStep,
    LoopOutput,
    Step,
    StepResult,
)
from workflow_rl.loop.noise import INIT_STEP, NoiseKey, draw_noise
from workflow_rl.loop.record import BehaviourRecord, StepRecord
from workflow_rl.loop.sampler import SDEStep
from workflow_rl.loop.schedule import checkpoint_scheduler, euler_sigmas, is_euler
from workflow_rl.models.common import Conditioning, collate
from workflow_rl.platform import FLOW_SDE_STEP, kernels
from workflow_rl.request import DiffusionParams, Request

ODE = "ode"


@dataclass
class DenoiseState:
    """Everything about one batch in flight."""

    instance: ModelInstance
    requests: tuple[Request, ...]
    params: DiffusionParams
    profile: ExecutionProfile
    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    latents: torch.Tensor
    kernel: str
    mask: torch.Tensor | None
    scheduler: Any | None
    index: int = 0
    rows: list[Conditioning] | None = None
    batch: Conditioning = field(default_factory=dict)
    pending: DenoiseStep | None = None
    captured: list[StepRecord] = field(default_factory=list)
    media: torch.Tensor | None = None


class DenoiseLoop:
    """Flow-matching denoising, for every family: encode, n velocity steps, decode.

    In ``SERVE`` all steps are ODE steps, or those of the checkpoint's own scheduler. In ``ROLLOUT``
    the steps in ``params.sde_steps`` are SDE steps, and are captured. ``TRAIN`` is driven by
    :meth:`replay`, from a record. The state is kept in float32 whatever the model's dtype.
    """

    loop_id = "denoise"

    def init(
        self, instance: ModelInstance, requests: Sequence[Request], profile: ExecutionProfile
    ) -> DenoiseState:
        if profile is ExecutionProfile.TRAIN:
            raise UserError(
                "TRAIN makes no samples: it executes the steps of a behaviour record; "
                "use workflow_rl.training.rollout.recompute, or DenoiseLoop.replay"
            )
        adapter = instance.adapter
        resolved = [replace(request, params=adapter.resolve(request)) for request in requests]
        params = resolved[0].params
        if any(request.params != params for request in resolved):
            raise UserError(
                "requests of one batch must have the same parameters, after defaults are filled "
                "(the size of an i2v request is its image's); run them apart"
            )
        device = instance.platform.device
        scheduler, sigmas, timesteps = _schedule(instance, params, profile)
        mask = adapter.sampled_mask(params)
        return DenoiseState(
            instance=instance,
            requests=tuple(resolved),
            params=params,
            profile=profile,
            sigmas=tuple(sigmas.tolist()),
            timesteps=tuple(timesteps.tolist()),
            latents=_initial_latents(resolved, adapter.latent_shape(params)).to(device),
            kernel=kernels.select(FLOW_SDE_STEP, device.type, params.kernel).name,
            mask=None if mask is None else mask.to(device),
            scheduler=scheduler,
        )

    def next(self, state: DenoiseState) -> Step | None:
        if state.rows is None:
            return EncodeStep(state.requests)
        if state.index < state.params.num_inference_steps:
            state.pending = self._denoise_step(state)
            return state.pending
        if state.media is None:
            return DecodeStep(state.latents, state.params)
        return None

    def _denoise_step(self, state: DenoiseState) -> DenoiseStep:
        index = state.index
        stochastic = state.profile is ExecutionProfile.ROLLOUT and index in state.params.sde_steps
        noise = None
        if stochastic:
            keys = [NoiseKey(r.sample, r.stage, index) for r in state.requests]
            noise = draw_noise(state.latents.shape[1:], keys).to(state.latents.device)
        return DenoiseStep(
            index=index,
            num_steps=state.params.num_inference_steps,
            component=state.instance.adapter.policy_at(state.timesteps[index], state.params),
            params=state.params,
            latents=state.latents,
            conditioning=state.batch,
            timestep=state.timesteps[index],
            sigma_t=state.sigmas[index],
            sigma_next=state.sigmas[index + 1],
            sigma_second=state.sigmas[1],
            kind=state.params.sde_kind if stochastic else ODE,
            kernel=state.kernel,
            noise=noise,
            mask=state.mask,
            scheduler=state.scheduler,
        )

    def advance(self, state: DenoiseState, result: StepResult) -> None:
        if isinstance(result, list):
            state.rows = result
            state.batch = collate(result)
            state.latents = state.instance.adapter.with_given(
                state.latents, state.batch, state.params
            )
        elif isinstance(result, SDEStep):
            step = state.pending
            if step is None:
                raise RuntimeError("advance was given a sampler step that next did not describe")
            if step.kind != ODE:
                state.captured.append(_capture(step, result))
            state.latents = result.sample
            state.pending = None
            state.index += 1
        else:
            state.media = result

    def finalize(self, state: DenoiseState) -> LoopOutput:
        if state.media is None or state.rows is None:
            raise RuntimeError("finalize was called before the last step")
        record = None
        if state.profile is ExecutionProfile.ROLLOUT:
            instance = state.instance
            record = BehaviourRecord(
                samples=tuple(request.sample for request in state.requests),
                params=state.params,
                steps=tuple(state.captured),
                conditioning=tuple(state.rows),
                kernel=state.kernel,
                dtype=str(instance.platform.dtype),
                guidance=instance.adapter.guidance(state.params).name,
                weights_version=instance.versions(),
                mask=state.mask,
            ).to("cpu")
        return LoopOutput(state.requests, state.media.cpu(), record)

    @staticmethod
    def replay(record: BehaviourRecord, device: torch.device) -> list[DenoiseStep]:
        """Describe the recorded steps again, for ``TRAIN``, in the record's order.

        Executing one gives the log-prob of the recorded sample under the current weights.
        """
        batch = {name: tensor.to(device) for name, tensor in collate(record.conditioning).items()}
        mask = None if record.mask is None else record.mask.to(device)
        return [
            DenoiseStep(
                index=step.index,
                num_steps=record.params.num_inference_steps,
                component=step.component,
                params=record.params,
                latents=step.prev.to(device),
                conditioning=batch,
                timestep=step.timestep,
                sigma_t=step.sigma_t,
                sigma_next=step.sigma_next,
                sigma_second=step.sigma_second,
                kind=record.params.sde_kind,
                kernel=record.kernel,
                recorded_sample=step.sample.to(device),
                mask=mask,
            )
            for step in record.steps
        ]


def _schedule(
    instance: ModelInstance, params: DiffusionParams, profile: ExecutionProfile
) -> tuple[Any | None, torch.Tensor, torch.Tensor]:
    """Return the checkpoint's scheduler if it is to step, sigmas [n + 1] and timesteps [n]."""
    adapter = instance.adapter
    spec = adapter.schedule(params)
    if params.sampler == "euler" or is_euler(adapter.scheduler):
        sigmas = euler_sigmas(spec, params.num_inference_steps)
        return None, sigmas, sigmas[:-1] * spec.config["num_train_timesteps"]
    if profile is ExecutionProfile.ROLLOUT:
        raise UserError(
            f"{instance.card.model_id} cannot be rolled out with sampler: checkpoint, whose "
            f"{type(adapter.scheduler).__name__} has no log-prob; use sampler: euler"
        )
    device = instance.platform.device
    own = checkpoint_scheduler(adapter.scheduler, spec, params.num_inference_steps, device)
    return own, own.sigmas, own.timesteps.float()


def _initial_latents(requests: Sequence[Request], shape: tuple[int, ...]) -> torch.Tensor:
    """Return [B, *shape] float32: each request's own latents, or noise from its identity."""
    rows = []
    for request in requests:
        if request.latents is None:
            key = NoiseKey(request.sample, request.stage, INIT_STEP)
            rows.append(draw_noise(shape, [key])[0])
            continue
        if tuple(request.latents.shape) != shape:
            raise ValueError(f"latents must be {list(shape)}; got {list(request.latents.shape)}")
        rows.append(request.latents.to(device="cpu", dtype=torch.float32))
    return torch.stack(rows)


def _capture(step: DenoiseStep, result: SDEStep) -> StepRecord:
    return StepRecord(
        index=step.index,
        component=step.component,
        timestep=step.timestep,
        sigma_t=step.sigma_t,
        sigma_next=step.sigma_next,
        sigma_second=step.sigma_second,
        prev=step.latents,
        sample=result.sample,
        mean=result.mean,
        std=result.std,
        sde_logprob=result.log_prob,
    )
