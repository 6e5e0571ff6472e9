"""Wan 2.2 TI2V-5B: the first latent frame is the image itself, at timestep 0.

Published folders name ``WanPipeline`` in ``model_index.json``, with ``expand_timesteps``; as in the
stock library, ``WanImageToVideoPipeline`` loads them for image-to-video.
"""

from __future__ import annotations

import torch

from workflow_rl.models.common import Conditioning
from workflow_rl.models.wan import WanAdapter
from workflow_rl.request import DiffusionParams


class WanTI2VAdapter(WanAdapter):
    """Wan I2V whose transformer sees the latents alone, and a timestep per token.

    The latents of the first frame are given: they get no noise, no step changes them, and they are
    left out of log-prob and KL. The stock pipeline lets its sampler move them, gives the
    transformer the image's latents in their place and writes those in after the last step. The
    sampled frames and the video are the same.
    """

    default_fps = 24.0

    def first_frame_condition(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> torch.Tensor:
        """Return [B, z, 1, H', W']: the normalised latents of the image, encoded alone."""
        return self.encode_frames(images_BCHW[:, :, None])

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor:
        frames = self.latent_shape(params)[1]
        mask = torch.ones(1, frames, 1, 1, dtype=torch.bool)
        mask[:, 0] = False
        return mask

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        return torch.cat([conditioning["condition"], latents[:, :, 1:]], dim=2)

    def transformer_input(self, latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
        """Return the latents, whose first frame is the image's."""
        return latents

    def transformer_timestep(
        self, component: str, latents: torch.Tensor, timestep: float
    ) -> torch.Tensor:
        """Return float32 [B, tokens]: 0 for the tokens of the first frame."""
        _, patch_height, patch_width = self.modules[component].config.patch_size
        batch, _, frames, height, width = latents.shape
        timesteps = latents.new_full(
            (batch, frames, height // patch_height, width // patch_width), timestep
        )
        timesteps[:, 0] = 0
        return timesteps.flatten(1)
