"""Which family a diffusers folder belongs to. A new family adds one entry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workflow_rl.card import read_model_index
from workflow_rl.errors import UserError
from workflow_rl.request import TaskType


@dataclass(frozen=True)
class Family:
    """A model family: its name, its task, and ``module:function`` that builds a card."""

    name: str
    task: TaskType
    card_builder: str


FAMILIES: Mapping[str, Family] = {
    "FluxPipeline": Family("flux", TaskType.T2I, "workflow_rl.models.flux:build_flux_t2i_card"),
    "WanImageToVideoPipeline": Family(
        "wan", TaskType.I2V, "workflow_rl.models.wan:build_wan_i2v_card"
    ),
}
"""Families by the pipeline class that ``model_index.json`` names."""


def sniff_family(folder: str | Path) -> Family:
    """Return the family of a diffusers folder, reading only its ``model_index.json``.

    Raises
    ------
    UserError
        If the folder is missing, is not a diffusers folder, or is of an unsupported family.
    """
    index = read_model_index(folder)
    pipeline = str(index.get("_class_name"))
    if pipeline not in FAMILIES:
        raise UserError(
            f"{folder} holds a {pipeline}, which is not supported; supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[pipeline]


def check_task(folder: str | Path, task: TaskType, where: str) -> Family:
    """Return the family of ``folder``; raise a UserError unless it does ``task``.

    ``where`` names the place that asked for it, such as ``stage 't2i'``.
    """
    family = sniff_family(folder)
    if family.task is not task:
        raise UserError(
            f"{where} needs a {task} model, but {folder} is a {family.task} model "
            f"({family.name}); point it at a {task} folder"
        )
    return family
