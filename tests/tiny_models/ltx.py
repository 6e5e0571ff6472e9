"""A tiny LTX-Video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5Config, T5EncoderModel

from tests.tiny_models.parts import T5_SHAPE, TEXT_DIM, randomise
from workflow_rl.embedded.tokenizers import t5_tokenizer

CHANNELS = 4
"""Channels of the latents."""


def save_ltx(
    folder: Path, *, decoder: str = "0.9.0", pipeline_class: Any = LTXImageToVideoPipeline
) -> Path:
    """Save an LTX pipeline of random weights, 32x in space and 8x in time as the published one.

    ``decoder`` ``0.9.1`` is conditioned on a timestep and adds noise between its layers.
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
    vae = _vae(noisy=decoder != "0.9.0")
    for module in (transformer, vae):
        randomise(module)
    vae.latents_mean.copy_(torch.tensor([0.1, -0.2, 0.3, 0.0]))
    vae.latents_std.copy_(torch.tensor([1.1, 0.9, 1.2, 0.8]))
    static = decoder == "0.9.5"
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=not static,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=None if static else 0.1,
    )
    pipeline_class(
        scheduler=scheduler,
        vae=vae,
        text_encoder=T5EncoderModel(T5Config(vocab_size=len(tokenizer), **T5_SHAPE)),
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def _vae(*, noisy: bool) -> AutoencoderKLLTXVideo:
    return AutoencoderKLLTXVideo(
        latent_channels=CHANNELS,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        decoder_inject_noise=(noisy, noisy, noisy, noisy, False),
        timestep_conditioning=noisy,
    )
