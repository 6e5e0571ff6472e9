"""A model family without a network, for tests of what drives models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
        self.scheduler = None
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


def fake_instance(task: TaskType, model_id: str = "fake") -> ModelInstance:
    """Return a resident instance of a `FakeAdapter`."""
    card = ModelCard(
        model_id=model_id,
        family="fake",
        task=task,
        source=Path("nowhere"),
        components=("transformer",),
        make_adapter=lambda card, device, dtype: FakeAdapter(card),
    )
    return ModelInstance(card, FakeAdapter(card), Platform(torch.device("cpu"), torch.float32))
