"""The base of every family's adapter: what does not differ between stock pipelines.

A family states its conventions in the hooks: text encoding, latent shape, schedule, one forward
pass, decoding. Guidance, caching, checks and the roles of the weights are here.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import nn

from workflow_rl.card import ModelCard
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.model_index import indexed_components
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.models.common import (
    NEGATIVE,
    Conditioning,
    ScheduleSpec,
    cached_text_encode,
    freeze,
    linear_sigmas,
)
from workflow_rl.models.guidance import (
    CLASSIFIER_FREE,
    NO_GUIDANCE,
    Guidance,
    GuidanceTable,
    choose_guidance,
    guidance_table,
)
from workflow_rl.models.loading import (
    load_pipeline,
    pipeline_modules,
    read_checked_index,
    read_grid,
)
from workflow_rl.models.lora import active_adapters, trainable_parameters
from workflow_rl.models.request_checks import (
    check_grid,
    check_guidance,
    check_images,
    check_steps,
    check_text_length,
)
from workflow_rl.request import DiffusionParams, Request, TaskType

FIRST_EXPERT = "transformer"
SECOND_EXPERT = "transformer_2"
"""The component that denoises below a boundary, where a checkpoint has two."""


class PipelineAdapter(ABC):
    """A stock diffusers pipeline for the denoising loop. One adapter serves, rolls out and trains.

    Attributes
    ----------
    family, pipeline_class
        Name in ``FAMILIES``, and the diffusers pipeline that loads the folder.
    media_kind
        What it makes.
    text_encoders, tokenizer
        Components that the text embedding depends on; the one that bounds the text's length.
    max_text_tokens
        Text tokens where the tokenizer allows more; also the most that a request may ask for.
    guidances
        The rules of guidance the model has. With an ``EMBEDDED`` rule the scale is an input of the
        transformer, and no second pass is made.
    neutral_scale
        Guidance scale where none is asked for.
    cfg_above
        Classifier-free guidance is active for scales above this.
    shapes_cfg
        It takes ``cfg_normalization`` and ``cfg_truncation``.
    default_negative
        Negative prompt where none is given.
    default_num_frames
        Frames where none are asked for; None for images.
    default_fps
        Frames per second that the family's videos are made for; None for images.
    """

    family: ClassVar[str]
    pipeline_class: ClassVar[str]
    media_kind: MediaKind
    text_encoders: tuple[str, ...] = ("text_encoder",)
    tokenizer: ClassVar[str] = "tokenizer"
    max_text_tokens: int = 512
    guidances: GuidanceTable = guidance_table(NO_GUIDANCE, CLASSIFIER_FREE)
    neutral_scale: float = 1.0
    cfg_above: float = 1.0
    shapes_cfg: bool = False
    default_negative: str = ""
    default_num_frames: int | None = None
    default_fps: float | None = None

    def __init__(self, card: ModelCard, pipeline: Any) -> None:
        self.card = card
        self.pipeline = pipeline
        self.modules: dict[str, Any] = pipeline_modules(pipeline)
        self.grid = read_grid(card.source)
        freeze(self.modules)

    @property
    def scheduler(self) -> Any:
        """The folder's own scheduler; who samples with it takes a copy."""
        return self.pipeline.scheduler

    # What a family states.

    @abstractmethod
    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        """Return a text's embeddings, at most ``length`` tokens, without a batch axis.

        Embeddings of several lengths come with a mask of ones, bool [tokens]: both are padded with
        zeros to the longest of a batch.
        """

    def encode_images(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        """Return the conditioning of each distinct image in [0, 1]; ``I2V`` families."""
        raise NotImplementedError(f"{type(self).__name__} takes no image")

    def default_size(self) -> int:
        """Return the height and width in px where none are asked for; ``T2I`` families."""
        raise NotImplementedError(f"{type(self).__name__} takes its size from the image")

    @abstractmethod
    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        """Return the shape of one sample's latents, as the transformer state has it."""

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        """Return what the sigmas are computed from: linear ones, shifted by the image's tokens."""
        rows, columns = self.token_grid(params)
        return ScheduleSpec(
            self.scheduler.config, rows * columns, sigmas=linear_sigmas(params.num_inference_steps)
        )

    @abstractmethod
    def forward(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        """Return v = eps - x0 of one forward pass, without classifier-free guidance.

        ``latents`` [B, ...] float32 and ``conditioning`` are batched; ``timestep`` is 1000 sigma.
        """

    @abstractmethod
    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        """Return media in [-1, 1]: [B, 3, H, W] or [B, 3, T, H, W]."""

    def policy_at(self, timestep: float, params: DiffusionParams) -> str:
        """Return the name of the transformer that is active at ``timestep`` (1000 sigma)."""
        return FIRST_EXPERT

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor | None:
        """Return where one sample's latents are sampled; None: everywhere."""
        return None

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        """Return the initial latents [B, ...] with the given ones written in."""
        return latents

    # What is the same in every family.

    def resolve(self, request: Request) -> DiffusionParams:
        """Return the request's parameters with defaults filled, checked against the model."""
        if self.card.task is TaskType.I2V and request.image_CHW is None:
            raise UserError(f"{self.card.model_id} needs a conditioning image; none was given")
        params = request.params.filled(self.card.defaults)
        params = params.filled(self._defaults(request, params))
        check_grid(self.card, params, self.grid, self.media_kind)
        check_steps(self.card, params, self.scheduler.config)
        check_guidance(
            self.card,
            request,
            params,
            self.guidance(params),
            cfg_above=self.cfg_above,
            shapes_cfg=self.shapes_cfg,
        )
        return params

    def _defaults(self, request: Request, params: DiffusionParams) -> DiffusionParams:
        height = width = None
        if request.image_CHW is not None:
            height, width = request.image_CHW.shape[-2:]
        elif params.height is None or params.width is None:
            height = width = self.default_size()
        return DiffusionParams(
            guidance_scale=self.neutral_scale,
            height=height,
            width=width,
            num_frames=self.default_num_frames,
            fps=self.default_fps,
            max_sequence_length=self.text_length(params),
        )

    def text_length(self, params: DiffusionParams) -> int:
        """Return the number of text tokens: the request's, else the tokenizer's, bounded.

        Raises
        ------
        UserError
            If the request asks for more than the family takes, or for none.
        """
        if params.max_sequence_length is not None:
            return check_text_length(params.max_sequence_length, self.max_text_tokens)
        tokenizer = getattr(self.pipeline, self.tokenizer)
        return min(self.max_text_tokens, int(tokenizer.model_max_length))

    def size_of(self, params: DiffusionParams) -> tuple[int, int]:
        """Return height and width in px of resolved parameters."""
        if params.height is None or params.width is None:
            raise ValueError("resolve the parameters first: height and width are unset")
        return params.height, params.width

    def token_grid(self, params: DiffusionParams) -> tuple[int, int]:
        """Return rows and columns of tokens of resolved parameters, one per cell of the grid."""
        height, width = self.size_of(params)
        return height // self.grid.height, width // self.grid.width

    def frames_of(self, params: DiffusionParams) -> int:
        """Return the frames of resolved parameters."""
        if params.num_frames is None:
            raise ValueError("resolve the parameters first: num_frames is unset")
        return params.num_frames

    def guidance(self, params: DiffusionParams) -> Guidance:
        """Return the rule by which the guidance scale enters the velocity."""
        return choose_guidance(self.guidances, params, self.cfg_above, model_id=self.card.model_id)

    def guidance_scale(self, component: str, params: DiffusionParams) -> float | None:
        """Return the scale of ``component``; the second expert may have its own."""
        if component == SECOND_EXPERT and params.guidance_scale_2 is not None:
            return params.guidance_scale_2
        return params.guidance_scale

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        """Return each request's conditioning: texts through the cache, then images."""
        params = requests[0].params
        texts = [(request.prompt, request.negative_prompt) for request in requests]
        rows = self.encode_prompts(instance, texts, params)
        if self.card.task is not TaskType.I2V:
            return rows
        media = self.encode_media(requests, params)
        return [{**row, **given} for row, given in zip(rows, media, strict=True)]

    def encode_prompts(
        self,
        instance: ModelInstance,
        texts: Sequence[tuple[str, str | None]],
        params: DiffusionParams,
    ) -> list[Conditioning]:
        """Return the conditioning that texts alone give, through the instance's cache."""
        params = params.filled(self.card.defaults)
        params = params.filled(DiffusionParams(guidance_scale=self.neutral_scale))
        rows = self._encode_texts(instance, [prompt for prompt, _ in texts], params)
        if self.guidance(params).mode is not GuidanceMode.CFG:
            return list(rows)
        negatives = [self.default_negative if given is None else given for _, given in texts]
        return [
            row | {f"{NEGATIVE}{name}": tensor for name, tensor in negative.items()}
            for row, negative in zip(
                rows, self._encode_texts(instance, negatives, params), strict=True
            )
        ]

    def _encode_texts(
        self, instance: ModelInstance, texts: Sequence[str], params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        length = self.text_length(params)
        return cached_text_encode(
            instance,
            self.text_encoders,
            texts,
            lambda text: self.encode_text(text, length),
            max_sequence_length=length,
        )

    @torch.no_grad()
    def encode_media(
        self, requests: Sequence[Request], params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        """Return each request's image conditioning; an image object is encoded once."""
        distinct = {id(r.image_CHW): r.image_CHW for r in requests if r.image_CHW is not None}
        check_images(list(distinct.values()))
        images_BCHW = torch.stack(list(distinct.values()))
        rows = dict(zip(distinct, self.encode_images(images_BCHW, params), strict=True))
        return [rows[id(request.image_CHW)] for request in requests]

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        """Return v = eps - x0 of ``latents`` [B, ...] after guidance; batched conditioning."""
        return self.guidance(params).velocity(
            lambda rows, cond: self.forward(component, rows, timestep, cond, params),
            latents,
            conditioning,
            self.guidance_scale(component, params),
            params.cfg_batching,
        )

    def decode(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        """Return media in [0, 1], float32: [B, 3, H, W] or [B, 3, T, H, W]."""
        return (self.decode_media(latents, params).float() / 2 + 0.5).clamp(0, 1)

    def active_adapters(self, component: str) -> str:
        """Return a name for the adapters (LoRA) active in ``component``; "" for none."""
        return active_adapters(self.modules[component])

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        """Return the named parameters of ``component`` that training may move."""
        return trainable_parameters(self.modules[component])


def batch_timestep(latents: torch.Tensor, timestep: float) -> torch.Tensor:
    """Return ``timestep`` for each row of ``latents``: float32 [B], on their device."""
    return torch.full((latents.shape[0],), timestep, device=latents.device, dtype=torch.float32)


def channel_statistics(config: Any, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a VAE's ``latents_mean`` and ``latents_std``, to broadcast over [B, C, T, H, W]."""
    mean, std = (
        latents.new_tensor(values).view(1, -1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    return mean, std


def to_pil(image_CHW: torch.Tensor) -> Image.Image:
    """Return an image in [0, 1] as 8-bit RGB, for processors that take nothing else."""
    pixels_HWC = (image_CHW * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(pixels_HWC.cpu().numpy())


def describe(
    path: str | Path, adapter: type[PipelineAdapter], defaults: DiffusionParams | None = None
) -> ModelCard:
    """Describe a diffusers folder of ``adapter``'s family, without loading a weight.

    Both transformers of a checkpoint with two experts are policies.

    Parameters
    ----------
    defaults
        What fills the parameters that a request leaves None, before the family's own values.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    index = read_checked_index(path, adapter.family)
    components = tuple(indexed_components(index))

    def make_adapter(card: ModelCard, device: torch.device, dtype: torch.dtype) -> Any:
        pipeline_class = getattr(importlib.import_module("diffusers"), adapter.pipeline_class)
        return adapter(card, load_pipeline(pipeline_class, card, device, dtype))

    return ModelCard(
        model_id=Path(path).resolve().name,
        family=adapter.family,
        task=TaskType(FAMILIES[index["_class_name"]].task),
        source=Path(path),
        components=components,
        make_adapter=make_adapter,
        policies=(FIRST_EXPERT, SECOND_EXPERT) if SECOND_EXPERT in components else (FIRST_EXPERT,),
        defaults=defaults or DiffusionParams(),
    )
