"""From a run to files: what `workflow-rl export` does."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from workflow_rl.card import read_model_index
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.config.weight_files import check_weight_files
from workflow_rl.export.folder import new_folder
from workflow_rl.export.lora import write_lora
from workflow_rl.export.metadata import describe_export
from workflow_rl.export.options import (
    ExportFormat,
    ExportOptions,
    check_key_format,
    check_options,
)
from workflow_rl.export.pipeline import copy_pipeline
from workflow_rl.export.trained import TrainedStage, read_stage
from workflow_rl.export.transformer import MergedWeights, write_component
from workflow_rl.training.build import DTYPES


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
    metadata = describe_export(config, options.stage, trained)
    target = options.target(run_dir)
    if options.format is ExportFormat.LORA:
        dtype = getattr(torch, options.dtype or "float32")
        with new_folder(target) as folder:
            _write_loras(folder, trained, dtype, metadata)
        return target
    dtype = getattr(torch, options.dtype or stage.dtype)
    merged = _merged(trained, DTYPES[stage.dtype], dtype)
    for component, weights in merged.items():
        weights.check(component)
    with new_folder(target) as folder:
        if options.format is ExportFormat.DIFFUSERS:
            source, index = trained.card.source, read_model_index(trained.card.source)
            files = check_weight_files(source, index, trained.card.variant)
            copy_pipeline(source, folder, index, files, without=trained.components)
        for component, weights in merged.items():
            write_component(
                trained.card.source / component,
                folder / component,
                weights,
                {**metadata, "workflow_rl.component": component},
            )
    return target


def _write_loras(
    folder: Path, trained: TrainedStage, dtype: torch.dtype, metadata: Mapping[str, str]
) -> None:
    """Write one file; where there are two transformers, one in a folder of each's name."""
    for component, adapters in trained.adapters.items():
        place = folder if len(trained.adapters) == 1 else folder / component
        write_lora(place, adapters, dtype, {**metadata, "workflow_rl.component": component})


def _merged(
    trained: TrainedStage, base_dtype: torch.dtype, dtype: torch.dtype
) -> dict[str, MergedWeights]:
    """Return the weights of every component that was trained."""
    card = trained.card
    index = read_model_index(card.source)
    files = check_weight_files(card.source, index, card.variant)
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
