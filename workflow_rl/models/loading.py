"""Loading stock pipelines from folders, with the errors that a user meets first."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config.component_files import check_components
from workflow_rl.config.families import EULER, FAMILIES, Grid
from workflow_rl.config.model_index import LIBRARIES, indexed_components
from workflow_rl.config.weight_files import WeightFiles
from workflow_rl.errors import UserError
from workflow_rl.module_weights import check_finite, own_memory

logger = logging.getLogger(__name__)

MAX_NAMES = 3
"""Missing tensors that a message names."""


def read_checked_index(path: str | Path, family: str) -> dict[str, Any]:
    """Return a folder's ``model_index.json``, if it is of ``family`` and is supported.

    Warns of a scheduler other than flow-match Euler: its sigmas are used, its solver is not.

    Raises
    ------
    UserError
        If the folder holds another pipeline, or a variant of it that is not supported.
    """
    index = read_model_index(path)
    found = str(index.get("_class_name"))
    expected = [name for name, entry in FAMILIES.items() if entry.name == family]
    if found not in expected:
        raise UserError(f"{path} holds a {found}; expected a {' or '.join(expected)} folder")
    refusal = FAMILIES[found].refusal(index)
    if refusal is not None:
        raise UserError(f"{path} is {refusal}")
    scheduler = index.get("scheduler")
    if isinstance(scheduler, list) and scheduler[-1] != EULER:
        logger.warning(
            "%s declares the scheduler %s; it is served with Euler steps over the same sigmas, as "
            "training samples it (sampler: checkpoint serves with its own)",
            path,
            scheduler[-1],
        )
    return index


def read_grid(folder: Path) -> Grid:
    """Return which sizes and frame counts the model of a folder can make."""

    def read(path: str) -> Mapping[str, Any]:
        parsed: Mapping[str, Any] = json.loads((folder / path).read_text(encoding="utf-8"))
        return parsed

    return FAMILIES[str(read_model_index(folder)["_class_name"])].grid(read)


def load_pipeline(
    pipeline_class: Any, card: ModelCard, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the stock pipeline of ``card``, on ``device`` in ``dtype``, from safetensors only.

    The files are checked before the first weight is read, and then every weight for NaN and
    infinity: one more pass over the weights in memory (about a second per 5 GB), without a copy.

    Raises
    ------
    UserError
        If a weight file, a component or a single tensor is missing, damaged, too many or not
        finite, or there are no files of the card's variant.
    """
    index = read_model_index(card.source)
    files = check_components(card.source, index, card.variant)
    options = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    try:
        with _quiet():
            modules = {
                name: _load_module(module_class, card.source / name, files, options)
                for name, module_class in _module_classes(index).items()
            }
            # The class raises for a null in the index unless it is given None by name.
            absent = {k: None for k, v in index.items() if isinstance(v, list) and v[0] is None}
            pipeline = pipeline_class.from_pretrained(card.source, **modules, **absent, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot load {card.source}: {reason}; download the model again") from error
    pipeline = pipeline.to(device)
    for module in pipeline_modules(pipeline).values():
        own_memory(module)
    return pipeline


def _module_classes(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes of a pipeline's modules, by component name.

    Raises
    ------
    UserError
        If the installed library has no such class.
    """
    classes = {}
    for name, (library, class_name) in indexed_components(index).items():
        if library not in LIBRARIES:
            continue
        try:
            component_class = getattr(importlib.import_module(library), class_name)
        except AttributeError:
            raise UserError(
                f"{name} is a {class_name}, which the installed {library} does not have; "
                f"install a newer {library}"
            ) from None
        if issubclass(component_class, nn.Module):
            classes[name] = component_class
    return classes


def _load_module(
    module_class: Any,
    folder: Path,
    files: Mapping[str, WeightFiles],
    options: Mapping[str, Any],
) -> nn.Module:
    """Load one module, and hold its files to every tensor it has.

    Both libraries only warn of a tensor that the files lack, and leave it random (transformers) or
    on the meta device (diffusers); they drop a tensor that the module lacks. Tied weights,
    non-persistent buffers and what the class itself ignores are neither missing nor too many.
    """
    module, found = module_class.from_pretrained(
        folder,
        **options,
        variant=files[folder.name].variant,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    kind = module_class.__name__
    if found["mismatched_keys"]:
        name, there, own = sorted(found["mismatched_keys"])[0]
        raise UserError(
            f"{folder} has {_count(found['mismatched_keys'])} of other shapes than a {kind} "
            f"with its config.json, such as {name}: {tuple(there)}, expected {tuple(own)}; the "
            "weights are of another model or version: download it again"
        )
    if found["missing_keys"]:
        raise UserError(
            f"{folder} lacks {_count_names(found['missing_keys'])} of a {kind}; "
            "download the model again"
        )
    if found["unexpected_keys"]:
        raise UserError(
            f"{folder} has {_count_names(found['unexpected_keys'])}, which a {kind} with its "
            "config.json lacks; the weights are of another model or version: download it again"
        )
    loaded: nn.Module = module
    check_finite(loaded, folder)
    return loaded


def _count_names(keys: Iterable[str]) -> str:
    names = sorted(keys)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{_count(names)}: {', '.join(names[:MAX_NAMES])}{more}"


def _count(keys: Sized) -> str:
    return "1 tensor" if len(keys) == 1 else f"{len(keys)} tensors"


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars and reports of loading: they would break the run's own display."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    levels = [library.get_verbosity() for library in libraries]
    for library in shown:
        library.disable_progress_bar()
    for library in libraries:
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
        for library in shown:
            library.enable_progress_bar()


def pipeline_modules(pipeline: Any) -> dict[str, nn.Module]:
    """Return the pipeline's components that are modules, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }
