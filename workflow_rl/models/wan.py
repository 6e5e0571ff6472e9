"""Wan image-to-video: ``WanImageToVideoPipeline`` folders.

Conditioning is the real one: the first frame encoded by the video VAE beside a frame mask, and the
CLIP embedding of the image where the checkpoint has an image encoder (Wan 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import nn

from workflow_rl.card import ModelCard, indexed_components
from workflow_rl.config.families import WAN_MIN_MULTIPLE
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.errors import UserError
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
    from diffusers import WanImageToVideoPipeline

DEFAULT_NUM_FRAMES = 81


class WanAdapter:
    """Wan I2V for the denoising loop.

    Latents are [B, z, (T-1)/4+1, H/8, W/8] for the published VAE; the transformer sees
    [latents, mask, first-frame latents] on the channel axis. The velocity is eps - x0.
    """

    media_kind = MediaKind.VIDEO

    def __init__(self, card: ModelCard, pipeline: WanImageToVideoPipeline) -> None:
        self.card = card
        self.pipeline = pipeline
        self.modules: dict[str, Any] = pipeline_modules(pipeline)
        freeze(self.modules)

    def active_adapters(self, component: str) -> str:
        return ""

    def resolve(self, request: Request) -> DiffusionParams:
        if request.image_CHW is None:
            raise UserError(f"{self.card.model_id} needs a conditioning image; none was given")
        height, width = request.image_CHW.shape[-2:]
        params = request.params.filled(self.card.defaults).filled(
            DiffusionParams(
                guidance_scale=1.0,
                height=height,
                width=width,
                num_frames=DEFAULT_NUM_FRAMES,
                max_sequence_length=sequence_length(self.pipeline.tokenizer, request.params),
            )
        )
        patch = self.modules["transformer"].config.patch_size[1]
        spatial = self.pipeline.vae_scale_factor_spatial * patch
        check_multiple(self.card, params, max(WAN_MIN_MULTIPLE, spatial))
        temporal = self.pipeline.vae_scale_factor_temporal
        frames = params.num_frames
        if frames is None or frames < 1 or (frames - 1) % temporal:
            raise UserError(
                f"{self.card.model_id} cannot make {params.num_frames} frames: "
                f"give a multiple of {temporal} plus 1"
            )
        check_negative_prompt(self.card, request, self.guidance_mode(params))
        return params

    def guidance_mode(self, params: DiffusionParams) -> GuidanceMode:
        if params.guidance_scale is not None and params.guidance_scale > 1:
            return GuidanceMode.CFG
        return GuidanceMode.NONE

    def encode(self, instance: ModelInstance, requests: Sequence[Request]) -> list[Conditioning]:
        params = requests[0].params
        length = sequence_length(self.pipeline.tokenizer, params)

        def encode_text(text: str) -> dict[str, torch.Tensor]:
            embeds, _ = self.pipeline.encode_prompt(
                text, do_classifier_free_guidance=False, max_sequence_length=length
            )
            return {"prompt_embeds": embeds[0]}

        def cached(texts: Sequence[str]) -> list[dict[str, torch.Tensor]]:
            return cached_text_encode(
                instance, ("text_encoder",), texts, encode_text, max_sequence_length=length
            )

        rows = cached([request.prompt for request in requests])
        if self.guidance_mode(params) is GuidanceMode.CFG:
            negatives = cached([request.negative_prompt or "" for request in requests])
            rows = [
                row | {"negative_prompt_embeds": negative["prompt_embeds"]}
                for row, negative in zip(rows, negatives, strict=True)
            ]
        images = self._encode_images(requests, params)
        return [row | images[id(r.image_CHW)] for row, r in zip(rows, requests, strict=True)]

    @torch.no_grad()
    def _encode_images(
        self, requests: Sequence[Request], params: DiffusionParams
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Encode each distinct image object once; keys are ids of the image tensors."""
        distinct = {id(r.image_CHW): r.image_CHW for r in requests if r.image_CHW is not None}
        sizes = sorted({tuple(image.shape[-2:]) for image in distinct.values()})
        if len(sizes) > 1:
            raise UserError(
                f"the images of one batch differ in size ({sizes}); resize them to one size, or "
                "run them apart"
            )
        images_BCHW = torch.stack(list(distinct.values()))
        rows: list[dict[str, torch.Tensor]] = [
            {"condition": condition}
            for condition in self._first_frame_condition(images_BCHW, params)
        ]
        if self.modules["transformer"].config.image_dim is not None:
            embeds = self.pipeline.encode_image([_to_pil(image) for image in images_BCHW])
            for row, embed in zip(rows, embeds, strict=True):
                row["image_embeds"] = embed
        return dict(zip(distinct, rows, strict=True))

    def _first_frame_condition(
        self, images_BCHW: torch.Tensor, params: DiffusionParams
    ) -> torch.Tensor:
        """Return [B, 4 + z, T', H', W']: the frame mask and the normalised first-frame latents.

        The VAE sees [first frame, zeros] in pixel space, in [-1, 1], and gives its mode.
        """
        pipe, vae = self.pipeline, self.pipeline.vae
        image = pipe.video_processor.preprocess(images_BCHW, params.height, params.width)
        frames_BCTHW = image.new_zeros(
            (image.shape[0], 3, params.num_frames, params.height, params.width)
        )
        frames_BCTHW[:, :, 0] = image
        frames_BCTHW = frames_BCTHW.to(self.pipeline.device, vae.dtype)
        latents = vae.encode(frames_BCTHW).latent_dist.mode().float()
        mean, std = self._latent_statistics(latents)
        latents = (latents - mean) * (1.0 / std)
        batch, _, frames, height, width = latents.shape
        mask = latents.new_zeros((batch, pipe.vae_scale_factor_temporal, frames, height, width))
        mask[:, :, 0] = 1
        return torch.cat([mask, latents], dim=1)

    def _latent_statistics(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.pipeline.vae.config
        mean = latents.new_tensor(config.latents_mean).view(1, config.z_dim, 1, 1, 1)
        std = latents.new_tensor(config.latents_std).view(1, config.z_dim, 1, 1, 1)
        return mean, std

    def latent_shape(self, params: DiffusionParams) -> tuple[int, ...]:
        if params.height is None or params.width is None or params.num_frames is None:
            raise ValueError("resolve the parameters first: the size is unset")
        pipe = self.pipeline
        return (
            pipe.vae.config.z_dim,
            (params.num_frames - 1) // pipe.vae_scale_factor_temporal + 1,
            params.height // pipe.vae_scale_factor_spatial,
            params.width // pipe.vae_scale_factor_spatial,
        )

    def schedule(self, params: DiffusionParams) -> ScheduleSpec:
        return ScheduleSpec(self.pipeline.scheduler.config, None, explicit_sigmas=False)

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
        time = torch.full((latents.shape[0],), timestep, device=latents.device)

        def forward(cond: Conditioning) -> torch.Tensor:
            image_embeds = cond.get("image_embeds")
            return transformer(
                hidden_states=torch.cat([latents, cond["condition"]], dim=1).to(dtype),
                timestep=time,
                encoder_hidden_states=cond["prompt_embeds"].to(dtype),
                encoder_hidden_states_image=None
                if image_embeds is None
                else image_embeds.to(dtype),
                return_dict=False,
            )[0]

        mode = self.guidance_mode(params)
        return guided_velocity(forward, conditioning, mode, params.guidance_scale)

    def decode(self, latents: torch.Tensor, params: DiffusionParams) -> torch.Tensor:
        vae = self.pipeline.vae
        mean, std = self._latent_statistics(latents)
        scaled = latents / (1.0 / std) + mean
        video = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return (video.float() / 2 + 0.5).clamp(0, 1)

    def trainable(self, component: str) -> dict[str, nn.Parameter]:
        return dict(self.modules[component].named_parameters())


def _to_pil(image_CHW: torch.Tensor) -> Image.Image:
    pixels_HWC = (image_CHW * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
    return Image.fromarray(pixels_HWC.cpu().numpy())


def _make_adapter(card: ModelCard, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import WanImageToVideoPipeline

    return WanAdapter(card, load_pipeline(WanImageToVideoPipeline, card, device, dtype))


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
    defaults = DiffusionParams()
    if path is None:
        from workflow_rl.embedded.pair import TINY_WAN_I2V

        path, defaults = TINY_WAN_I2V.folder, TINY_WAN_I2V.defaults
    index = read_checked_index(path, "WanImageToVideoPipeline")
    return ModelCard(
        model_id=Path(path).resolve().name,
        family="wan",
        task=TaskType.I2V,
        source=Path(path),
        components=indexed_components(index),
        make_adapter=_make_adapter,
        defaults=defaults,
    )
