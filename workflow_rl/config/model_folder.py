"""What a diffusers folder says about itself in JSON, read without PyTorch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workflow_rl.config.component_files import (
    check_components,
    check_libraries,
    check_plain_weights,
)
from workflow_rl.config.families import FAMILIES, Family, Grid, ReadJSON
from workflow_rl.config.guidance import check_stage_guidance
from workflow_rl.config.lora_file import check_lora
from workflow_rl.config.stage import StageConfig
from workflow_rl.config.train_modules import check_train_modules
from workflow_rl.errors import UserError


def check_model_folder(folder: Path, key: str, stage: StageConfig) -> Family:
    """Check that a folder holds a model that the stage can use, before anything is loaded.

    Parameters
    ----------
    folder
        Diffusers folder.
    key
        Configuration key that named it, for messages: ``stages.t2i.model``.
    stage
        The stage: its task, size and number of frames must suit the model.

    Raises
    ------
    UserError
        If the folder is missing, is not a diffusers folder, lacks a component's files, is of a
        family or variant that is not supported or of another task, if the model can't make the
        size or number of frames, if it lacks the guidance, or if the stage's LoRA does not fit it.
    """
    if not folder.is_dir():
        raise UserError(
            f"{key}: no folder {folder}; give the path of a diffusers folder, or the id of one on "
            "the hub, such as black-forest-labs/FLUX.1-dev"
        )
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{key}: {folder} has no model_index.json, so it is not a diffusers folder; "
            "give the folder that save_pretrained wrote"
        )
    read = json_reader(folder, key)
    family = check_model_json(read, str(folder), key, stage)
    index = read("model_index.json")
    where = key.removesuffix(".model")
    files = check_components(folder, index, stage.variant, f"{where}.variant")
    if stage.train_modules:
        check_train_modules(files, stage.train_modules, f"{where}.train_modules")
    if stage.lora is not None:
        check_lora(folder, index, family.lora_targets, stage.lora, f"{where}.lora")
    return family


def json_reader(folder: Path, key: str) -> ReadJSON:
    """Return what reads a folder's JSON files, and tells of one that is not there or is none."""
    return lambda path: _read_json(folder / path, key)


def check_model_json(read: ReadJSON, source: str, key: str, stage: StageConfig) -> Family:
    """Check what a model's JSON files tell against a stage; the weights need not be there.

    Parameters
    ----------
    read
        Returns one of the files.
    source, key
        Where they are from, and the configuration key that named it, for messages.

    Raises
    ------
    UserError
        As `check_model_folder`.
    """
    read = _telling(read, f"{key}: {source}")
    index = read("model_index.json")
    pipeline = index.get("_class_name")
    family = FAMILIES.get(str(pipeline))
    if family is None:
        raise UserError(
            f"{key}: {source} holds a {pipeline}, which is not supported; "
            f"use one of {', '.join(FAMILIES)}"
        )
    if family.task != stage.task:
        raise UserError(
            f"{key}: {source} holds a {pipeline}, whose task is {family.task}, but the stage's is "
            f"{stage.task}; put it in a stage of task {family.task}"
        )
    refusal = family.refusal(index)
    if refusal is not None:
        raise UserError(f"{key}: {source} is {refusal}")
    check_libraries(index, f"{key}: {source}")
    _check_parts(index, family.parts(read), source, key)
    check_plain_weights(index, read, f"{key}: {source}")
    where = key.removesuffix(".model")
    _check_size(family.grid(read), where, stage)
    _check_steps(read, where, stage)
    _check_inputs(family, where, stage)
    check_stage_guidance(
        where,
        stage,
        family.guidances(read),
        family.cfg_above,
        has_experts=not _is_null(index.get("transformer_2")),
        shapes_cfg=family.shapes_cfg,
    )
    return family


def _check_parts(index: Mapping[str, Any], parts: Sequence[str], source: str, key: str) -> None:
    for part in parts:
        if _is_null(index.get(part, [""])):
            raise UserError(
                f"{key}: {source} has null for its {part} in model_index.json, and can't work "
                "without; download the model again"
            )


def _is_null(entry: Any) -> bool:
    """Say whether an entry of model_index.json names no component: ``null`` or ``[null, null]``."""
    return not entry or entry[0] is None


def _check_inputs(family: Family, where: str, stage: StageConfig) -> None:
    tokens = stage.max_sequence_length
    if tokens is not None and tokens > family.max_text_tokens:
        raise UserError(
            f"{where}.max_sequence_length is {tokens}, but {family.name} takes at most "
            f"{family.max_text_tokens} text tokens; give no more, or leave it out"
        )
    if stage.fps is not None and not family.takes_fps:
        raise UserError(
            f"{where}.fps is {stage.fps:g}, but a {family.name} model is told no frame rate; "
            "leave it out"
        )


def _check_size(grid: Grid, where: str, stage: StageConfig) -> None:
    for name, value, step in (
        ("height", stage.height, grid.height),
        ("width", stage.width, grid.width),
    ):
        if value is not None and value % step:
            raise UserError(
                f"{where}.{name} is {value}, but this model makes multiples of {step}; "
                f"use {_nearest(value, step)}"
            )
        if value is not None and grid.largest is not None and value > grid.largest:
            raise UserError(
                f"{where}.{name} is {value}, but this model has positions for {grid.largest} "
                "pixels; give no more"
            )
    if stage.num_frames is not None and (stage.num_frames - 1) % grid.frames:
        raise UserError(
            f"{where}.num_frames is {stage.num_frames}, but this model makes {grid.frames}·n + 1 "
            f"frames; use {_nearest(stage.num_frames - 1, grid.frames) + 1}"
        )
    if stage.num_frames is not None and stage.num_frames < grid.fewest_frames:
        raise UserError(
            f"{where}.num_frames is {stage.num_frames}, but this model's first frame is the image "
            f"that it is given, so that it would make nothing; use {grid.fewest_frames} or more"
        )


def _check_steps(read: ReadJSON, where: str, stage: StageConfig) -> None:
    """Refuse one step of a stretched schedule: the stock scheduler divides 0 by 0."""
    if stage.num_inference_steps > 1:
        return
    terminal = read("scheduler/scheduler_config.json").get("shift_terminal")
    if terminal:
        raise UserError(
            f"{where}.num_inference_steps is {stage.num_inference_steps}, but this model's "
            f"scheduler stretches the steps to end at {terminal} (shift_terminal); use 2 or more"
        )


def _nearest(value: int, step: int) -> int:
    return max(step, round(value / step) * step)


class _Parsed(dict[str, Any]):
    """A parsed JSON file; one that lacks a key it is asked for is told to the user."""

    def __init__(self, content: Mapping[str, Any], source: str) -> None:
        super().__init__(content)
        self._source = source

    def __missing__(self, name: str) -> Any:
        raise UserError(f"{self._source} has no {name!r}; download the model again")


def _telling(read: ReadJSON, source: str) -> ReadJSON:
    """Return ``read`` with files that say what they lack."""
    return lambda path: _Parsed(read(path), f"{source}/{path}")


def _read_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{key}: {path} is missing; download the model again") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{key}: {path} is not JSON; download the model again") from None
    if not isinstance(content, dict):
        raise UserError(f"{key}: {path} is not a JSON object; download the model again")
    return content
