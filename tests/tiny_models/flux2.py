"""A tiny FLUX.2 klein."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from tests.tiny_models.parts import TEXT_DIM, qwen2_tokenizer, qwen3_config, randomise

TEXT_LAYERS = 28
"""The pipeline reads the hidden states 9, 18 and 27; the final one would be 28."""


def save_flux2(folder: Path, *, is_distilled: bool) -> Path:
    """Save a FLUX.2 klein pipeline of random weights: 32x32 images, 4x4 tokens of 16 channels."""
    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=3 * TEXT_DIM,
        timestep_guidance_channels=16,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    vae = AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    text_encoder = Qwen3ForCausalLM(qwen3_config(TEXT_LAYERS))
    for module in (transformer, vae, text_encoder):
        randomise(module)
    # Statistics of trained latents, in place of 0 and 1.
    vae.bn.running_mean.normal_(0, 0.3)
    vae.bn.running_var.uniform_(0.5, 2.0)
    Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=qwen2_tokenizer(),
        transformer=transformer,
        is_distilled=is_distilled,
    ).save_pretrained(folder)
    return folder
