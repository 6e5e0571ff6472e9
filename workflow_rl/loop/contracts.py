"""What a loop is: a state machine that describes steps, and leaves executing them to a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.loop.sampler import SDEStep
from workflow_rl.models.common import Conditioning
from workflow_rl.request import DiffusionParams, Request


@dataclass(frozen=True)
class EncodeStep:
    """Encode the text (through the cache) and the conditioning image of each request."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class DenoiseStep:
    """One forward pass of a transformer and one sampler step.

    ``latents`` [B, ...]; ``conditioning`` is batched. ``kind`` is ``ode`` or an SDE kind;
    ``noise`` [B, ...] drives an SDE step. ``recorded_sample`` is given in training: the step's
    log-prob is then that of this sample, and nothing is drawn. ``kernel`` names the
    ``FLOW_SDE_STEP`` kernel that executes the sampler step; a ``scheduler`` (of the checkpoint, at
    this step) executes it instead. ``mask`` is True where latents are sampled, not given.
    """

    index: int
    num_steps: int
    component: str
    params: DiffusionParams
    latents: torch.Tensor
    conditioning: Conditioning
    timestep: float
    sigma_t: float
    sigma_next: float
    sigma_second: float
    kind: str
    kernel: str
    noise: torch.Tensor | None = None
    recorded_sample: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    scheduler: Any | None = None


@dataclass(frozen=True)
class DecodeStep:
    """Decode the final latents [B, ...] into media."""

    latents: torch.Tensor
    params: DiffusionParams


Step = EncodeStep | DenoiseStep | DecodeStep
StepResult = list[Conditioning] | SDEStep | torch.Tensor


@dataclass(frozen=True)
class LoopOutput:
    """What a driven batch gives: ``media`` in [0, 1], [B, ...] on CPU, and the record if any."""

    requests: tuple[Request, ...]
    media: torch.Tensor
    record: BehaviourRecord | None


StateT = TypeVar("StateT")


class Loop(Protocol[StateT]):
    """``init -> (next -> advance)* -> finalize``. All state of a batch lives in ``StateT``.

    Drives ``SERVE`` and ``ROLLOUT``. ``TRAIN`` has no batch to make: it executes the steps that
    ``DenoiseLoop.replay`` describes from a record.
    """

    loop_id: str

    def init(
        self, instance: ModelInstance, requests: Sequence[Request], profile: ExecutionProfile
    ) -> StateT:
        """Return the state before the first step. The requests share their parameters.

        Raises
        ------
        UserError
            If they do not, or if the profile is ``TRAIN``.
        """
        ...

    def next(self, state: StateT) -> Step | None:
        """Describe the next step, without executing it; None when there is none."""
        ...

    def advance(self, state: StateT, result: StepResult) -> None:
        """Take in the result of the step that ``next`` described."""
        ...

    def finalize(self, state: StateT) -> LoopOutput:
        """Return the output of a state that has no next step."""
        ...
