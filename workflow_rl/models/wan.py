"""Wan image-to-video: Wan 2.1 I2V, Wan 2.2 I2V-A14B, and what they share with ``wan_ti2v``.

Conditioning is the real one: the first frame encoded by the video VAE beside a frame mask, and the
CLIP embedding of the image where the checkpoint has an image encoder (Wan 2.1).
"""

from __future__ import annotations

from pathlib import Path

import torch

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.enums import MediaKind
from workflow_rl.models.adapter import (
    FIRST_EXPERT,
    SECOND_EXPERT,
    PipelineAdapter,
    batch_timestep,
    channel_statistics,
    describe,
    to_pil,
)
from workflow_rl.models.common import Conditioning, ScheduleSpec
from workflow_rl.request import DiffusionParams


class WanAdapter(PipelineAdapter):
    """Wan I2V for the denoising loop.

    Latents are [B, z, (T-1)/4+1, H/8, W/8] for the published VAE; the transformer sees
    [latents, mask, first-frame latents] on the channel axis. The velocity is eps - x0.

    Wan 2.2 A14B has two transformers: the first denoises down to ``boundary_ratio`` times the
    training timesteps, the second below.
    """

    family = "wan"
    pipeline_class = "WanImageToVideoPipeline"
    media_kind = MediaKind.VIDEO
    default_num_frames = 81
    default_fps = 16.0

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"prompt_embeds": embeds[0]}

    def encode_images(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        processor = self.pipeline.video_processor
        first_BCHW = processor.preprocess(images_BCHW, *self.size_of(params))
        rows: list[dict[str, torch.Tensor]] = [
            {"condition": condition} for condition in self.first_frame_condition(first_BCHW, params)
        ]
        if self.modules[FIRST_EXPERT].config.image_dim is not None:
            embeds = self.pipeline.encode_image([to_pil(image) for image in images_BCHW])
            for row, embed in zip(rows, embeds, strict=True):
                row["image_embeds"] = embed
        return rows

    def first_frame_condition(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> torch.Tensor:
        """Return [B, 4 + z, T', H', W']: the frame mask and the normalised first-frame latents.

        ``images_BCHW`` are in [-1, 1]; the VAE sees [first frame, zeros] in pixel space.
        """
        batch, _, height, width = images_BCHW.shape
        frames_BCTHW = images_BCHW.new_zeros((batch, 3, self.frames_of(params), height, width))
        frames_BCTHW[:, :, 0] = images_BCHW
        latents = self.encode_frames(frames_BCTHW)
        mask_channels = self.pipeline.vae_scale_factor_temporal
        mask = latents.new_zeros((batch, mask_channels, *latents.shape[2:]))
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)

    def encode_frames(self, frames_BCTHW: torch.Tensor) -> torch.Tensor:
        """Return the normalised latents [B, z, T', H', W'] of frames in [-1, 1]: the VAE's mode."""
        pipe, vae = self.pipeline, self.pipeline.vae
        posterior = vae.encode(frames_BCTHW.to(pipe.device, vae.dtype)).latent_dist
        latents: torch.Tensor = posterior.mode().float()
        mean, std = channel_statistics(vae.config, latents)
        return (latents - mean) * (1.0 / std)

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        pipe = self.pipeline
        height, width = self.size_of(params)
        return (
            pipe.vae.config.z_dim,
            (self.frames_of(params) - 1) // pipe.vae_scale_factor_temporal + 1,
            height // pipe.vae_scale_factor_spatial,
            width // pipe.vae_scale_factor_spatial,
        )

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        return ScheduleSpec(self.scheduler.config)

    def policy_at(self, timestep: float, params: DiffusionParams) -> str:
        boundary = self.pipeline.config.boundary_ratio
        if boundary is None or timestep >= boundary * self.scheduler.config.num_train_timesteps:
            return FIRST_EXPERT
        return SECOND_EXPERT

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
        image_embeds = conditioning.get("image_embeds")
        velocity: torch.Tensor = transformer(
            hidden_states=self.transformer_input(latents, conditioning).to(dtype),
            timestep=self.transformer_timestep(component, latents, timestep),
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            encoder_hidden_states_image=None if image_embeds is None else image_embeds.to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def transformer_input(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Return what the transformer denoises, [B, channels, T', H', W']."""
        return torch.cat([latents, conditioning["condition"]], dim=1)

    def transformer_timestep(
        self, component: str, latents: torch.Tensor, timestep: float
    ) -> torch.Tensor:
        """Return the transformer's time input, float32 [B], or [B, tokens] if each has its own."""
        return batch_timestep(latents, timestep)

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        mean, std = channel_statistics(vae.config, latents)
        scaled = latents / (1.0 / std) + mean
        video: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return video


def build_wan_i2v_card(path: str | Path | None = None) -> ModelCard:
    """Describe a Wan image-to-video checkpoint: 2.1 I2V, 2.2 I2V-A14B or 2.2 TI2V-5B.

    Parameters
    ----------
    path
        A ``WanImageToVideoPipeline`` folder, or a ``WanPipeline`` one with ``expand_timesteps``.
        None: the embedded ``tiny-wan-i2v``.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    if path is None:
        from workflow_rl.embedded.pair import TINY_WAN_I2V

        return describe(TINY_WAN_I2V.folder, WanAdapter, TINY_WAN_I2V.defaults)
    if read_model_index(path).get("expand_timesteps"):
        from workflow_rl.models.wan_ti2v import WanTI2VAdapter

        return describe(path, WanTI2VAdapter)
    return describe(path, WanAdapter)
