"""A tiny LTX-Video."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel

from tests.tiny_models.parts import T5_SHAPE, TEXT_DIM, randomise
from workflow_rl.embedded.tokenizers import t5_tokenizer

Version = Literal["0.9.0", "0.9.1", "0.9.5"]

CHANNELS = 4
"""Channels of the latents."""


def save_ltx(folder: Path, *, version: Version, pipeline_class: Any = None) -> Path:
    """Save an LTX pipeline of random weights, 32x in space and 8x in time as the published one.

    0.9.0 has a plain decoder; that of 0.9.1 takes a timestep and adds noise between its layers;
    0.9.5 takes a timestep, has other down blocks, and another schedule under another pipeline.
    """
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = LTXVideoTransformer3DModel(
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT_DIM,
    )
    vae = _vae(version)
    for module in (transformer, vae):
        randomise(module)
    for name, parameter in vae.named_parameters():
        if "per_channel_scale" in name:
            parameter.data.fill_(0.3)
    vae.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    vae.latents_std.copy_(torch.tensor([1.1, 0.9, 1.2, 0.8]))
    if pipeline_class is None:
        pipeline_class = LTXConditionPipeline if version == "0.9.5" else LTXImageToVideoPipeline
    pipeline_class(
        scheduler=_scheduler(version),
        vae=vae,
        text_encoder=T5EncoderModel(T5Config(vocab_size=len(tokenizer), **T5_SHAPE)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def _scheduler(version: Version) -> FlowMatchEulerDiscreteScheduler:
    if version == "0.9.5":
        return FlowMatchEulerDiscreteScheduler(shift=1.0)
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )


def _vae(version: Version) -> AutoencoderKLLTXVideo:
    options: dict[str, Any] = {
        "latent_channels": CHANNELS,
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 8, 8, 8),
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1, 1),
    }
    if version == "0.9.1":
        options["decoder_inject_noise"] = (True, True, True, True, False)
    if version == "0.9.5":
        options |= {
            "block_out_channels": (8, 8, 8, 8, 8),
            "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            "spatio_temporal_scaling": (True, True, True, True),
            "spatial_compression_ratio": 32,
            "temporal_compression_ratio": 8,
        }
    return AutoencoderKLLTXVideo(timestep_conditioning=version != "0.9.0", **options)
