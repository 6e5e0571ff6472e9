"""Random tiny checkpoints of the classes that people run, saved as real diffusers folders."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from workflow_rl.embedded.tokenizers import clip_tokenizer, t5_tokenizer

TEXT_DIM = 16
T5_SHAPE = {
    "d_model": TEXT_DIM,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}


def _randomise(module: torch.nn.Module) -> None:
    """Give every weight a value: diffusers starts some output layers at zero, which hides bugs."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.7 / parameter[0].numel() ** 0.5)


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
        _randomise(module)
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


def save_wan(folder: Path, *, image_encoder: bool) -> Path:
    """Save a Wan I2V pipeline of random weights: 32x32, 4x4 latents, with or without CLIP."""
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
        _randomise(module)
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
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer,
        image_encoder=clip,
        image_processor=_clip_processor() if image_encoder else None,
    ).save_pretrained(folder)
    return folder


def _clip_processor() -> CLIPImageProcessor:
    size = {"height": 16, "width": 16}
    return CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=size)
