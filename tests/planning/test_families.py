"""`workflow-rl plan` of every family's tiny checkpoints, as their contracts name them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models.contract import FamilyCase, FamilyContract
from workflow_rl.cli.main import app
from workflow_rl.config.families import FAMILIES

MODELS = Path(__file__).parents[1] / "models"
BATCH = 2


def family_cases() -> dict[str, FamilyCase]:
    """Return the case of every contract in ``tests/models``, by name."""
    for path in sorted(MODELS.glob("test_*.py")):
        if "FamilyContract" in path.read_text(encoding="utf-8"):
            importlib.import_module(f"tests.models.{path.stem}")
    contracts = FamilyContract.__subclasses__()
    cases = [c.case for c in contracts if c.__module__.startswith("tests.models.")]
    return {case.name: case for case in cases}


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


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_is_planned_to_the_end(
    name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    told = plan_stage(CASES[name], folders[name], tmp_path)
    for cause in ("rollout", "decode", "training"):
        assert told["flops"][cause] > 0
    assert (told["flops"]["encode"] > 0) == (CASES[name].task == "i2v")
