"""A run that trained named modules alone, by the trainer: the rest of the export is the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.export.conftest import A14B, ALL_CASES, GetRun
from tests.export.test_formats import load_export
from tests.export.tiny_run import TinyRun
from tests.models.contract import PROMPTS, STEPS, FamilyCase
from workflow_rl.config import RunConfig
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.config.train_modules import has_part
from workflow_rl.export.options import ExportFormat, ExportOptions
from workflow_rl.export.run import export_run
from workflow_rl.training.trainer import train

MODULE = "to_q"
"""Every family has queries, in each block."""
NAMES = [name for name in ALL_CASES if name not in ("flux-schnell", "ltx-condition")]


def _trained(base: TinyRun, folder: Path) -> TinyRun:
    """Train a run of one iteration on the model of ``base``."""
    config = _config(base.case, base.model, folder)
    create_run_dir(config)
    assert train(config) is None
    return TinyRun(base.case, config.output_dir, config)


def _config(case: FamilyCase, model: Path, folder: Path) -> RunConfig:
    stage = {
        "task": case.task,
        "model": model,
        "height": case.height,
        "width": case.width,
        "num_frames": case.num_frames,
        "num_inference_steps": STEPS,
        "samples": 2,
        "train_modules": [MODULE],
        "optimizer": {"lr": 0.03},
    }
    return RunConfig.model_validate(
        {
            "output_dir": folder / "run",
            "workflow": "tiny",
            "stages": {case.task: stage},
            "data": {"prompts": _prompts(case, folder), "prompts_per_iteration": 1},
            "rewards": [{"name": "jpeg_size"}],
            "training": {"iterations": 1, "device": "cpu"},
            "logging": {"tensorboard": False},
        }
    )


def _prompts(case: FamilyCase, folder: Path) -> Path:
    """Write a prompt, with the first frame that a video begins with."""
    if case.task == "t2i":
        path = folder / "prompts.txt"
        path.write_text(PROMPTS[0])
        return path
    frames = folder / "frames"
    frames.mkdir()
    Image.new("RGB", (case.width, case.height), "red").save(frames / "one.png")
    (frames / "one.txt").write_text(PROMPTS[0])
    return frames


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_modules_are_trained_and_the_rest_is_the_base(
    get_run: GetRun, tmp_path: Path, name: str
) -> None:
    run = _trained(get_run(name, "full"), tmp_path)
    ours = run.made_by_us()
    assert float((run.made_by_base - ours).abs().max()) > 1e-3, "it trained nothing"
    for form in (ExportFormat.MERGED, ExportFormat.DIFFUSERS):
        out = export_run(run.dir, ExportOptions(run.stage, form, tmp_path / form))
        stock = run.made_by_stock(load_export(run, out, form))
        assert float((stock - ours).abs().max()) <= 1e-5
        for component in ("transformer", "transformer_2")[: 2 if name == A14B else 1]:
            base, exported = _tensors(run.model / component), _tensors(out / component)
            assert base.keys() == exported.keys()
            changed = {key for key in base if not torch.equal(base[key], exported[key])}
            assert changed == {key for key in base if has_part(key, MODULE)}
