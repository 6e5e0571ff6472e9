"""FLUX.2 klein text-to-image: ``Flux2KleinPipeline`` folders (distilled, and base with guidance).

The stock modules and the stock pipeline's own text encoding, packing and shift rule are used as
they are; this file states FLUX.2's conventions to the shared loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.enums import MediaKind
from workflow_rl.models.adapter import PipelineAdapter, batch_timestep, describe
from workflow_rl.models.common import Conditioning, ScheduleSpec, linear_sigmas
from workflow_rl.models.guidance import NO_GUIDANCE, guidance_table
from workflow_rl.request import DiffusionParams


class Flux2KleinAdapter(PipelineAdapter):
    """FLUX.2 klein for the denoising loop.

    Latents are what the stock pipeline takes as ``latents``: [B, 128, H/16, W/16] for the published
    8x VAE, 2x2 patches of 32 channels in the order (c, ph, pw), normalised by the running
    statistics of the VAE's batch norm. The transformer sees them as tokens. The velocity has
    diffusers' sign, eps - x0.
    """

    family = "flux2"
    pipeline_class = "Flux2KleinPipeline"
    media_kind = MediaKind.IMAGE

    def __init__(self, card: ModelCard, pipeline: Any) -> None:
        super().__init__(card, pipeline)
        if pipeline.config.is_distilled:
            # The stock pipeline ignores guidance_scale here; a request for it is refused.
            self.guidances = guidance_table(NO_GUIDANCE)

    def default_size(self) -> int:
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipeline.encode_prompt(text, max_sequence_length=length)
        return {"prompt_embeds": embeds[0]}

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        return self.modules["transformer"].config.in_channels, *self.token_grid(params)

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

        rows, columns = self.token_grid(params)
        steps = params.num_inference_steps
        return ScheduleSpec(
            self.scheduler.config,
            mu=compute_empirical_mu(rows * columns, steps),
            sigmas=linear_sigmas(steps),
        )

    def forward(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        pipe, transformer = self.pipeline, self.modules[component]
        dtype = transformer.dtype
        embeds = conditioning["prompt_embeds"].to(dtype)
        # Positions are the same in every row; the transformer reads those of the first.
        velocity_BNC: torch.Tensor = transformer(
            hidden_states=pipe._pack_latents(latents).to(dtype),
            timestep=batch_timestep(latents, timestep).to(dtype) / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=pipe._prepare_text_ids(embeds[:1]).to(latents.device),
            img_ids=pipe._prepare_latent_ids(latents[:1]).to(latents.device),
            return_dict=False,
        )[0]
        return velocity_BNC.transpose(1, 2).reshape(latents.shape)

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        mean, variance = (
            statistic.view(1, -1, 1, 1).to(latents)
            for statistic in (vae.bn.running_mean, vae.bn.running_var)
        )
        patches = latents * (variance + vae.config.batch_norm_eps).sqrt() + mean
        unpatched = self.pipeline._unpatchify_latents(patches)
        image: torch.Tensor = vae.decode(unpatched.to(vae.dtype), return_dict=False)[0]
        return image


def build_flux2_t2i_card(path: str | Path) -> ModelCard:
    """Describe a FLUX.2 klein checkpoint.

    Parameters
    ----------
    path
        A ``Flux2KleinPipeline`` folder.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    return describe(path, Flux2KleinAdapter)
