"""Rollout = serve + capture: the shared loop, driven over many requests in batches of ``slots``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.denoise import DenoiseLoop
from workflow_rl.loop.record import BehaviourRecord, StepRecord
from workflow_rl.loop.sampler import SDEStep
from workflow_rl.platform import FLOW_SDE_STEP, kernels
from workflow_rl.request import Request
from workflow_rl.runtime.driver import OnProgress, execute_denoise
from workflow_rl.runtime.engine import run_requests


def rollout_loop(
    instance: ModelInstance,
    loop_id: str,
    request: Request | Sequence[Request],
    *,
    slots: int = 16,
    profile: ExecutionProfile = ExecutionProfile.ROLLOUT,
    on_progress: OnProgress | None = None,
) -> tuple[torch.Tensor, BehaviourRecord | None]:
    """Drive the loop over requests and return what they made and what happened.

    Parameters
    ----------
    instance
        The resident model; the same one that serves.
    loop_id
        ``denoise``.
    request
        One request or many; they share their parameters.
    slots
        Requests per batch. Batches run one after the other and their results are moved to the
        CPU, so device memory does not grow with the number of requests.
    profile
        ``ROLLOUT`` captures; ``SERVE`` gives the same outputs as serving and no record.
    on_progress
        Called after each denoising step of each batch.

    Returns
    -------
    media : Tensor
        [N, ...] in [0, 1] on CPU, in the order of the requests.
    record : BehaviourRecord or None
        On CPU.

    Raises
    ------
    UserError
        If there is no request, or the profile is ``TRAIN``.
    """
    if profile is ExecutionProfile.TRAIN:
        raise UserError("TRAIN executes recorded steps: use recompute on a behaviour record")
    requests = [request] if isinstance(request, Request) else request
    return run_requests(
        instance, loop_id, requests, slots=slots, profile=profile, on_progress=on_progress
    )


def training_kernel(instance: ModelInstance, record: BehaviourRecord, kernel: str | None) -> str:
    """Return the kernel that training must use: the one the record was made with.

    Raises
    ------
    UserError
        If ``kernel`` (None: what the request or the platform chooses) is another one: its
        log-probs would not be comparable.
    """
    asked = kernel if kernel is not None else record.params.kernel
    chosen: str = kernels.select(FLOW_SDE_STEP, instance.platform.device.type, asked).name
    if chosen != record.kernel:
        raise UserError(
            f"the rollout used kernel {record.kernel!r} and training would use {chosen!r}; "
            f"set kernel: {record.kernel} for both"
        )
    return chosen


def recompute(
    instance: ModelInstance, record: BehaviourRecord, kernel: str | None = None
) -> Iterator[tuple[StepRecord, SDEStep]]:
    """Execute the recorded steps again under the current weights, in the caller's gradient mode.

    Yields
    ------
    recorded : StepRecord
        What the rollout did, on CPU.
    now : SDEStep
        The log-prob of the recorded sample and the new mean; differentiable with respect to the
        weights.

    Raises
    ------
    UserError
        If another kernel or rule of guidance would be used than in the rollout.
    """
    training_kernel(instance, record, kernel)
    guidance = instance.adapter.guidance(record.params).name
    if guidance != record.guidance:
        raise UserError(
            f"the rollout was guided by {record.guidance!r} and training would be by {guidance!r}; "
            "train the model that made the record"
        )
    described = DenoiseLoop.replay(record, instance.platform.device)
    for recorded, step in zip(record.steps, described, strict=True):
        yield recorded, execute_denoise(instance, step)
