"""A whole pipeline folder: the base's, with the trained transformers in it."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors import safe_open

from workflow_rl.card import read_model_index
from workflow_rl.config.model_index import indexed_components
from workflow_rl.config.weight_files import WeightFiles, check_weight_files
from workflow_rl.export.folder import copy_small_files, link_or_copy
from workflow_rl.export.transformer import plain_name, write_index

INDEX = "model_index.json"
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")


def copy_pipeline(
    source: Path, target: Path, variant: str | None, without: Collection[str]
) -> None:
    """Copy a diffusers folder but the components ``without``; weights are linked where they can be.

    Of each component the weights of ``variant``, which goes out of the files' names, so that the
    copy loads without one.
    """
    index = read_model_index(source)
    files = check_weight_files(source, index, variant)
    shutil.copyfile(source / INDEX, target / INDEX)
    for pattern in LICENCES:
        for path in source.glob(pattern):
            shutil.copyfile(path, target / path.name)
    for name in indexed_components(index):
        if name in without or not (source / name).is_dir():
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
