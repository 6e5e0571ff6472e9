"""A run that goes on to more iterations is the run that began with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Invoke
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint

CONFIG = """
output_dir: run
stages:
  t2i: {task: t2i, samples: 2, num_inference_steps: 2, sde: {kind: cps}, ema: {decay: 0.9},
        optimizer: {lr: 1.0e-4, warmup_steps: 4}, rollout_batch_size: 4}
  i2v: {task: i2v, samples: 2, num_inference_steps: 2, sde: {kind: cps},
        optimizer: {lr: 1.0e-4}, rollout_batch_size: 8}
data: {prompts: prompts.txt, prompts_per_iteration: 2}
rewards: [{name: frame_change}]
training: {iterations: 4, checkpoint: {every: 2}, threads: 1, device: cpu}
evaluation: {every: 2, seeds_per_prompt: 1, bootstrap_samples: 100}
logging: {tensorboard: false}
"""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG)
    colours = ("red", "blue", "green")
    (tmp_path / "prompts.txt").write_text("".join(f"a {c} circle moving left\n" for c in colours))
    return tmp_path


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file without what the clock says."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def _tensors(run: Path) -> dict[str, torch.Tensor]:
    path = latest_valid(run / "checkpoints", on_skip=pytest.fail)
    assert path is not None
    assert path.name == "iteration_00000004"
    return load_checkpoint(path).tensors


@pytest.mark.slow
def test_three_iterations_that_go_on_to_four_are_four(invoke: Invoke, workspace: Path) -> None:
    assert invoke("train", "config.yaml", "output_dir=whole").exit_code == 0
    assert invoke("train", "config.yaml", "training.iterations=3").exit_code == 0
    assert invoke("report", "run").exit_code == 0
    assert "4 with `workflow-rl resume run" in invoke("train", "config.yaml").one_line_error()

    resumed = invoke("resume", "run", "training.iterations=4")
    assert resumed.exit_code == 0, resumed.stderr
    assert "going on after iteration 3" in resumed.stdout
    assert "the run goes on to 4 iterations, no longer 3" in resumed.stdout
    assert "kept as report_after_3.html" in resumed.stdout

    assert _lines(Path("run/metrics.jsonl")) == _lines(Path("whole/metrics.jsonl"))
    run, whole = _tensors(Path("run")), _tensors(Path("whole"))
    assert run.keys() == whole.keys()
    assert all(torch.equal(run[name], whole[name]) for name in run)
    evaluated = {line["iteration"]: line for line in _lines(Path("run/evaluations.jsonl"))}
    assert set(evaluated) == {0, 2, 3, 4}, "the end of the shorter run stays a measured point"
    for line in _lines(Path("whole/evaluations.jsonl")):
        assert evaluated[line["iteration"]] == line
    assert not Path("run/report.html").exists()
    assert Path("run/report_after_3.html").is_file()

    # From now on it is a run of four iterations for every command.
    again = invoke("resume", "run")
    assert again.exit_code == 0
    assert "all 4 iterations were done" in again.stdout
    assert "has done 4 already" in invoke("resume", "run", "training.iterations=3").one_line_error()
    assert "already holds this run; go on" in invoke("train", "config.yaml").one_line_error()
