"""LTX-Video image-to-video: ``LTXImageToVideoPipeline`` folders, and ``LTXConditionPipeline`` ones.

The second class is that of 0.9.5 and later. ``LTXPipeline`` folders hold the components of the
first, and are loaded as what takes a first frame. The stock modules and the stock pipelines' own
text encoding and packing are used as they are; this file states LTX's conventions to the shared
loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.enums import MediaKind
from workflow_rl.models.adapter import PipelineAdapter, batch_timestep, describe
from workflow_rl.models.common import Conditioning, ScheduleSpec, linear_sigmas
from workflow_rl.request import DiffusionParams

FRAME_RATE = 25
"""Frames per second where none are asked for, as in the stock pipeline: positions scale by it."""

DECODE_TIMESTEP = 0.05
DECODE_NOISE_SCALE = 0.025
"""What a timestep-conditioned VAE decodes at (diffusers' LTX-Video page, for 0.9.1 and later)."""

VAE_SEED = 0
"""Seed of the VAE's own noise. It is the same for every sample: coding is a pure function."""


class LTXAdapter(PipelineAdapter):
    """LTX-Video for the denoising loop.

    Latents are packed tokens [B, ((T-1)/8+1)(H/32)(W/32), 128] for the published VAE, frame by
    frame. The tokens of the first latent frame are given: they are the image's latents, and the
    transformer sees them at time 0. The velocity is eps - x0.

    The stock pipeline draws the image's latents from the VAE's posterior, and the noise of a
    timestep-conditioned decoder, from the caller's generator. Here both come from generators of
    their own at ``VAE_SEED``, so that an image has one encoding and latents one decoding.
    """

    family = "ltx"
    pipeline_class = "LTXImageToVideoPipeline"
    media_kind = MediaKind.VIDEO
    max_text_tokens = 128
    default_num_frames = 161
    default_fps = float(FRAME_RATE)

    def encode_text(self, text: str, length: int) -> dict[str, torch.Tensor]:
        embeds, mask, _, _ = self.pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=length
        )
        return {"prompt_embeds": embeds[0], "prompt_attention_mask": mask[0]}

    def encode_images(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> list[dict[str, torch.Tensor]]:
        pipe, vae = self.pipeline, self.pipeline.vae
        pixels_BCHW = pipe.video_processor.preprocess(images_BCHW, *self.size_of(params))
        rows = []
        for pixels_CHW in pixels_BCHW.to(pipe.device, vae.dtype):
            posterior = vae.encode(pixels_CHW[None, :, None]).latent_dist
            latents = pipe._normalize_latents(
                posterior.sample(_vae_generator()).float(), vae.latents_mean, vae.latents_std
            )
            rows.append({"first_frame": pipe._pack_latents(latents)[0]})
        return rows

    def latent_grid(self, params: DiffusionParams) -> tuple[int, int, int]:
        """Return frames, rows and columns of tokens."""
        height, width = self.size_of(params)
        frames = (self.frames_of(params) - 1) // self.grid.frames + 1
        return frames, height // self.grid.height, width // self.grid.width

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        frames, rows, columns = self.latent_grid(params)
        return frames * rows * columns, self.modules["transformer"].config.in_channels

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        frames, rows, columns = self.latent_grid(params)
        return ScheduleSpec(
            self.scheduler.config,
            num_tokens=frames * rows * columns,
            sigmas=linear_sigmas(params.num_inference_steps),
        )

    def sampled_mask(self, params: DiffusionParams) -> torch.Tensor:
        frames, rows, columns = self.latent_grid(params)
        tokens = torch.arange(frames * rows * columns)
        return (tokens >= rows * columns)[:, None]

    def with_given(
        self, latents: torch.Tensor, conditioning: Conditioning, params: DiffusionParams
    ) -> torch.Tensor:
        first = conditioning["first_frame"].to(latents)
        return torch.cat([first, latents[:, first.shape[1] :]], dim=1)

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
        sampled_N = self.sampled_mask(params)[:, 0].to(latents)
        velocity: torch.Tensor = transformer(
            hidden_states=latents.to(dtype),
            timestep=batch_timestep(latents, timestep)[:, None] * sampled_N,
            encoder_hidden_states=conditioning["prompt_embeds"].to(dtype),
            encoder_attention_mask=conditioning["prompt_attention_mask"],
            **self.positions(latents, params),
            return_dict=False,
        )[0]
        # Guidance in float32 whatever the dtype, as in the stock pipeline.
        return velocity.float()

    def positions(self, latents: torch.Tensor, params: DiffusionParams) -> dict[str, Any]:
        """Return the transformer's inputs that tell where a token is, in pixels and seconds."""
        frames, rows, columns = self.latent_grid(params)
        grid = self.grid
        return {
            "num_frames": frames,
            "height": rows,
            "width": columns,
            "rope_interpolation_scale": (grid.frames / frame_rate(params), grid.height, grid.width),
        }

    def decode_media(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        pipe, vae = self.pipeline, self.pipeline.vae
        unpacked = pipe._unpack_latents(latents, *self.latent_grid(params))
        scaled = pipe._denormalize_latents(
            unpacked, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        ).to(vae.dtype)
        return torch.cat([decode_one(vae, row[None]) for row in scaled])


class LTXConditionAdapter(LTXAdapter):
    """LTX-Video 0.9.5 and later for the denoising loop, with the image as its one condition.

    It differs in the schedule, in the longer texts, and in positions: a token is where its frames
    begin, so that the first latent frame, of one frame, is as long as it is.

    The stock pipeline adds fresh noise to the image's latents before each step
    (``image_cond_noise_scale``, 0.15). Here they stay as they are (a scale of 0): a step is then a
    function of its state, without which a recomputed log-prob could not equal the captured one.
    """

    pipeline_class = "LTXConditionPipeline"
    max_text_tokens = 256

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule

        sigmas = linear_quadratic_schedule(params.num_inference_steps)
        return ScheduleSpec(self.scheduler.config, sigmas=tuple(sigmas.tolist()))

    def positions(self, latents: torch.Tensor, params: DiffusionParams) -> dict[str, Any]:
        pipe, grid = self.pipeline, self.grid
        ids = pipe._prepare_video_ids(
            len(latents), *self.latent_grid(params), device=latents.device
        )
        coords_B3N = pipe._scale_video_ids(ids, grid.height, grid.frames).float()
        coords_B3N[:, 0] /= frame_rate(params)
        return {"video_coords": coords_B3N}


def frame_rate(params: DiffusionParams) -> float:
    """Return the frames per second that positions in time are scaled by."""
    return FRAME_RATE if params.fps is None else params.fps


def _vae_generator() -> torch.Generator:
    """Return a CPU generator at its start: the same noise on every device."""
    return torch.Generator().manual_seed(VAE_SEED)


def decode_one(vae: Any, latents_1CTHW: torch.Tensor) -> torch.Tensor:
    """Return one sample's frames in [-1, 1], [1, 3, T, H, W], as a function of its latents alone.

    A timestep-conditioned VAE takes the last denoising step itself, from latents with a little
    noise. Some (0.9.1) also add noise between their layers, from the global generator, which is
    at ``VAE_SEED`` for that while.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(VAE_SEED)
        timestep = None
        if vae.config.timestep_conditioning:
            noise = torch.randn(latents_1CTHW.shape, generator=_vae_generator()).to(latents_1CTHW)
            latents_1CTHW = (1 - DECODE_NOISE_SCALE) * latents_1CTHW + DECODE_NOISE_SCALE * noise
            timestep = latents_1CTHW.new_tensor([DECODE_TIMESTEP])
        frames: torch.Tensor = vae.decode(latents_1CTHW, timestep, return_dict=False)[0]
    return frames


def build_ltx_i2v_card(path: str | Path) -> ModelCard:
    """Describe an LTX-Video checkpoint.

    Parameters
    ----------
    path
        An ``LTXImageToVideoPipeline``, ``LTXPipeline`` or ``LTXConditionPipeline`` folder.

    Raises
    ------
    UserError
        If the folder is missing or holds something else.
    """
    if read_model_index(path).get("_class_name") == LTXConditionAdapter.pipeline_class:
        return describe(path, LTXConditionAdapter)
    return describe(path, LTXAdapter)
