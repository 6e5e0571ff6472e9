"""Qwen-Image text-to-image: ``QwenImagePipeline`` folders.

The stock modules and the stock pipeline's own text encoding and packing are used as they are; this
file states Qwen-Image's conventions to the shared loop.
"""

from __future__ import annotations

from pathlib import Path

import torch

from workflow_rl.card import ModelCard
from workflow_rl.enums import MediaKind
from workflow_rl.models.adapter import (
    PipelineAdapter,
    batch_timestep,
    channel_statistics,
    describe,
)
from workflow_rl.models.common import Conditioning
from workflow_rl.models.guidance import NO_GUIDANCE, NORM_RESCALED, guidance_table
from workflow_rl.request import DiffusionParams

DEFAULT_TEXT_TOKENS = 512
"""Text tokens where none are asked for, as in the stock pipeline; 1024 are the most."""


class QwenImageAdapter(PipelineAdapter):
    """Qwen-Image for the denoising loop.

    Latents are packed tokens [B, (H/16)(W/16), 64] for the published 8x VAE, which is a video VAE
    given one frame: 2x2 patches of 16-channel latents, channel order (c, ph, pw). A text is what
    Qwen2.5-VL makes of it within an instruction, without the instruction's own tokens, so that each
    text has its own length. Guidance keeps each token's norm.
    """

    family = "qwen_image"
    pipeline_class = "QwenImagePipeline"
    media_kind = MediaKind.IMAGE
    max_text_tokens = 1024
    guidances = guidance_table(NO_GUIDANCE, NORM_RESCALED)
    # The publisher's: an empty text, which the stock pipeline takes for guidance all the same.
    default_negative = " "

    def default_size(self) -> int:
        return int(self.pipeline.default_sample_size * self.pipeline.vae_scale_factor)

    def text_length(self, params: DiffusionParams) -> int:
        """Return the most text tokens: the request's, else the stock pipeline's default."""
        default = DiffusionParams(max_sequence_length=DEFAULT_TEXT_TOKENS)
        return super().text_length(params.filled(default))

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        # One text has no padding, and the stock function gives no mask for it.
        embeds, _ = self.pipeline.encode_prompt(text, max_sequence_length=length)
        mask = torch.ones(embeds.shape[1], dtype=torch.bool, device=embeds.device)
        return {"prompt_embeds": embeds[0], "prompt_mask": mask}

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
        mask = conditioning["prompt_mask"]
        velocity: torch.Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=batch_timestep(latents, timestep).to(dtype) / 1000,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            # None without padding, as in the stock pipeline: not every attention takes one.
            encoder_hidden_states_mask=None if bool(mask.all()) else mask,
            img_shapes=[[(1, *self.token_grid(params))]] * len(latents),
            return_dict=False,
        )[0]
        return velocity

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        pipe, vae = self.pipeline, self.pipeline.vae
        unpacked = pipe._unpack_latents(latents, *self.size_of(params), pipe.vae_scale_factor)
        mean, std = channel_statistics(vae.config, unpacked)
        scaled = unpacked / (1.0 / std) + mean
        frames_BCTHW: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return frames_BCTHW[:, :, 0]


def build_qwen_image_t2i_card(path: str | Path) -> ModelCard:
    """Describe a Qwen-Image checkpoint.

    Parameters
    ----------
    path
        A ``QwenImagePipeline`` folder.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    return describe(path, QwenImageAdapter)
