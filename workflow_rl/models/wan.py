"""Wan image-to-video: ``WanImageToVideoPipeline`` folders.

Conditioning is the real one: the first frame encoded by the video VAE beside a frame mask, and the
CLIP embedding of the image where the checkpoint has an image encoder (Wan 2.1).
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
    to_pil,
)
from workflow_rl.models.common import Conditioning, ScheduleSpec
from workflow_rl.request import DiffusionParams


class WanAdapter(PipelineAdapter):
    """Wan I2V for the denoising loop.

    Latents are [B, z, (T-1)/4+1, H/8, W/8] for the published VAE; the transformer sees
    [latents, mask, first-frame latents] on the channel axis. The velocity is eps - x0.
    """

    family = "wan"
    pipeline_class = "WanImageToVideoPipeline"
    media_kind = MediaKind.VIDEO
    default_num_frames = 81

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, _ = self.pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"prompt_embeds": embeds[0]}

    def encode_images(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        rows: list[dict[str, torch.Tensor]] = [
            {"condition": condition}
            for condition in self._first_frame_condition(images_BCHW, params)
        ]
        if self.modules["transformer"].config.image_dim is not None:
            embeds = self.pipeline.encode_image([to_pil(image) for image in images_BCHW])
            for row, embed in zip(rows, embeds, strict=True):
                row["image_embeds"] = embed
        return rows

    def _first_frame_condition(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> torch.Tensor:
        """Return [B, 4 + z, T', H', W']: the frame mask and the normalised first-frame latents.

        The VAE sees [first frame, zeros] in pixel space, in [-1, 1], and gives its mode.
        """
        pipe, vae = self.pipeline, self.pipeline.vae
        image = pipe.video_processor.preprocess(images_BCHW, *self.size_of(params))
        frames_BCTHW = image.new_zeros((image.shape[0], 3, params.num_frames, *image.shape[-2:]))
        frames_BCTHW[:, :, 0] = image
        frames_BCTHW = frames_BCTHW.to(pipe.device, vae.dtype)
        latents = vae.encode(frames_BCTHW).latent_dist.mode().float()
        mean, std = channel_statistics(vae.config, latents)
        latents = (latents - mean) * (1.0 / std)
        batch, _, frames, height, width = latents.shape
        mask = latents.new_zeros((batch, pipe.vae_scale_factor_temporal, frames, height, width))
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)

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
            hidden_states=torch.cat([latents, conditioning["condition"]], dim=1).to(dtype),
            timestep=batch_timestep(latents, timestep),
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            encoder_hidden_states_image=None if image_embeds is None else image_embeds.to(dtype),
            return_dict=False,
        )[0]
        return velocity

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        mean, std = channel_statistics(vae.config, latents)
        scaled = latents / (1.0 / std) + mean
        video: torch.Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return video


def build_wan_i2v_card(path: str | Path | None = None) -> ModelCard:
    """Describe a Wan image-to-video checkpoint.

    Parameters
    ----------
    path
        A ``WanImageToVideoPipeline`` folder. None: the embedded ``tiny-wan-i2v``.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    if path is not None:
        return describe(path, WanAdapter)
    from workflow_rl.embedded.pair import TINY_WAN_I2V

    return describe(TINY_WAN_I2V.folder, WanAdapter, TINY_WAN_I2V.defaults)
