"""What model families share: the adapter protocol, cached text encoding, conditioning rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from workflow_rl.card import ModelCard
from workflow_rl.enums import MediaKind
from workflow_rl.instance import ModelInstance
from workflow_rl.request import DiffusionParams, Request

if TYPE_CHECKING:
    from workflow_rl.models.guidance import Guidance

NEGATIVE = "negative_"
"""Prefix of the conditioning entries of the negative prompt."""

Conditioning = Mapping[str, torch.Tensor]
"""What a transformer is conditioned on, for one sample: named tensors without a batch axis.

Samples of a group share the tensor objects (one text embedding, one encoded image).
"""


@dataclass(frozen=True)
class ScheduleSpec:
    """What the stock pipeline of a family feeds its flow-matching schedule.

    Parameters
    ----------
    config
        Configuration of the folder's scheduler: static shift, dynamic shift, terminal.
    num_tokens
        Latent tokens, for a dynamic shift that is linear in them; None where there is none.
    mu
        The dynamic shift itself, of a family with a rule of its own; wins over ``num_tokens``.
    sigmas
        The sigmas before the shift that the pipeline passes, as :func:`linear_sigmas`; None where
        it lets the scheduler make its own.
    """

    config: Mapping[str, Any]
    num_tokens: int | None = None
    mu: float | None = None
    sigmas: tuple[float, ...] | None = None


def linear_sigmas(num_steps: int) -> tuple[float, ...]:
    """Return linspace(1, 1/n, n), which most pipelines pass to their scheduler."""
    return tuple(np.linspace(1.0, 1.0 / num_steps, num_steps).tolist())


class ModelAdapter(Protocol):
    """What the denoising loop needs of a family. One adapter serves, rolls out and trains."""

    card: ModelCard
    modules: Mapping[str, nn.Module]
    media_kind: MediaKind
    text_encoders: tuple[str, ...]

    @property
    def scheduler(self) -> Any:
        """The folder's own scheduler; who samples with it takes a copy."""
        ...

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

    def guidance(self, params: DiffusionParams) -> Guidance:
        """Return the rule by which ``params.guidance_scale`` enters the velocity.

        Raises
        ------
        UserError
            If the parameters ask for a kind of guidance that the model lacks.
        """
        ...

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        """Return each request's conditioning; the requests' parameters are resolved."""
        ...

    def encode_prompts(
        self,
        instance: ModelInstance,
        texts: Sequence[tuple[str, str | None]],
        params: DiffusionParams,
    ) -> list[Conditioning]:
        """Return the part of the conditioning that prompts and negative prompts give.

        With ``params`` of a request, resolved or not, it fills the cache that ``encode`` reads.
        """
        ...

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        """Return the shape of one sample's latents, as the transformer state has it."""
        ...

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        """Return what the sigmas are computed from."""
        ...

    def policy_at(self, timestep: float, params: DiffusionParams) -> str:
        """Return the name of the transformer that is active at ``timestep`` (1000 sigma)."""
        ...

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor | None:
        """Return bool, broadcastable to one sample's latents: True where they are sampled.

        The others are given, such as the latents of a first frame: they get no noise, stay as they
        are in every step, and are left out of log-prob and KL. None: all are sampled.
        """
        ...

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        """Return the initial latents [B, ...] with the given ones written in."""
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


def pad_tokens(tensors: Sequence[torch.Tensor], axis: int) -> list[torch.Tensor]:
    """Return tensors of one length along ``axis``: shorter ones get zeros at the end.

    A family with texts of several lengths keeps a mask of ones beside the text's tokens, which
    becomes False on the padding.
    """
    longest = max(tensor.shape[axis] for tensor in tensors)
    return [
        tensor
        if tensor.shape[axis] == longest
        else F.pad(tensor, (0, 0) * (tensor.ndim - 1 - axis) + (0, longest - tensor.shape[axis]))
        for tensor in tensors
    ]


def collate(rows: Sequence[Conditioning]) -> dict[str, torch.Tensor]:
    """Stack per-sample conditioning into [B, ...] tensors, padded along their first axis.

    Raises
    ------
    ValueError
        If the rows do not name the same tensors.
    """
    names = rows[0].keys()
    if any(row.keys() != names for row in rows):
        raise ValueError("samples of one batch must have the same kinds of conditioning")
    return {name: torch.stack(pad_tokens([row[name] for row in rows], 0)) for name in names}


def freeze(modules: Mapping[str, nn.Module]) -> None:
    """Put modules in eval mode without gradients: dropout never runs, in rollout or training."""
    for module in modules.values():
        module.eval().requires_grad_(False)
