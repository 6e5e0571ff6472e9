"""A tiny SD3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

from tests.tiny_models.parts import T5_SHAPE, randomise
from workflow_rl.embedded.tokenizers import clip_tokenizer, t5_tokenizer

CLIP_DIMS = (8, 12)
"""Of the two CLIP encoders: unequal, and together wider than T5, as L and bigG are narrower."""
T5_DIM = 24


def save_sd3(
    folder: Path, *, medium: bool = True, t5: bool = True, dynamic_shift: bool = False
) -> Path:
    """Save an SD3 pipeline of random weights: 32x32 images, 8x8 latents of 4 channels.

    Parameters
    ----------
    medium
        With what SD3.5-medium has and SD3-medium lacks: a second attention over the image tokens in
        the first block, and normalised queries and keys.
    t5
        With the third text encoder, which people leave out to save memory.
    """
    torch.manual_seed(2)
    transformer = SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=T5_DIM,
        caption_projection_dim=32,
        pooled_projection_dim=sum(CLIP_DIMS),
        pos_embed_max_size=12,
        dual_attention_layers=(0,) if medium else (),
        qk_norm="rms_norm" if medium else None,
    )
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=1.5,
        shift_factor=0.06,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    for module in (transformer, vae):
        randomise(module)
    clip, t5_words = clip_tokenizer(), t5_tokenizer()
    shift: dict[str, Any] = {"use_dynamic_shifting": True} if dynamic_shift else {"shift": 3.0}
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**shift),
        vae=vae,
        text_encoder=_clip(clip, CLIP_DIMS[0]),
        tokenizer=clip,
        text_encoder_2=_clip(clip, CLIP_DIMS[1]),
        tokenizer_2=clip,
        text_encoder_3=_t5(len(t5_words)) if t5 else None,
        tokenizer_3=t5_words if t5 else None,
    ).save_pretrained(folder)
    return folder


def _clip(tokenizer: CLIPTokenizer, width: int) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _t5(vocabulary: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=vocabulary, **(T5_SHAPE | {"d_model": T5_DIM})))
