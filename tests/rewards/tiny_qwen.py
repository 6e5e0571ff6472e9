"""A tiny Qwen2-VL with its tokenizer, and its weights in the layout of published checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel

from workflow_rl.rewards import hpsv3, videoalign

HIDDEN = 32
RESERVED = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def tokenizer() -> Qwen2Tokenizer:
    """One token per byte, and those that Qwen reserves."""
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    made = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    made.add_special_tokens({"extra_special_tokens": list(RESERVED)})
    return made


def config() -> Qwen2VLConfig:
    """One layer in each tower, 32 wide."""
    ids = {token: tokenizer().convert_tokens_to_ids(token) for token in RESERVED}
    return Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer()),
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [2, 3, 3],
            },
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": HIDDEN,
            "num_heads": 2,
            "mlp_ratio": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )


def save_base(folder: Path) -> str:
    """The folder of a base model: weights, configuration and tokenizer."""
    torch.manual_seed(0)
    Qwen2VLModel(config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def reward_model(tokens: Sequence[str]) -> Qwen2VLModel:
    """A model whose embedding has rows for further special tokens."""
    torch.manual_seed(1)
    shape = config()
    shape.text_config.vocab_size += len(tokens)
    model = Qwen2VLModel(shape).eval()
    with torch.no_grad():  # norms start at 1 and biases at 0, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def published(model: Qwen2VLModel) -> dict[str, Tensor]:
    """The model's tensors under the names of checkpoints from before transformers 4.52."""
    state = {
        name.replace("language_model.", "model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    return state | {"lm_head.weight": torch.zeros(model.config.text_config.vocab_size, HIDDEN)}


def shrink_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the networks few pixels, so that tests are quick."""
    monkeypatch.setattr(hpsv3, "PIXELS", 4 * 28 * 28)
    monkeypatch.setattr(videoalign, "MIN_PIXELS", 2 * 28 * 28)
    monkeypatch.setattr(videoalign, "MAX_PIXELS", 4 * 28 * 28)
