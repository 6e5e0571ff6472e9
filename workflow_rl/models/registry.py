"""Which family a diffusers folder belongs to, from the table in ``workflow_rl.config.families``."""

from __future__ import annotations

from pathlib import Path

from workflow_rl.card import read_model_index
from workflow_rl.config.families import FAMILIES, Family
from workflow_rl.errors import UserError


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
