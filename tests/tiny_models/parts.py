"""What the tiny checkpoints of several families share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer, Qwen3Config

TEXT_DIM = 16
T5_SHAPE = {
    "d_model": TEXT_DIM,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}

QWEN_MAX_LENGTH = 64
"""Tokens per text, which a caption's letters and the chat's frame fit into."""
QWEN_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""The published chat format, for messages without tools."""


def qwen2_tokenizer(max_length: int = QWEN_MAX_LENGTH, words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Return Qwen's byte-level format: a token is a byte, a special token or one of ``words``.

    A word grows from its first byte. Words with a space before them, written as in the vocabulary,
    come first, so that no other word begins inside them.
    """
    spaced = sorted(words, key=lambda word: not word.startswith("Ġ"))
    merges = dict.fromkeys(
        (word[:end], word[end]) for word in spaced for end in range(1, len(word))
    )
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges), "<|endoftext|>"]
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens + special)},
        merges=list(merges),
        model_max_length=max_length,
        additional_special_tokens=special,
    )
    tokenizer.chat_template = QWEN_CHAT
    return tokenizer


def qwen3_config(num_layers: int) -> Qwen3Config:
    """Return a Qwen3 of ``TEXT_DIM`` channels for :func:`qwen2_tokenizer`."""
    return Qwen3Config(
        vocab_size=len(qwen2_tokenizer()),
        hidden_size=TEXT_DIM,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def randomise(module: torch.nn.Module) -> None:
    """Give every weight a value: diffusers starts some output layers at zero, which hides bugs."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.7 / parameter[0].numel() ** 0.5)
