"""A tiny Qwen-Image."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
)

from tests.tiny_models.parts import TEXT_DIM, qwen2_tokenizer, randomise

SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}
"""The published schedule."""


def save_qwen_image(folder: Path) -> Path:
    """Save a Qwen-Image pipeline of random weights: 2x2 tokens of 16 channels for 32x32 images."""
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.1, 0.9, 1.2, 0.8],
    )
    text_encoder = Qwen2_5_VLForConditionalGeneration(_text_config(len(tokenizer)))
    for module in (transformer, vae, text_encoder):
        randomise(module)
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def _tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer to which the pipeline's instruction is 34 tokens, as published.

    The stock pipeline drops that many, so each word of the instruction must be one token.
    """
    none = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    template = QwenImagePipeline(**none).prompt_template_encode
    split = qwen2_tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str
    plain = template.replace("<|im_start|>", "").replace("<|im_end|>", "")
    return qwen2_tokenizer(words=[word for word, _ in split(plain)])


def _text_config(vocabulary: int) -> Qwen2_5_VLConfig:
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": TEXT_DIM,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "bos_token_id": None,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2, 1, 1],
            },
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_DIM,
            "fullatt_block_indexes": [0],
        },
    )
