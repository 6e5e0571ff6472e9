"""Tiny reward networks: the real classes and the published layouts, with weights by formula.

The formula lets a score be compared with what the published code gave for the same weights.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from workflow_rl.rewards.base import RewardBatch

EOS = 29


def pattern(name: str, shape: Sequence[int], number: int) -> Tensor:
    """Values in [−½, ½) that look random; weights of norms are around 1."""
    position = torch.arange(torch.Size(shape).numel(), dtype=torch.float64) + 1000 * number
    values = ((torch.sin(position * 12.9898) * 43758.5453) % 1 - 0.5).reshape(shape).float()
    return 1 + values if len(shape) == 1 and name.endswith("weight") else values


def by_formula(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """A checkpoint of these tensors."""
    return {name: pattern(name, shapes[name], i) for i, name in enumerate(sorted(shapes))}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Save a safetensors file; its path."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)


def clip_config() -> CLIPConfig:
    """A CLIP of two layers, 16×16 pixels and 10 tokens."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_act": "gelu"}
    text = {
        "vocab_size": 30,
        "hidden_size": 24,
        "intermediate_size": 48,
        "max_position_embeddings": 10,
        "bos_token_id": EOS - 1,
        "eos_token_id": EOS,
        "projection_dim": 12,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 8,
        "projection_dim": 12,
    }
    return CLIPConfig(text_config=text | shape, vision_config=vision | shape, projection_dim=12)


def clip_words() -> CLIPTokenizer:
    """Letters as CLIP writes them; padded with the end-of-text token."""
    letters = [chr(ord("a") + i) for i in range(14)]
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[])


def save_clip(folder: Path) -> str:
    """Save a random CLIP with its tokenizer; its folder."""
    torch.manual_seed(0)
    CLIPModel(clip_config()).save_pretrained(folder)
    clip_words().save_pretrained(folder)
    return str(folder)


def images(size: int = 3, height: int = 20, width: int = 30) -> RewardBatch:
    """Random images with prompts that the tiny tokenizers know."""
    media = torch.rand(size, 3, height, width, generator=torch.Generator().manual_seed(size))
    prompts = ["a b c", "d", "e f g h"] * size
    return RewardBatch(prompts[:size], [str(i) for i in range(size)], media, "image")
