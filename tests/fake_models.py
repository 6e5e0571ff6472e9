"""Model families without a network to speak of, for tests of what drives and trains models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workflow_rl.card import ModelCard
from workflow_rl.enums import MediaKind
from workflow_rl.instance import ModelInstance, Platform
from workflow_rl.models.common import Conditioning, ScheduleSpec
from workflow_rl.models.guidance import NO_GUIDANCE, Guidance
from workflow_rl.request import DiffusionParams, Request, TaskType

SIDE = 4
NUM_FRAMES = 3


class FakeAdapter:
    """Velocity 0: the media of a sample are its initial noise. A video's frame t adds t to it."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.modules: Mapping[str, nn.Module] = {"transformer": nn.Identity()}
        self.media_kind = MediaKind.IMAGE if card.task is TaskType.T2I else MediaKind.VIDEO
        self.scheduler: Any = None
        self.batches: list[tuple[Request, ...]] = []

    def active_adapters(self, component: str) -> str:
        return ""

    def resolve(self, request: Request) -> DiffusionParams:
        return request.params

    def guidance(self, params: DiffusionParams) -> Guidance:
        return NO_GUIDANCE

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        self.batches.append(tuple(requests))
        return [{} for _ in requests]

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return 3, SIDE, SIDE

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        return ScheduleSpec({"num_train_timesteps": 1000})

    def policy_at(self, timestep: float, params: DiffusionParams) -> str:
        return "transformer"

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor | None:
        return None

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        return latents

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        return torch.zeros_like(latents)

    def decode(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        if self.media_kind is MediaKind.IMAGE:
            return latents
        return torch.stack([latents + frame for frame in range(NUM_FRAMES)], dim=2)

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        return {}


class GivenAdapter(FakeAdapter):
    """The first row of the latents is given (0.5 everywhere); velocity -x, plus ``disturbance``
    on the given part.
    """

    disturbance = 0.0

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor | None:
        mask = torch.ones(SIDE, 1, dtype=torch.bool)
        mask[0] = False
        return mask

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        latents = latents.clone()
        latents[:, :, 0] = 0.5
        return latents

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        velocity = -latents
        velocity[:, :, 0] += self.disturbance
        return velocity


class ExpertsAdapter(FakeAdapter):
    """Two linear experts that share the denoising at ``boundary`` (a timestep)."""

    boundary = 500.0

    def __init__(self, card: ModelCard) -> None:
        super().__init__(card)
        torch.manual_seed(0)
        self.modules = {name: nn.Linear(SIDE, SIDE) for name in card.policies}

    def policy_at(self, timestep: float, params: DiffusionParams) -> str:
        return "transformer" if timestep >= self.boundary else "transformer_2"

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        velocity: torch.Tensor = self.modules[component](latents)
        return velocity

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        return dict(self.modules[component].named_parameters())


def fake_instance(
    task: TaskType,
    model_id: str = "fake",
    adapter: type[FakeAdapter] = FakeAdapter,
    policies: tuple[str, ...] = ("transformer",),
) -> ModelInstance:
    """Return a resident instance of an ``adapter``."""
    card = ModelCard(
        model_id=model_id,
        family="fake",
        task=task,
        source=Path("nowhere"),
        components=policies,
        make_adapter=lambda card, device, dtype: adapter(card),
        policies=policies,
    )
    return ModelInstance(card, adapter(card), Platform(torch.device("cpu"), torch.float32))
