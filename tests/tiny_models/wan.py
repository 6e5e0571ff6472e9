"""A tiny Wan I2V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
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


def uni_pc() -> UniPCMultistepScheduler:
    """Return the scheduler of the published Wan folders."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def save_wan(folder: Path, *, image_encoder: bool, scheduler: Any = None) -> Path:
    """Save a Wan I2V pipeline of random weights: 32x32, 4x4 latents, with or without CLIP.

    ``scheduler`` None is flow-match Euler with shift 3.
    """
    torch.manual_seed(1)
    tokenizer = t5_tokenizer()
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.1, 0.9, 1.2, 0.8],
    )
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        out_channels=4,
        text_dim=TEXT_DIM,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        image_dim=8 if image_encoder else None,
        added_kv_proj_dim=24 if image_encoder else None,
    )
    for module in (transformer, vae):
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
        tokenizer=tokenizer,
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), **T5_SHAPE)),
        vae=vae,
        scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        image_encoder=clip,
        image_processor=_clip_processor() if image_encoder else None,
    ).save_pretrained(folder)
    return folder


def _clip_processor() -> CLIPImageProcessor:
    size = {"height": 16, "width": 16}
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
