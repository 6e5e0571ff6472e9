"""FLUX.1 text-to-image: ``FluxPipeline`` folders (dev with embedded guidance, schnell).

The stock modules and the stock pipeline's own text encoding and packing are used as they are;
this file states FLUX's conventions to the shared loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from workflow_rl.card import ModelCard, indexed_components
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.instance import ModelInstance
from workflow_rl.models.common import (
    Conditioning,
    ScheduleSpec,
    cached_text_encode,
    check_multiple,
    check_negative_prompt,
    freeze,
    guided_velocity,
    sequence_length,
)
from workflow_rl.models.loading import load_pipeline, pipeline_modules, read_checked_index
from workflow_rl.request import DiffusionParams, Request, TaskType

if TYPE_CHECKING:
    from diffusers import FluxPipeline

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
EMBEDDED_GUIDANCE_SCALE = 3.5
"""Default scale of a guidance-distilled checkpoint, as in the stock pipeline."""


class FluxAdapter:
    """FLUX.1 for the denoising loop.

    Latents are packed tokens [B, (H/16)(W/16), 64] for the published 8x VAE: 2x2 patches of
    16-channel latents, channel order (c, ph, pw). The velocity has diffusers' sign, eps - x0.
    """

    media_kind = MediaKind.IMAGE

    def __init__(self, card: ModelCard, pipeline: FluxPipeline) -> None:
        self.card = card
        self.pipeline = pipeline
        self.modules: dict[str, Any] = pipeline_modules(pipeline)
        freeze(self.modules)

    def active_adapters(self, component: str) -> str:
        return ""

    def resolve(self, request: Request) -> DiffusionParams:
        embedded = self.modules["transformer"].config.guidance_embeds
        params = request.params.filled(self.card.defaults).filled(
            DiffusionParams(
                guidance_scale=EMBEDDED_GUIDANCE_SCALE if embedded else 1.0,
                height=self.pipeline.vae.config.sample_size,
                width=self.pipeline.vae.config.sample_size,
                max_sequence_length=sequence_length(self.pipeline.tokenizer_2, request.params),
            )
        )
        check_multiple(self.card, params, self.pipeline.vae_scale_factor * 2)
        check_negative_prompt(self.card, request, self.guidance_mode(params))
        return params

    def guidance_mode(self, params: DiffusionParams) -> GuidanceMode:
        if self.modules["transformer"].config.guidance_embeds:
            return GuidanceMode.EMBEDDED
        if params.guidance_scale is not None and params.guidance_scale > 1:
            return GuidanceMode.CFG
        return GuidanceMode.NONE

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        params = requests[0].params
        length = sequence_length(self.pipeline.tokenizer_2, params)

        def encode_text(text: str) -> dict[str, torch.Tensor]:
            embeds, pooled, _ = self.pipeline.encode_prompt(text, max_sequence_length=length)
            return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

        def cached(texts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
            return cached_text_encode(
                instance, TEXT_ENCODERS, texts, encode_text, max_sequence_length=length
            )

        rows = cached([request.prompt for request in requests])
        if self.guidance_mode(params) is not GuidanceMode.CFG:
            return list(rows)
        negatives = cached([request.negative_prompt or "" for request in requests])
        return [
            row | {f"negative_{name}": tensor for name, tensor in negative.items()}
            for row, negative in zip(rows, negatives, strict=True)
        ]

    def _latent_size(self, params: DiffusionParams) -> tuple[int, int]:
        if params.height is None or params.width is None:
            raise ValueError("resolve the parameters first: height and width are unset")
        token = self.pipeline.vae_scale_factor * 2
        return params.height // token, params.width // token

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        rows, columns = self._latent_size(params)
        return rows * columns, self.modules["transformer"].config.in_channels

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        rows, columns = self._latent_size(params)
        return ScheduleSpec(self.pipeline.scheduler.config, rows * columns, explicit_sigmas=True)

    def policy_at(self, timestep: float) -> str:
        return "transformer"

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        transformer = self.modules[component]
        dtype = transformer.dtype
        batch = latents.shape[0]
        rows, columns = self._latent_size(params)
        mode = self.guidance_mode(params)
        hidden_states = latents.to(dtype)
        time = torch.full((batch,), timestep, device=latents.device, dtype=torch.float32)
        guidance = None
        if mode is GuidanceMode.EMBEDDED and params.guidance_scale is not None:
            guidance = torch.full_like(time, params.guidance_scale)
        img_ids = self.pipeline._prepare_latent_image_ids(
            batch, rows, columns, latents.device, dtype
        )

        def forward(cond: Conditioning) -> torch.Tensor:
            embeds = cond["prompt_embeds"].to(dtype)
            return transformer(
                hidden_states=hidden_states,
                timestep=time.to(dtype) / 1000,
                guidance=guidance,
                pooled_projections=cond["pooled_prompt_embeds"].to(dtype),
                encoder_hidden_states=embeds,
                txt_ids=embeds.new_zeros(embeds.shape[1], 3),
                img_ids=img_ids,
                return_dict=False,
            )[0]

        return guided_velocity(forward, conditioning, mode, params.guidance_scale)

    def decode(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        pipe = self.pipeline
        config = pipe.vae.config
        unpacked = pipe._unpack_latents(latents, params.height, params.width, pipe.vae_scale_factor)
        scaled = unpacked / config.scaling_factor + config.shift_factor
        image = pipe.vae.decode(scaled.to(pipe.vae.dtype), return_dict=False)[0]
        return (image.float() / 2 + 0.5).clamp(0, 1)

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        return dict(self.modules[component].named_parameters())


def _make_adapter(card: ModelCard, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import FluxPipeline

    return FluxAdapter(card, load_pipeline(FluxPipeline, card, device, dtype))


def build_flux_t2i_card(path: str | Path | None = None) -> ModelCard:
    """Describe a FLUX.1 checkpoint.

    Parameters
    ----------
    path
        A ``FluxPipeline`` folder. None: the embedded ``tiny-flux-t2i``.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    defaults = DiffusionParams()
    if path is None:
        from workflow_rl.embedded.pair import TINY_FLUX_T2I

        path, defaults = TINY_FLUX_T2I.folder, TINY_FLUX_T2I.defaults
    index = read_checked_index(path, "FluxPipeline")
    return ModelCard(
        model_id=Path(path).resolve().name,
        family="flux",
        task=TaskType.T2I,
        source=Path(path),
        components=indexed_components(index),
        make_adapter=_make_adapter,
        defaults=defaults,
    )
