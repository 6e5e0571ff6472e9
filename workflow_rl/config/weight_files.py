"""Which files hold a model's weights, and whether they are whole: without reading the weights.

A component's folder has one safetensors file, or an index and the shards that it names; a variant
such as ``fp16`` has files of its own beside them (``model.fp16.safetensors``).
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workflow_rl.config.model_index import indexed_components
from workflow_rl.errors import UserError

STEMS = ("diffusion_pytorch_model", "model")
"""File names that diffusers and transformers give to weights."""
AGAIN = "download the model again"
_VARIANT = re.compile(r"(?:diffusion_pytorch_model|model)\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors")
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


class WeightFiles(NamedTuple):
    """The files that a component is loaded from; ``variant`` is None for the plain ones."""

    files: tuple[Path, ...]
    variant: str | None


def check_weight_files(
    folder: Path, index: Mapping[str, Any], variant: str | None = None, where: str = "variant"
) -> dict[str, WeightFiles]:
    """Return the weight files of each component of a diffusers folder, after checking them.

    A component without files of ``variant`` gives its plain ones, as in diffusers. Each file's
    header is read, so that a missing shard or a truncated file is found in no time.

    Parameters
    ----------
    folder, index
        The diffusers folder and its parsed ``model_index.json``.
    variant
        None: the plain files.
    where
        What the variant is called in messages: ``stages.t2i.variant``.

    Returns
    -------
    dict
        Only components that have weights.

    Raises
    ------
    UserError
        If no component has the variant, a component has other variants only, a shard is missing,
        or a file is truncated, damaged or no safetensors file.
    """
    folders = {name: folder / name for name in indexed_components(index)}
    found = {name: _component_files(path, variant) for name, path in folders.items()}
    if variant is not None and all(weights.variant is None for weights in found.values()):
        raise UserError(
            f"{where} is {variant!r}, but {folder} has no files of it; "
            f"{_offer(folders.values(), where)}"
        )
    for name, path in folders.items():
        if not found[name].files and _variants(path):
            raise UserError(f"{path} has weights in variants only; {_offer([path], where)}")
        for file in found[name].files:
            check_header(file)
    return {name: weights for name, weights in found.items() if weights.files}


def _component_files(folder: Path, variant: str | None) -> WeightFiles:
    for asked in [variant, None] if variant is not None else [None]:
        middle = "" if asked is None else f".{asked}"
        for stem in STEMS:
            single = folder / f"{stem}{middle}.safetensors"
            if single.is_file():
                return WeightFiles((single,), asked)
            index = folder / f"{stem}.safetensors.index{middle}.json"
            if index.is_file():
                return WeightFiles(_shards(index), asked)
    return WeightFiles((), None)


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is no index of weight files; {AGAIN}") from None
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(
            f"{index.parent} lacks {', '.join(missing[:3])}, {len(missing)} of the {len(names)} "
            f"files that {index.name} names; {AGAIN}"
        )
    return tuple(index.parent / name for name in names)


def _variants(folder: Path) -> set[str]:
    """Return the variants that a component's files are named after."""
    if not folder.is_dir():
        return set()
    return {m[1] for path in folder.iterdir() if (m := _VARIANT.fullmatch(path.name))}


def _offer(folders: Collection[Path], where: str) -> str:
    """Say to which of the folders' variants to set ``where``."""
    variants = sorted(set().union(*(_variants(folder) for folder in folders)))
    has_plain = any(_component_files(folder, None).files for folder in folders)
    mends = [f"set {where} to {' or '.join(variants)}"] if variants else []
    if has_plain or not variants:
        mends.append(f"leave {'it' if variants else where} out")
    return " or ".join(mends)


def tensor_names(path: Path) -> list[str]:
    """Return the names in a safetensors file's header, after checking it."""
    return [name for name in check_header(path) if name != "__metadata__"]


def check_header(path: Path) -> dict[str, Any]:
    """Return a safetensors file's header, after checking it against the file's size.

    Raises
    ------
    UserError
        If the file is truncated, damaged, or a Git LFS pointer instead of weights.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_LENGTH_BYTES)
        length = int.from_bytes(head, "little")
        if _LFS_POINTER.startswith(head) and head:
            raise UserError(f"{path} is a Git LFS pointer, not weights; run `git lfs pull`")
        if len(head) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise UserError(f"{path} is no whole safetensors file ({size} bytes); {AGAIN}")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path} is damaged: its header is no JSON; {AGAIN}") from None
    expected = _LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise UserError(f"{path} has {size} bytes, but its header says {expected}; {AGAIN}")
    return header
