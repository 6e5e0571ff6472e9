"""Each format, loaded by the stock pipeline, makes what our served model makes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.export.conftest import A14B, CASES, OTHER_CASES, GetRun
from tests.export.tiny_run import TinyRun
from workflow_rl.export.options import ExportFormat, ExportOptions, KeyFormat, Weights
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


def load_export(run: TinyRun, folder: Path, form: str) -> Any:
    match form:
        case "lora":
            return _load_loras(run, folder)
        case "merged":
            return _load_merged(run, folder)
        case _:
            return run.case.pipeline_class.from_pretrained(folder)


_made: dict[tuple[Path, WeightRole], torch.Tensor] = {}


def _made_by_us(run: TinyRun, role: WeightRole) -> torch.Tensor:
    """Return what a run makes, served once: these tests only read it."""
    if (run.dir, role) not in _made:
        _made[run.dir, role] = run.made_by_us(role)
    return _made[run.dir, role]


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
    pipeline = load_export(run, _export(run, tmp_path / "out", form, weights=weights), form)
    stock, ours = run.made_by_stock(pipeline), _made_by_us(run, role)
    assert float((stock - ours).abs().max()) <= TOLERANCE
    assert float((run.made_by_base - ours).abs().max()) > 1e-3, "it trained nothing"


@pytest.mark.parametrize("name", OTHER_CASES)
@pytest.mark.parametrize(
    ("kind", "form"),
    [("default lora", "lora"), ("default lora", "merged"), ("full", "diffusers")],
)
def test_other_families(get_run: GetRun, tmp_path: Path, name: str, kind: str, form: str) -> None:
    run = get_run(name, kind)
    stock = run.made_by_stock(load_export(run, _export(run, tmp_path / "out", form), form))
    ours = _made_by_us(run, WeightRole.STUDENT)
    assert float((stock - ours).abs().max()) <= TOLERANCE
    assert float((run.made_by_base - ours).abs().max()) > 1e-3, "it trained nothing"


@pytest.mark.parametrize(
    ("form", "keys", "files"),
    [
        ("lora", "diffusers", "{0}/pytorch_lora_weights"),
        ("merged", "diffusers", "{0}/diffusion_pytorch_model"),
        ("lora", "comfyui", "{1}-i2v-{0}"),
        ("merged", "comfyui", "{1}-i2v-{0}"),
    ],
)
def test_two_experts_are_two_files(
    get_run: GetRun, tmp_path: Path, form: str, keys: str, files: str
) -> None:
    run = get_run(A14B, "lora")
    out = _export(run, tmp_path / "out", form, key_format=KeyFormat(keys))
    found = {str(path.relative_to(out)): load_file(path) for path in out.rglob("*.safetensors")}
    expected = [f"{files.format(c, run.dir.name)}.safetensors" for c in _policies(run)]
    assert sorted(found) == sorted(expected)
    first, second = (found[name] for name in expected)
    assert first.keys() == second.keys()
    weights = [key for key in first if first[key].ndim > 1]
    assert not any(torch.equal(first[key], second[key]) for key in weights)
