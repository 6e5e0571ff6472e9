"""Model families: one adapter file each, over the stock diffusers modules."""

from __future__ import annotations

import importlib
from pathlib import Path

from workflow_rl.card import ModelCard
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.models.flux import build_flux_t2i_card
from workflow_rl.models.registry import sniff_family
from workflow_rl.models.wan import build_wan_i2v_card
from workflow_rl.request import TaskType

__all__ = ["build_card", "build_flux_t2i_card", "build_wan_i2v_card"]


def build_card(path: str | Path | None, task: TaskType) -> ModelCard:
    """Describe the checkpoint in ``path``, of whatever family; None: the embedded one of ``task``.

    Raises
    ------
    UserError
        If the folder is missing, unsupported, or does another task.
    """
    folder = path
    if folder is None:
        if task not in EMBEDDED_FOLDERS:
            raise ValueError(f"there is no embedded {task} model")
        folder = EMBEDDED_FOLDERS[task]
    module, _, function = sniff_family(folder).card_builder.partition(":")
    card: ModelCard = getattr(importlib.import_module(module), function)(path)
    return card
