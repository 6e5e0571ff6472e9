"""What model families share: the adapter protocol, cached text encoding, conditioning rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from workflow_rl.card import ModelCard
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.request import DiffusionParams, Request

MAX_SEQUENCE_LENGTH = 512

Conditioning = Mapping[str, torch.Tensor]
"""What a transformer is conditioned on, for one sample: named tensors without a batch axis.

Samples of a group share the tensor objects (one text embedding, one encoded image).
"""


@dataclass(frozen=True)
class ScheduleSpec:
    """What a family feeds its flow-matching schedule.

    Parameters
    ----------
    config
        Configuration of the folder's scheduler.
    num_tokens
        Image tokens for dynamic shifting; None where the family does not use it.
    explicit_sigmas
        True where the stock pipeline passes linspace(1, 1/n, n), False where it lets the scheduler
        make its own.
    """

    config: Mapping[str, Any]
    num_tokens: int | None
    explicit_sigmas: bool


class ModelAdapter(Protocol):
    """What the denoising loop needs of a family. One adapter serves, rolls out and trains."""

    card: ModelCard
    modules: Mapping[str, nn.Module]
    media_kind: MediaKind

    def active_adapters(self, component: str) -> str:
        """Return a name for the adapters (LoRA) active in ``component``; "" for none."""
        ...

    def resolve(self, request: Request) -> DiffusionParams:
        """Return the request's parameters with defaults filled.

        Raises
        ------
        UserError
            If the model cannot make the size or the frame count.
        """
        ...

    def guidance_mode(self, params: DiffusionParams) -> GuidanceMode:
        """Return how ``params.guidance_scale`` enters the velocity."""
        ...

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        """Return each request's conditioning; the requests' parameters are resolved."""
        ...

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        """Return the shape of one sample's latents, as the transformer state has it."""
        ...

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        """Return what the sigmas are computed from."""
        ...

    def policy_at(self, timestep: float) -> str:
        """Return the name of the transformer that is active at ``timestep`` (1000 sigma)."""
        ...

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        """Return v = eps - x0 of ``latents`` [B, ...] after guidance; batched conditioning."""
        ...

    def decode(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        """Return media in [0, 1], float32: [B, 3, H, W] or [B, 3, T, H, W]."""
        ...

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        """Return the named parameters of ``component`` that training may move."""
        ...


def cached_text_encode(
    instance: ModelInstance,
    components: tuple[str, ...],
    texts: Sequence[str],
    encode: Callable[[str], dict[str, torch.Tensor]],
    **options: Any,
) -> list[dict[str, torch.Tensor]]:
    """Encode texts through the instance's content-keyed cache.

    A group of K samples of one prompt runs the text encoder once, in this and in every later
    iteration, until a version of one of ``components`` changes.

    Parameters
    ----------
    components
        The text encoders the output depends on.
    texts
        One per sample; repeats are free.
    encode
        Text to named tensors without a batch axis; called once per text that is not cached.
    options
        Whatever else changes the output, such as ``max_sequence_length``.

    Returns
    -------
    list of dict
        One per text, in order. Equal texts share their tensors.
    """
    with torch.no_grad():
        return [
            instance.caches.get_or_compute(
                instance.cache_key(components, text, **options), partial(encode, text)
            )
            for text in texts
        ]


def collate(rows: Sequence[Conditioning]) -> dict[str, torch.Tensor]:
    """Stack per-sample conditioning into [B, ...] tensors.

    Raises
    ------
    ValueError
        If the rows do not name the same tensors.
    """
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise ValueError("samples of one batch must have the same kinds of conditioning")
    return {name: torch.stack([row[name] for row in rows]) for name in names}


def sequence_length(tokenizer: Any, params: DiffusionParams) -> int:
    """Return the number of text tokens: the request's, else the tokenizer's, at most 512.

    Raises
    ------
    UserError
        If the request asks for more, or for none.
    """
    asked = params.max_sequence_length
    if asked is None:
        return min(MAX_SEQUENCE_LENGTH, int(tokenizer.model_max_length))
    if not 1 <= asked <= MAX_SEQUENCE_LENGTH:
        raise UserError(
            f"max_sequence_length is {asked}; give 1 to {MAX_SEQUENCE_LENGTH} text tokens"
        )
    return asked


def check_negative_prompt(card: ModelCard, request: Request, mode: GuidanceMode) -> None:
    """Raise a UserError if the request has a negative prompt that ``mode`` would ignore."""
    if not request.negative_prompt or mode is GuidanceMode.CFG:
        return
    if mode is GuidanceMode.EMBEDDED:
        raise UserError(
            f"{card.model_id} takes no negative_prompt: its guidance is embedded (distilled); "
            "leave it out, or use a checkpoint without guidance_embeds and guidance_scale > 1"
        )
    raise UserError(
        f"{card.model_id} would ignore negative_prompt without classifier-free guidance; "
        "set guidance_scale > 1 or leave negative_prompt out"
    )


def check_multiple(card: ModelCard, params: DiffusionParams, multiple: int) -> None:
    """Raise a UserError unless height and width are positive multiples of ``multiple`` pixels."""
    for name, size in (("height", params.height), ("width", params.width)):
        if size is None or size <= 0 or size % multiple:
            raise UserError(
                f"{card.model_id} cannot make {name} {size}: "
                f"give a positive multiple of {multiple} pixels"
            )


def guided_velocity(
    forward: Callable[[Conditioning], torch.Tensor],
    conditioning: Conditioning,
    mode: GuidanceMode,
    scale: float | None,
) -> torch.Tensor:
    """Return the velocity after guidance.

    Under ``CFG`` entries named ``negative_<name>`` replace ``<name>`` in a second forward pass
    (Ho & Salimans 2022, eq. 6). ``NONE`` and ``EMBEDDED`` take one pass.
    """
    positive = {k: v for k, v in conditioning.items() if not k.startswith("negative_")}
    velocity = forward(positive)
    if mode is not GuidanceMode.CFG:
        return velocity
    if scale is None:
        raise ValueError("classifier-free guidance needs a scale")
    negative = positive | {
        k.removeprefix("negative_"): v for k, v in conditioning.items() if k.startswith("negative_")
    }
    velocity_negative = forward(negative)
    return velocity_negative + scale * (velocity - velocity_negative)


def freeze(modules: Mapping[str, nn.Module]) -> None:
    """Put modules in eval mode without gradients: dropout never runs, in rollout or training."""
    for module in modules.values():
        module.eval().requires_grad_(False)
