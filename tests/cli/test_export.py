"""What `export` refuses before it reads a weight, and what it hands on."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Invoke
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.export import options
from workflow_rl.export.options import ExportFormat, ExportOptions, KeyFormat


@pytest.fixture
def run(workspace: Path) -> Path:
    """A run directory without a checkpoint; its t2i stage was frozen."""
    model = workspace / "z-image"
    (model / "vae").mkdir(parents=True)
    (model / "model_index.json").write_text(json.dumps({"_class_name": "ZImagePipeline"}))
    (model / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8, 16, 32]}))
    create_run_dir(load_config("run.yaml", ["output_dir=frozen", "stages.t2i.freeze=true"]))
    create_run_dir(load_config("run.yaml", ["output_dir=z", "stages.t2i.model=z-image"]))
    create_run_dir(load_config("run.yaml"))
    (workspace / "taken").mkdir()
    return workspace / "run"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("nowhere --stage i2v --format merged", "nowhere holds no run"),
        ("run --stage i2w --format merged", "--stage i2w is no stage of this run; use t2i or i2v"),
        ("frozen --stage t2i --format merged", "stage 't2i' was frozen in this run"),
        ("run --stage i2v --format lora", "trained without a LoRA; use --format merged or"),
        ("run --stage i2v --format merged", "run has no checkpoint yet; let `workflow-rl train`"),
        ("run --stage i2v --format merged --weights ema", "keeps no EMA of stage 'i2v'"),
        ("run --stage i2v --format merged -o taken", "taken exists already; give another folder"),
        ("run --stage i2v --format merged -o run.yaml", "run.yaml exists already"),
        ("run --stage i2v --format merged -o run.yaml/out", "run.yaml is a file, so"),
        ("run --stage i2v --format diffusers --key-format comfyui", "use --format merged or lora"),
    ],
)
def test_a_fault_is_one_line_and_nothing_is_written(
    invoke: Invoke, workspace: Path, run: Path, arguments: str, says: str
) -> None:
    before = sorted(workspace.rglob("*"))
    assert says in invoke("export", *arguments.split()).one_line_error()
    assert sorted(workspace.rglob("*")) == before


def test_a_family_whose_names_in_comfyui_are_not_known(
    invoke: Invoke, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is added may be; those that there are have their tables."""
    monkeypatch.setattr(options, "COMFYUI_FAMILIES", ("wan", "flux"))
    ask = "z --stage t2i --format merged --key-format comfyui"
    says = "family z_image, whose keys are not mapped for ComfyUI (mapped: flux, wan); use --key"
    assert says in invoke("export", *ask.split()).one_line_error()


def test_a_model_that_is_gone(invoke: Invoke, workspace: Path, run: Path) -> None:
    (workspace / "wan").rename(workspace / "moved")
    ask = ("export", "run", "--stage", "i2v", "--format", "merged")
    assert "stages.i2v.model: no folder wan" in invoke(*ask).one_line_error()


def test_options_are_handed_on_and_the_folder_is_printed(
    invoke: Invoke, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ExportOptions] = []

    def fake(run_dir: Path, wanted: ExportOptions, on_message: Any) -> Path:
        on_message("a message")
        asked.append(wanted)
        return wanted.target(run_dir)

    monkeypatch.setattr("workflow_rl.export.run.export_run", fake)
    ask = ("export", "run", "--stage", "i2v", "--format", "merged")
    result = invoke(*ask)
    assert (result.stdout, result.stderr) == ("run/export/i2v-merged\n", "a message\n")
    more = ("--iteration", "3", "--dtype", "bfloat16", "--weights", "student")
    assert invoke(*ask, *more, "--key-format", "comfyui").stdout == (
        "run/export/i2v-merged-comfyui\n"
    )
    assert invoke(*ask, "-o", "made/here").stdout == "made/here\n"
    assert asked[1] == ExportOptions(
        "i2v", ExportFormat.MERGED, None, "student", 3, "bfloat16", KeyFormat.COMFYUI
    )
