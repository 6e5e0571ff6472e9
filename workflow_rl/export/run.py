"""From a run to files: what `workflow-rl export` does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workflow_rl.card import read_model_index
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.config.weight_files import check_weight_files
from workflow_rl.errors import UserError
from workflow_rl.export.comfyui_files import comfyui_lora, write_original
from workflow_rl.export.folder import new_folder
from workflow_rl.export.lora import write_lora
from workflow_rl.export.metadata import COMPONENT, PREFIX, describe_export
from workflow_rl.export.options import (
    ExportFormat,
    ExportOptions,
    KeyFormat,
    check_key_format,
    check_options,
)
from workflow_rl.export.pipeline import copy_pipeline
from workflow_rl.export.trained import TrainedStage, read_stage
from workflow_rl.export.transformer import MergedWeights, write_component
from workflow_rl.training.hardware import DTYPES

Metadata = Mapping[str, dict[str, str]]
"""Entries of the header of each component's files."""


def export_run(
    run_dir: Path,
    options: ExportOptions,
    on_message: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write what a run trained in one stage, so that the stock library loads it.

    No model is built: the base's weights are read shard by shard.

    Returns
    -------
    Path
        The folder that was made; it appears whole or not at all.

    Raises
    ------
    UserError
        If the run, the stage, a checkpoint or the base model is not there or does not give what is
        asked for, or the target is there already.
    WorkflowRLError
        If the disk refuses.
    """
    config = load_run_config(run_dir)
    stage = check_options(config, options)
    trained = read_stage(
        config,
        options.stage,
        options.weights or config.evaluation.weights,
        options.iteration,
        on_message,
    )
    check_key_format(trained.card.family, options)
    entries = describe_export(config, options.stage, trained)
    metadata = {name: {**entries, COMPONENT: name} for name in trained.components}
    target = options.target(run_dir)
    with new_folder(target) as folder:
        if options.format is ExportFormat.LORA:
            dtype = getattr(torch, options.dtype or "float32")
            _write_loras(folder, trained, dtype, options, metadata)
        else:
            dtype = getattr(torch, options.dtype or stage.dtype)
            merged = _merged(trained, DTYPES[stage.dtype], dtype)
            _write_merged(folder, trained, merged, options, metadata)
    return target


def _write_loras(
    folder: Path,
    trained: TrainedStage,
    dtype: torch.dtype,
    options: ExportOptions,
    metadata: Metadata,
) -> None:
    """Write one file for each transformer; diffusers' has one name, so that two need folders."""
    for component, adapters in trained.adapters.items():
        if options.key_format is KeyFormat.COMFYUI:
            tensors = comfyui_lora(trained.card.family, adapters, dtype)
            path = folder / _single_file(trained, component, metadata)
            save_file(tensors, path, metadata=metadata[component])
        else:
            place = folder if len(trained.adapters) == 1 else folder / component
            write_lora(place, adapters, dtype, metadata[component])


def _write_merged(
    folder: Path,
    trained: TrainedStage,
    merged: Mapping[str, MergedWeights],
    options: ExportOptions,
    metadata: Metadata,
) -> None:
    """Write the transformers, in the whole pipeline or alone: as a component or a single file."""
    source = trained.card.source
    for component, weights in merged.items():
        weights.check(component)
    if options.format is ExportFormat.DIFFUSERS:
        copy_pipeline(source, folder, trained.card.variant, without=trained.components)
    for component, weights in merged.items():
        if options.key_format is KeyFormat.COMFYUI:
            path = folder / _single_file(trained, component, metadata)
            write_original(path, trained.card.family, weights, metadata[component])
        else:
            write_component(source / component, folder / component, weights, metadata[component])


def _single_file(trained: TrainedStage, component: str, metadata: Metadata) -> str:
    """Return a file name that says in a folder of many where the file is from."""
    entries = metadata[component]
    name = f"{entries[f'{PREFIX}run']}-{entries[f'{PREFIX}stage']}"
    if len(trained.components) > 1:
        name += f"-{component}"
    return f"{name}.safetensors"


def _merged(
    trained: TrainedStage, base_dtype: torch.dtype, dtype: torch.dtype
) -> dict[str, MergedWeights]:
    """Return the weights of every component that was trained."""
    card = trained.card
    index = read_model_index(card.source)
    files = check_weight_files(card.source, index, card.variant)
    for component in trained.components:
        if component not in files:
            raise UserError(
                f"{card.source / component} holds no weights in safetensors; put back the model "
                "that the run began with"
            )
    return {
        component: MergedWeights(
            files[component],
            trained.full.get(component, {}),
            trained.adapters.get(component, {}),
            base_dtype,
            dtype,
            _kept_in_float32(index[component]),
        )
        for component in trained.components
    }


def _kept_in_float32(entry: Any) -> tuple[str, ...]:
    """Return the parts of names whose tensors a class of diffusers holds in float32 always."""
    library, class_name = entry
    return tuple(getattr(importlib.import_module(library), class_name)._keep_in_fp32_modules or ())
