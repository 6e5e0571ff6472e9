"""Model families: one adapter file each, over the stock diffusers modules."""

from __future__ import annotations

import importlib
from pathlib import Path

from workflow_rl.card import ModelCard
from workflow_rl.models.flux import build_flux_t2i_card
from workflow_rl.models.registry import sniff_family
from workflow_rl.models.wan import build_wan_i2v_card
from workflow_rl.request import TaskType

__all__ = ["build_card", "build_flux_t2i_card", "build_wan_i2v_card"]

_EMBEDDED = {TaskType.T2I: build_flux_t2i_card, TaskType.I2V: build_wan_i2v_card}


def build_card(path: str | Path | None, task: TaskType) -> ModelCard:
    """Describe the checkpoint in ``path``, of whatever family; None: the embedded one of ``task``.

    Raises
    ------
    UserError
        If the folder is missing, unsupported, or does another task.
    """
    if path is None:
        if task not in _EMBEDDED:
            raise ValueError(f"there is no embedded {task} model")
        return _EMBEDDED[task](None)
    module, _, function = sniff_family(path).card_builder.partition(":")
    card: ModelCard = getattr(importlib.import_module(module), function)(path)
    return card
