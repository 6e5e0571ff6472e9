"""`workflow-rl plan` of every family's tiny checkpoints, as their contracts name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from typer.testing import CliRunner

from tests.models.case import STEPS, FamilyCase
from tests.models.contract import family_cases
from workflow_rl.cli.main import app
from workflow_rl.config.families import FAMILIES
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import load_card
from workflow_rl.models import build_card
from workflow_rl.planning.architecture import Architecture, find_architecture
from workflow_rl.planning.modules import build_modules
from workflow_rl.planning.run import check_modules
from workflow_rl.request import TaskType
from workflow_rl.training.rollout import rollout_loop

BATCH = 2
COUNTED_AT_THE_LIMIT = ("qwen-image", "z-image")
"""Texts keep their own length there, which is less than what is planned."""


CASES = family_cases()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of every case."""
    root = tmp_path_factory.mktemp("families")
    for name, case in CASES.items():
        case.save(root / name)
    return {name: root / name for name in CASES}


def plan_stage(case: FamilyCase, folder: Path, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """Return what ``plan --json`` says of a chain of this model alone."""
    stage = case.fields() | {"task": case.task, "model": str(folder), "samples": BATCH} | fields
    config = {
        "output_dir": str(tmp_path / "run"),
        "stages": {case.task: stage},
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "rewards": [{"name": "frame_change"}],
    }
    path = tmp_path / "chain.yaml"
    path.write_text(json.dumps(config), encoding="utf-8")
    result = CliRunner().invoke(app, ["plan", str(path), "--json"])
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(result.stdout)["stages"][case.task]
    return told


def test_every_family_has_a_case(folders: dict[str, Path]) -> None:
    indexes = [json.loads((f / "model_index.json").read_text()) for f in folders.values()]
    planned = {FAMILIES[index["_class_name"]].name for index in indexes}
    assert planned == {family.name for family in FAMILIES.values()}


def attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    """Return the FLOPs of the CPU's fused attention, which PyTorch's counter leaves out."""
    return int(sdpa_flop_count(query, key, value))


def flops_of_a_pass(case: FamilyCase, folder: Path) -> float:
    """Return the FLOPs of a real transformer pass of one sample, without gradient."""
    instance = load_card(build_card(folder, TaskType(case.task)))
    requests = case.requests()
    attention = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    transformer = type(instance.component("transformer")).__name__
    counted = sum(counter.get_flop_counts()[transformer].values())
    return counted / (STEPS * len(requests))


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_planned_to_the_end(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """And a pass of its transformer costs what is planned, where a text's length is known."""
    case = CASES[name]
    told = plan_stage(case, folders[name], tmp_path)
    for cause in ("rollout", "decode", "training"):
        assert told["flops"][cause] > 0
    assert (told["flops"]["encode"] > 0) == (case.task == "i2v")
    if name in COUNTED_AT_THE_LIMIT:
        return
    one = told["flops"]["rollout"] / (told["work"]["samples"] * told["work"]["steps"])
    assert one == pytest.approx(flops_of_a_pass(case, folders[name]), rel=0.1)


@pytest.mark.parametrize(
    ("name", "lacking"), [("sd3.5-medium", "text_encoder"), ("wan-2.1", "image_encoder")]
)
def test_a_folder_without_an_encoder_is_one_line(
    name: str, lacking: str, folders: dict[str, Path]
) -> None:
    found = find_architecture(folders[name], "stages.x.model")
    parts = {path: file for path, file in found.files.items() if not path.startswith(f"{lacking}/")}
    architecture = Architecture(found.source, parts)
    modules = build_modules(architecture, torch.float32)
    with pytest.raises(UserError, match=rf"stages\.x\.model: .* has no {lacking}/config\.json"):
        check_modules("x", architecture, modules)
