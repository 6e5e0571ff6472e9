"""Loading stock pipelines from folders, with the errors that a user meets first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.errors import UserError


def read_checked_index(path: str | Path, pipeline_class: str) -> dict[str, Any]:
    """Return a folder's ``model_index.json``; raise a UserError unless it is ``pipeline_class``."""
    index = read_model_index(path)
    found = index.get("_class_name")
    if found != pipeline_class:
        raise UserError(f"{path} holds a {found}; expected a {pipeline_class} folder")
    return index


def load_pipeline(
    pipeline_class: Any, card: ModelCard, device: torch.device, dtype: torch.dtype
) -> Any:
    """Return the stock pipeline of ``card``, on ``device`` in ``dtype``, from safetensors only.

    Raises
    ------
    UserError
        If a weight file or a component is missing or damaged.
    """
    try:
        with _quiet():
            pipeline = pipeline_class.from_pretrained(
                card.source, dtype=dtype, use_safetensors=True, local_files_only=True
            )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot load {card.source}: {reason}") from error
    return pipeline.to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bars of loading: they would break the run's own display."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = (diffusers_logging, transformers_logging)
    shown = [library for library in libraries if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def pipeline_modules(pipeline: Any) -> dict[str, nn.Module]:
    """Return the pipeline's components that are modules, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
    }
