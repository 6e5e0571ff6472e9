"""Z-Image text-to-image: ``ZImagePipeline`` folders (base with guidance, Turbo without).

The stock modules and the stock pipeline's own text encoding are used as they are; this file states
Z-Image's conventions to the shared loop.
"""

from __future__ import annotations

from pathlib import Path

import torch

from workflow_rl.card import ModelCard
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.models.adapter import PipelineAdapter, batch_timestep, describe
from workflow_rl.models.common import Conditioning
from workflow_rl.models.guidance import (
    FROM_POSITIVE,
    NO_GUIDANCE,
    Guidance,
    guidance_table,
    norm_capped_guidance,
)
from workflow_rl.request import DiffusionParams

DEFAULT_SIZE = 1024
"""Pixels where none are asked for, as in the stock pipeline."""


class ZImageAdapter(PipelineAdapter):
    """Z-Image for the denoising loop.

    Latents are [B, 16, H/8, W/8] for the published VAE. The transformer takes lists of latents and
    of texts, each of its own length, and 1 - sigma as its time; it gives x0 - eps, which is negated
    here. A guidance scale of g weighs v_pos by 1 + g, so that 0 is no guidance; where
    ``cfg_truncation`` is given, late steps have none.
    """

    family = "z_image"
    pipeline_class = "ZImagePipeline"
    media_kind = MediaKind.IMAGE
    guidances = guidance_table(NO_GUIDANCE, FROM_POSITIVE)
    neutral_scale = 0.0
    cfg_above = 0.0
    shapes_cfg = True

    def default_size(self) -> int:
        return DEFAULT_SIZE

    def guidance(self, params: DiffusionParams) -> Guidance:
        rule = super().guidance(params)
        if rule.mode is not GuidanceMode.CFG or params.cfg_normalization is None:
            return rule
        return norm_capped_guidance(params.cfg_normalization)

    def velocity(
        self,
        component: str,
        latents: torch.Tensor,
        timestep: float,
        conditioning: Conditioning,
        params: DiffusionParams,
    ) -> torch.Tensor:
        if params.cfg_truncation is None or _model_time(timestep) <= params.cfg_truncation:
            return super().velocity(component, latents, timestep, conditioning, params)
        return NO_GUIDANCE.velocity(
            lambda rows, cond: self.forward(component, rows, timestep, cond, params),
            latents,
            conditioning,
            None,
            params.cfg_batching,
        )

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        # The stock function writes the chat's frame into the list that it is given.
        embeds_list, _ = self.pipeline.encode_prompt(
            [text], do_classifier_free_guidance=False, max_sequence_length=length
        )
        embeds = embeds_list[0]
        mask = torch.ones(len(embeds), dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds, "prompt_mask": mask}

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        height, width = self.size_of(params)
        factor = self.pipeline.vae_scale_factor
        return self.modules["transformer"].config.in_channels, height // factor, width // factor

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
        lengths = conditioning["prompt_mask"].sum(1).tolist()
        embeds = conditioning["prompt_embeds"].to(dtype)
        images: list[torch.Tensor] = transformer(
            list(latents.to(dtype).unsqueeze(2)),
            batch_timestep(latents, _model_time(timestep)),
            [row[:length] for row, length in zip(embeds, lengths, strict=True)],
            return_dict=False,
        )[0]
        # Guidance in float32 whatever the dtype, as in the stock pipeline.
        return -torch.stack(images).squeeze(2).float()

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        image: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return image


def _model_time(timestep: float) -> float:
    """Return 1 - sigma, rounded as in the stock pipeline, which computes it in float32."""
    return float((1000 - torch.tensor(timestep, dtype=torch.float32)) / 1000)


def build_z_image_t2i_card(path: str | Path) -> ModelCard:
    """Describe a Z-Image checkpoint.

    Parameters
    ----------
    path
        A ``ZImagePipeline`` folder.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    return describe(path, ZImageAdapter)
