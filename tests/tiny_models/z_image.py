"""A tiny Z-Image."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Qwen3Model

from tests.tiny_models.parts import TEXT_DIM, qwen2_tokenizer, qwen3_config, randomise


def save_z_image(folder: Path, *, shift: float) -> Path:
    """Save a Z-Image pipeline of random weights: 32x32 images, 4-channel 8x8 latents.

    ``shift`` is all that tells the published Turbo (3) from the base model (6).
    """
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT_DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.7,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    text_encoder = Qwen3Model(qwen3_config(3))
    for module in (transformer, vae, text_encoder):
        randomise(module)
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=qwen2_tokenizer(),
        transformer=transformer,
    ).save_pretrained(folder)
    return folder
