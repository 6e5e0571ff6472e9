"""A tiny FLUX.1."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tests.tiny_models.parts import T5_SHAPE, TEXT_DIM, randomise
from workflow_rl.embedded.tokenizers import clip_tokenizer, t5_tokenizer


def save_flux(folder: Path, *, guidance_embeds: bool, dynamic_shift: bool) -> Path:
    """Save a FLUX pipeline of random weights: 32x32 images, 4x4 tokens of 16 channels."""
    torch.manual_seed(0)
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=2,
        attention_head_dim=16,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        guidance_embeds=guidance_embeds,
        axes_dims_rope=(4, 6, 6),
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
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip),
            hidden_size=TEXT_DIM,
            intermediate_size=32,
            projection_dim=TEXT_DIM,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=clip.model_max_length,
            bos_token_id=clip.bos_token_id,
            eos_token_id=clip.eos_token_id,
            pad_token_id=clip.pad_token_id,
        )
    )
    for module in (transformer, vae):
        randomise(module)
    shift = (
        {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
        if dynamic_shift
        else {"shift": 1.0}
    )
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**shift),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip,
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=len(t5), **T5_SHAPE)),
        tokenizer_2=t5,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder
