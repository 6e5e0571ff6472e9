"""Model cards: frozen descriptions of a model, made without loading a weight."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflow_rl.enums import ConsistencyLevel
from workflow_rl.errors import UserError
from workflow_rl.request import DiffusionParams, TaskType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelCard:
    """Frozen description of a model.

    Parameters
    ----------
    model_id
        Name under which it is served and under which its caches are keyed.
    family
        Name of the adapter family, such as ``flux`` or ``wan``.
    task
        What the model does; a workflow stage checks it.
    source
        Diffusers folder.
    components
        Names in ``model_index.json`` that hold a module or a processor.
    policies
        Components that reinforcement learning may train.
    loops
        Ids of the loops that can drive it.
    consistency
        The level that its adapter is tested for.
    defaults
        Sampling parameters that fill what a request leaves None.
    variant
        Variant of the weight files, such as ``fp16``; None: the plain ones.
    make_adapter
        ``(card, device, dtype) -> adapter``; loads the weights.
    """

    model_id: str
    family: str
    task: TaskType
    source: Path
    components: tuple[str, ...]
    make_adapter: Callable[[ModelCard, torch.device, torch.dtype], Any] = field(repr=False)
    policies: tuple[str, ...] = ("transformer",)
    loops: tuple[str, ...] = ("denoise",)
    consistency: ConsistencyLevel = ConsistencyLevel.C2_BEHAVIOUR
    defaults: DiffusionParams = field(default_factory=DiffusionParams)
    variant: str | None = None


def read_model_index(folder: str | Path) -> dict[str, Any]:
    """Return ``model_index.json`` of a diffusers folder.

    Raises
    ------
    UserError
        If the folder is missing or is not a diffusers folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"model folder {folder} does not exist; give the path of a diffusers folder"
        )
    index = folder / "model_index.json"
    if not index.is_file():
        raise UserError(
            f"{folder} is not a diffusers folder (it has no model_index.json); "
            "save the model with DiffusionPipeline.save_pretrained"
        )
    try:
        parsed = json.loads(index.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{index} is not valid JSON ({error}); download the model again") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{index} holds no JSON object; download the model again")
    return parsed
