"""A whole run on a device beside the CPU: checkpoints, resume and evaluation mix nothing either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.other_device import OTHER, other_device
from workflow_rl.cli.main import app

ROOT = Path(__file__).parents[2]
SHORT = [
    *("training.threads=1", "training.iterations=1", "training.checkpoint.every=1"),
    *("logging.tensorboard=false", "data.prompts_per_iteration=1", "evaluation.seeds_per_prompt=1"),
    *("stages.t2i.samples=2", "stages.t2i.optimizer.schedule=constant"),
    *("stages.i2v.samples=2", "stages.i2v.optimizer.schedule=constant"),
    *("stages.t2i.lora={rank: 2}", "stages.i2v.kl_weight=0.1"),
    "stages.t2i.memory={drop_text_encoders: true}",
    "stages.i2v.memory={vae_slicing: true, vae_tiling: true}",
]
COMPARED = ("reward_mean", "grad_norm/t2i", "grad_norm/i2v", "kl/i2v")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _call(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def _run(folder: Path, device: torch.device) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Train one iteration, resume for a second and evaluate; return metrics and evaluation."""
    run, prompts = folder / "run", folder / "prompts.txt"
    folder.mkdir()
    prompts.write_text("a red circle moving left\n")
    places = [f"output_dir={run}", f"data.prompts={prompts}", f"data.eval_prompts={prompts}"]
    with other_device() if device == OTHER else nullcontext():
        _call(
            "train",
            ROOT / "configs/quickstart.yaml",
            *SHORT,
            *places,
            f"training.device='{device}'",
        )
        _call("resume", run, "training.iterations=2")
        _call("evaluate", run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    evaluation = json.loads((run / "evaluation.json").read_text())["reward"]
    means = {when: evaluation[when] for when in ("before", "after")}
    return [{name: line[name] for name in COMPARED} for line in lines], means


def test_a_run_is_the_same(tmp_path: Path) -> None:
    there, evaluated_there = _run(tmp_path / "there", OTHER)
    here, evaluated_here = _run(tmp_path / "here", torch.device("cpu"))
    assert len(here) == 2
    assert there == [pytest.approx(line, rel=1e-3, abs=1e-6) for line in here]
    assert evaluated_there == pytest.approx(evaluated_here, rel=1e-4)
    assert abs(evaluated_here["after"] - evaluated_here["before"]) > 1e-3
