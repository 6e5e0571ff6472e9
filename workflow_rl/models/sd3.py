"""Stable Diffusion 3 and 3.5 text-to-image: ``StableDiffusion3Pipeline`` folders.

The stock modules and the stock pipeline's own text encoding are used as they are; this file states
SD3's conventions to the shared loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.enums import MediaKind
from workflow_rl.models.adapter import PipelineAdapter, batch_timestep, describe
from workflow_rl.models.common import Conditioning, ScheduleSpec
from workflow_rl.request import DiffusionParams

T5_ENCODER = "text_encoder_3"
DEFAULT_TEXT_TOKENS = 256
"""T5 tokens where none are asked for, as in the stock pipeline; 512 are the most."""


class SD3Adapter(PipelineAdapter):
    """SD3 for the denoising loop.

    Latents are [B, 16, H/8, W/8] for the published VAE. A text is 77 tokens of the two CLIP
    encoders side by side, padded with zeros to T5's channels, and then T5's tokens; the transformer
    attends to all of them, padding too. A folder without T5 has zeros in the place of its tokens.
    """

    family = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    media_kind = MediaKind.IMAGE

    def __init__(self, card: ModelCard, pipeline: Any) -> None:
        super().__init__(card, pipeline)
        encoders = ("text_encoder", "text_encoder_2", T5_ENCODER)
        self.text_encoders = tuple(name for name in encoders if name in self.modules)

    def default_size(self) -> int:
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    def text_length(self, params: DiffusionParams) -> int:
        """Return the number of T5 tokens: the request's, else the stock pipeline's default."""
        default = DiffusionParams(max_sequence_length=DEFAULT_TEXT_TOKENS)
        return super().text_length(params.filled(default))

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            text, None, None, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        height, width = self.size_of(params)
        factor = self.pipeline.vae_scale_factor
        return self.modules["transformer"].config.in_channels, height // factor, width // factor

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        """Let the scheduler make its own sigmas: it shifts the smallest one twice."""
        rows, columns = self.token_grid(params)
        return ScheduleSpec(self.scheduler.config, num_tokens=rows * columns)

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
        velocity: torch.Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=batch_timestep(latents, timestep),
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            pooled_projections=conditioning["pooled_prompt_embeds"].to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
        image: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return image


def build_sd3_t2i_card(path: str | Path) -> ModelCard:
    """Describe a Stable Diffusion 3 or 3.5 checkpoint.

    Parameters
    ----------
    path
        A ``StableDiffusion3Pipeline`` folder, with or without ``text_encoder_3`` (T5).

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    return describe(path, SD3Adapter)
