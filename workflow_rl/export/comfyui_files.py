"""Single files as ComfyUI takes them: for its folders ``loras`` and ``diffusion_models``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from workflow_rl.errors import WorkflowRLError
from workflow_rl.export.comfyui import lora_keys, tensor_places
from workflow_rl.export.trained import LowRank, cast
from workflow_rl.export.transformer import MergedWeights


def comfyui_lora(
    family: str, adapters: Mapping[str, LowRank], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return a LoRA's tensors by the names that ComfyUI knows, alpha among them.

    Raises
    ------
    UserError
        If a layer is not mapped.
    """
    tensors = {}
    for layer, key in lora_keys(family, adapters).items():
        update = adapters[layer]
        for letter, tensor in (("A", update.a), ("B", update.b)):
            name = f"{key}.lora_{letter}.weight"
            tensors[name] = cast(tensor, dtype, name).contiguous()
        tensors[f"{key}.alpha"] = torch.tensor(update.alpha)
    return tensors


def original_tensors(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a transformer's tensors as its authors published them: other names, layers fused.

    Raises
    ------
    UserError
        If a tensor is not mapped.
    WorkflowRLError
        If a part of a fused layer is missing.
    """
    places = tensor_places(family, tensors)
    parts: dict[str, list[torch.Tensor | None]] = {}
    for name, place in places.items():
        tensor = tensors[name]
        if place.swapped:
            tensor = torch.cat(tensor.chunk(2)[::-1])
        parts.setdefault(place.name, [None] * place.parts)[place.part] = tensor
    original = {}
    for name, stacked in parts.items():
        present = [tensor for tensor in stacked if tensor is not None]
        if len(present) < len(stacked):
            raise WorkflowRLError(f"{name} has {len(present)} of its {len(stacked)} parts")
        original[name] = present[0] if len(present) == 1 else torch.cat(present)
    return original


def write_original(
    path: Path, family: str, weights: MergedWeights, metadata: Mapping[str, str]
) -> None:
    """Write a merged transformer as one file; the whole of it is in memory."""
    tensors = {key: tensor for file in weights.base.files for key, tensor in weights.of_file(file)}
    original = original_tensors(family, tensors)
    contiguous = {name: tensor.contiguous() for name, tensor in original.items()}
    save_file(contiguous, path, metadata=dict(metadata))
