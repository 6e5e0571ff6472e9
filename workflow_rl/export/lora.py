"""A LoRA as ``save_lora_weights`` of diffusers writes it, one file for each transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from workflow_rl.config.lora_file import LORA_FILE, METADATA, PREFIX
from workflow_rl.export.trained import LowRank, cast


def lora_header(adapters: Mapping[str, LowRank]) -> dict[str, str]:
    """Return the header entry in which diffusers keeps rank and alpha."""
    first = next(iter(adapters.values()))
    config = {
        "r": first.rank,
        "lora_alpha": first.alpha,
        "target_modules": sorted(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
    }
    prefixed = {f"{PREFIX}{key}": value for key, value in config.items()}
    return {METADATA: json.dumps(prefixed, indent=2, sort_keys=True)}


def write_lora(
    folder: Path, adapters: Mapping[str, LowRank], dtype: torch.dtype, metadata: Mapping[str, str]
) -> Path:
    """Write ``pytorch_lora_weights.safetensors``; ``load_lora_weights`` of the pipeline loads it.

    A second transformer's keys begin with ``transformer.`` too; it is loaded with
    ``load_into_transformer_2=True``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, update in adapters.items():
        for letter, tensor in (("A", update.a), ("B", update.b)):
            name = f"{PREFIX}{layer}.lora_{letter}.weight"
            tensors[name] = cast(tensor, dtype, name).contiguous()
    save_file(tensors, folder / LORA_FILE, metadata={**metadata, **lora_header(adapters)})
    return folder / LORA_FILE
