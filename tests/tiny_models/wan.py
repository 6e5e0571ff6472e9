"""Tiny Wan I2V checkpoints: 2.1, 2.2 A14B (two experts) and 2.2 TI2V (per-token timesteps)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.tiny_models.parts import T5_SHAPE, TEXT_DIM, randomise
from workflow_rl.embedded.tokenizers import t5_tokenizer


def uni_pc(flow_shift: float = 3.0) -> UniPCMultistepScheduler:
    """Return the scheduler of the published Wan folders."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )


def save_wan(
    folder: Path,
    *,
    image_encoder: bool,
    scheduler: Any = None,
    boundary_ratio: float | None = None,
) -> Path:
    """Save a Wan I2V pipeline of random weights: 32x32, 4x4 latents, with or without CLIP.

    ``scheduler`` None is flow-match Euler with shift 3. With ``boundary_ratio`` it has two experts.
    """
    torch.manual_seed(1)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.1, 0.9, 1.2, 0.8],
    )
    image_shape = {"image_dim": 8, "added_kv_proj_dim": 24} if image_encoder else {}
    experts = [
        _transformer(in_channels=12, out_channels=4, **image_shape)
        for _ in range(1 if boundary_ratio is None else 2)
    ]
    for module in (*experts, vae):
        randomise(module)
    clip = None
    if image_encoder:
        clip = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=8,
            )
        )
    WanImageToVideoPipeline(
        **_text(),
        vae=vae,
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=experts[0],
        transformer_2=None if boundary_ratio is None else experts[1],
        image_encoder=clip,
        image_processor=_clip_processor() if image_encoder else None,
        boundary_ratio=boundary_ratio,
    ).save_pretrained(folder)
    return folder


def save_wan_ti2v(folder: Path, *, scheduler: Any = None) -> Path:
    """Save a Wan 2.2 TI2V of random weights, as published: a ``WanPipeline`` folder.

    The VAE's residual blocks and its 2x2 patches make latents 16 times smaller. ``scheduler`` None
    is flow-match Euler with shift 5.
    """
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=8,
        z_dim=6,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0, 0.2, -0.1],
        latents_std=[1.1, 0.9, 1.2, 0.8, 1.0, 0.7],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    transformer = _transformer(in_channels=6, out_channels=6)
    for module in (transformer, vae):
        randomise(module)
    WanPipeline(
        **_text(),
        vae=vae,
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=transformer,
        expand_timesteps=True,
    ).save_pretrained(folder)
    return folder


def _transformer(**shape: int) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        **shape,
    )


def _text() -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    return {
        "tokenizer": tokenizer,
        "text_encoder": UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **T5_SHAPE)),
    }


def _clip_processor() -> CLIPImageProcessor:
    size = {"height": 16, "width": 16}
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
