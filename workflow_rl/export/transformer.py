"""A trained transformer as files: the base's shards one by one, with what was trained in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workflow_rl.config.weight_files import WeightFiles
from workflow_rl.errors import UserError
from workflow_rl.export.folder import copy_small_files
from workflow_rl.export.trained import LowRank, cast


@dataclass(frozen=True)
class MergedWeights:
    """A component's weights as they are served, tensor by tensor, read when asked for.

    Parameters
    ----------
    base
        The base's files.
    full
        Trained parameters, which replace the base's.
    adapters
        Updates of linear layers, which are added to the base's weight.
    base_dtype
        Type that the stage holds the base in.
    dtype
        Type of the result.
    kept
        Parts of names whose tensors stay float32, as the stock library holds them.
    """

    base: WeightFiles
    full: Mapping[str, torch.Tensor]
    adapters: Mapping[str, LowRank]
    base_dtype: torch.dtype
    dtype: torch.dtype
    kept: tuple[str, ...]

    def check(self, component: str) -> None:
        """Raise a UserError unless everything trained has its place in the base."""
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.base.files:
            with safe_open(file, framework="pt") as opened:
                names = opened.keys()
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        expected = {name: tuple(tensor.shape) for name, tensor in self.full.items()} | {
            f"{layer}.weight": (len(update.b), update.a.shape[1])
            for layer, update in self.adapters.items()
        }
        for name, shape in expected.items():
            if shapes.get(name) != shape:
                found = shapes.get(name, "nothing of that name")
                raise UserError(
                    f"the run trained {component}.{name} {shape}, but the base model has {found}; "
                    "put back the model that the run began with"
                )

    def of_file(self, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Give the tensors whose base is in ``file``."""
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, self._served(name, opened.get_tensor(name))

    def _served(self, name: str, base: torch.Tensor) -> torch.Tensor:
        if not base.is_floating_point():
            return base
        kept = not set(self.kept).isdisjoint(name.split("."))
        held = torch.float32 if kept else self.base_dtype
        dtype = torch.float32 if kept else self.dtype
        if name in self.full:
            return cast(self.full[name], dtype, name)
        update = self.adapters.get(name.removesuffix(".weight"))
        if update is None or not name.endswith(".weight"):
            return cast(base.to(held), dtype, name)
        return cast(base.to(held).float() + update.delta(), dtype, name)


def plain_name(name: str, variant: str | None) -> str:
    """Return a weight file's name without its variant."""
    return name if variant is None else name.replace(f".{variant}", "", 1)


def write_component(
    source: Path, target: Path, weights: MergedWeights, metadata: Mapping[str, str]
) -> None:
    """Write a component's folder, with the base's shards and configuration.

    The variant goes out of the files' names. One shard is in memory at a time.
    """
    target.mkdir(parents=True)
    copy_small_files(source, target)
    weight_map: dict[str, str] = {}
    total_size = 0
    for file in weights.base.files:
        name = plain_name(file.name, weights.base.variant)
        tensors = {key: tensor.contiguous() for key, tensor in weights.of_file(file)}
        save_file(tensors, target / name, metadata=dict(metadata))
        weight_map |= dict.fromkeys(tensors, name)
        total_size += sum(tensor.nbytes for tensor in tensors.values())
    write_index(target, weight_map, total_size)


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Write which tensor is in which shard, where there are shards; ``total_size`` in bytes."""
    stem, is_shard, _ = min(weight_map.values()).partition("-")
    if not is_shard:
        return
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    path = folder / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
