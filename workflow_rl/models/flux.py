"""FLUX.1 text-to-image: ``FluxPipeline`` folders (dev with embedded guidance, schnell).

The stock modules and the stock pipeline's own text encoding and packing are used as they are;
this file states FLUX's conventions to the shared loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.models.adapter import PipelineAdapter, batch_timestep, describe
from workflow_rl.models.common import Conditioning
from workflow_rl.models.guidance import EMBEDDED, guidance_table
from workflow_rl.request import DiffusionParams

EMBEDDED_GUIDANCE_SCALE = 3.5
"""Default scale of a guidance-distilled checkpoint, as in the stock pipeline."""


class FluxAdapter(PipelineAdapter):
    """FLUX.1 for the denoising loop.

    Latents are packed tokens [B, (H/16)(W/16), 64] for the published 8x VAE: 2x2 patches of
    16-channel latents, channel order (c, ph, pw). The velocity has diffusers' sign, eps - x0.
    """

    family = "flux"
    pipeline_class = "FluxPipeline"
    media_kind = MediaKind.IMAGE
    text_encoders = ("text_encoder", "text_encoder_2")
    tokenizer = "tokenizer_2"

    def __init__(self, card: ModelCard, pipeline: Any) -> None:
        super().__init__(card, pipeline)
        if self.modules["transformer"].config.guidance_embeds:
            self.guidances = guidance_table(EMBEDDED)
            self.neutral_scale = EMBEDDED_GUIDANCE_SCALE

    def default_size(self) -> int:
        return int(self.pipeline.vae.config.sample_size)

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, pooled, _ = self.pipeline.encode_prompt(text, max_sequence_length=length)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        rows, columns = self.token_grid(params)
        return rows * columns, self.modules["transformer"].config.in_channels

    def forward(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        transformer = self.modules[component]
        dtype = transformer.dtype
        time = batch_timestep(latents, timestep)
        guidance = None
        if (
            self.guidance(params).mode is GuidanceMode.EMBEDDED
            and params.guidance_scale is not None
        ):
            guidance = torch.full_like(time, params.guidance_scale)
        embeds = conditioning["prompt_embeds"].to(dtype)
        velocity: torch.Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=time.to(dtype) / 1000,
            guidance=guidance,
            pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
            encoder_hidden_states=embeds,
            txt_ids=embeds.new_zeros(embeds.shape[1], 3),
            img_ids=self.pipeline._prepare_latent_image_ids(
                len(latents), *self.token_grid(params), latents.device, dtype
            ),
            return_dict=False,
        )[0]
        return velocity

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        pipe, vae = self.pipeline, self.pipeline.vae
        unpacked = pipe._unpack_latents(latents, *self.size_of(params), pipe.vae_scale_factor)
        scaled = unpacked / vae.config.scaling_factor + vae.config.shift_factor
        image: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return image


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
    if path is not None:
        return describe(path, FluxAdapter)
    from workflow_rl.embedded.pair import TINY_FLUX_T2I

    return describe(TINY_FLUX_T2I.folder, FluxAdapter, TINY_FLUX_T2I.defaults)
