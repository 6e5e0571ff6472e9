"""A whole pipeline folder: the base's, with the trained transformers in it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from workflow_rl.config.weight_files import WeightFiles
from workflow_rl.export.folder import copy_small_files, link_or_copy
from workflow_rl.export.transformer import plain_name, write_index

INDEX = "model_index.json"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def copy_pipeline(
    source: Path,
    target: Path,
    index: Mapping[str, Any],
    files: Mapping[str, WeightFiles],
    without: Collection[str],
) -> None:
    """Copy a diffusers folder but the components ``without``; weights are linked where they can be.

    A variant goes out of the files' names, so that the folder loads without one.
    """
    shutil.copyfile(source / INDEX, target / INDEX)
    for pattern in LICENCES:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)
    for name, entry in index.items():
        is_component = isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
        if not is_component or name in without or not (source / name).is_dir():
            continue
        (target / name).mkdir()
        copy_small_files(source / name, target / name)
        if name in files:
            _link_weights(files[name], target / name)


def _link_weights(weights: WeightFiles, target: Path) -> None:
    """Give a component's weight files a second name, and write their index."""
    weight_map: dict[str, str] = {}
    for file in weights.files:
        name = plain_name(file.name, weights.variant)
        link_or_copy(file, target / name)
        with safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), name)
    write_index(target, weight_map, sum(file.stat().st_size for file in weights.files))
