"""The architectures of the embedded pair: stock diffusers and transformers classes, made small.

Together the two folders hold about three million float32 weights.
"""

from __future__ import annotations

from typing import Any

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
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

from workflow_rl.embedded.tokenizers import clip_tokenizer, t5_tokenizer

IMAGE_LATENT_CHANNELS = 4
VIDEO_LATENT_CHANNELS = 16
TEXT_DIM = 32
HEADS, HEAD_DIM = 3, 32
IMAGE_SHIFT, VIDEO_SHIFT = 1.0, 1.0
"""Static shifts of the schedulers."""
CLIP_INIT = 1.5
"""Scale of CLIP's random weights: large enough to tell captions apart by their pooled vector."""


def image_vae() -> AutoencoderKL:
    """4x down in space, 4 latent channels: 32x32 pixels are 8x8 latents."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=IMAGE_LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=32,
        scaling_factor=1.0,
        shift_factor=0.0,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def video_vae() -> AutoencoderKLWan:
    """8x down in space and 4x in time: 9 frames of 32x32 pixels are 3x4x4 latents.

    Pixels enter and leave in 2x2 patches (as in Wan 2.2's VAE), so that no convolution runs at
    the full resolution: on CPU that is where the time goes.
    """
    channels = VIDEO_LATENT_CHANNELS
    vae = AutoencoderKLWan(
        base_dim=12,
        decoder_base_dim=16,
        z_dim=channels,
        dim_mult=[1, 2, 3],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
    )
    start_frame_by_frame(vae)
    return vae


def start_frame_by_frame(vae: AutoencoderKLWan) -> None:
    """Initialise the causal convolutions so that an untrained VAE treats each frame alone.

    As when a 2D network is inflated to 3D: taps on past frames start at zero, the temporal
    down- and upsamplers start as identity and repetition. What is learned from single images
    then serves clips from the first step. The posterior starts narrow (log-variance -6), or its
    noise would drown the first gradients.
    """
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, WanCausalConv3d) and module.kernel_size[0] == 3:
                module.weight[:, :, :2] = 0
                module.weight[:, :, 2] *= 3**0.5
        for module in vae.modules():
            if isinstance(module, WanResample) and module.mode in ("downsample3d", "upsample3d"):
                eye = torch.eye(module.dim)
                copies = module.time_conv.out_channels // module.dim
                module.time_conv.weight.zero_()
                module.time_conv.weight[:, :, 2, 0, 0] = eye.repeat(copies, 1)
                module.time_conv.bias.zero_()
        vae.quant_conv.weight[VIDEO_LATENT_CHANNELS:] = 0
        vae.quant_conv.bias[VIDEO_LATENT_CHANNELS:] = -6.0


def image_transformer() -> FluxTransformer2DModel:
    """FLUX with two double-stream and two single-stream blocks, over 16 tokens of an image."""
    return FluxTransformer2DModel(
        in_channels=4 * IMAGE_LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=TEXT_DIM,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def video_transformer() -> WanTransformer3DModel:
    """Wan image-to-video with four blocks, over 3x4x4 = 48 tokens of a clip.

    Its input is the noisy latents, the 4-channel frame mask and the encoded first frame.
    """
    return WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=2 * VIDEO_LATENT_CHANNELS + 4,
        out_channels=VIDEO_LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=64,
        ffn_dim=256,
        num_layers=4,
        rope_max_seq_len=32,
    )


def clip_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Random, frozen: captions only have to stay apart."""
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_DIM,
            intermediate_size=2 * TEXT_DIM,
            projection_dim=TEXT_DIM,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            initializer_factor=CLIP_INIT,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).eval()


def t5_text_encoder(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    """Random, frozen: the token embeddings pass through on the residual stream."""
    return T5EncoderModel(T5Config(**_t5_shape(tokenizer))).eval()


def umt5_text_encoder(tokenizer: T5TokenizerFast) -> UMT5EncoderModel:
    """As `t5_text_encoder`, in the class that Wan uses."""
    return UMT5EncoderModel(UMT5Config(**_t5_shape(tokenizer))).eval()


def _t5_shape(tokenizer: T5TokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": TEXT_DIM,
        "d_kv": TEXT_DIM // 2,
        "d_ff": 2 * TEXT_DIM,
        "num_layers": 2,
        "num_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def scheduler(shift: float) -> FlowMatchEulerDiscreteScheduler:
    """Flow matching with a static shift."""
    return FlowMatchEulerDiscreteScheduler(shift=shift, use_dynamic_shifting=False)


def image_pipeline(vae: AutoencoderKL) -> FluxPipeline:
    """A FLUX pipeline around `vae` with an untrained transformer."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return FluxPipeline(
        scheduler=scheduler(IMAGE_SHIFT),
        vae=vae,
        text_encoder=clip_text_encoder(clip),
        tokenizer=clip,
        text_encoder_2=t5_text_encoder(t5),
        tokenizer_2=t5,
        transformer=image_transformer(),
    )


def video_pipeline(vae: AutoencoderKLWan) -> WanImageToVideoPipeline:
    """A Wan image-to-video pipeline around `vae` with an untrained transformer."""
    tokenizer = t5_tokenizer()
    return WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=umt5_text_encoder(tokenizer),
        vae=vae,
        scheduler=scheduler(VIDEO_SHIFT),
        transformer=video_transformer(),
    )
