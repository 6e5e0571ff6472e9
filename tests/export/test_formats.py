"""Each format, loaded by the stock pipeline, makes what our served model makes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.export.conftest import CASES, GetRun
from tests.export.tiny_run import TinyRun
from workflow_rl.export.options import ExportFormat, ExportOptions, Weights
from workflow_rl.export.run import export_run
from workflow_rl.training.weight_sync import WeightRole

TOLERANCE = 1e-5
names = pytest.mark.parametrize("name", CASES)


def _export(run: TinyRun, output: Path, form: str, **options: Any) -> Path:
    asked = ExportOptions(run.stage, ExportFormat(form), output, **options)
    assert export_run(run.dir, asked) == output
    return output


def _policies(run: TinyRun) -> list[str]:
    index = json.loads((run.model / "model_index.json").read_text())
    return [name for name, entry in index.items() if name.startswith("transformer") and entry[0]]


def _load_loras(run: TinyRun, folder: Path) -> Any:
    pipeline, policies = run.base(), _policies(run)
    if len(policies) == 1:
        pipeline.load_lora_weights(folder)
        return pipeline
    for component in policies:
        second = {"load_into_transformer_2": True} if component == "transformer_2" else {}
        pipeline.load_lora_weights(folder / component, **second)
    return pipeline


def _load_merged(run: TinyRun, folder: Path) -> Any:
    index = json.loads((run.model / "model_index.json").read_text())
    parts = {
        name: getattr(importlib.import_module("diffusers"), index[name][1]).from_pretrained(
            folder / name
        )
        for name in _policies(run)
    }
    return run.case.pipeline_class.from_pretrained(run.model, **parts)


def _load(run: TinyRun, folder: Path, form: str) -> Any:
    match form:
        case "lora":
            return _load_loras(run, folder)
        case "merged":
            return _load_merged(run, folder)
        case _:
            return run.case.pipeline_class.from_pretrained(folder)


@names
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("lora", "lora"),
        ("default lora", "lora"),
        ("lora", "merged"),
        ("lora", "diffusers"),
        ("full", "merged"),
        ("full", "diffusers"),
    ],
)
def test_stock_makes_what_we_serve(
    get_run: GetRun, tmp_path: Path, name: str, kind: str, form: str
) -> None:
    run = get_run(name, kind)
    weights: Weights
    weights, role = ("ema", WeightRole.EMA) if form == "merged" else ("student", WeightRole.STUDENT)
    pipeline = _load(run, _export(run, tmp_path / "out", form, weights=weights), form)
    stock, ours = run.made_by_stock(pipeline), run.made_by_us(role)
    assert float((stock - ours).abs().max()) <= TOLERANCE
    assert float((run.made_by_base - ours).abs().max()) > 1e-3, "it trained nothing"
