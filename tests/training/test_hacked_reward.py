"""``configs/hacked_reward.yaml``, shorter and faster: videos turn bright, and a guard sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.cli.conftest import Invoked
from workflow_rl.cli.main import app
from workflow_rl.report.build import build_report
from workflow_rl.report.numbers import credit, number

ROOT = Path(__file__).parents[2]
GUARD = "brightness/i2v"
SHORT = [
    *("training.device=cpu", "training.threads=1", "training.iterations=5"),
    *("training.checkpoint.every=100", "logging.tensorboard=false"),
    *("data.prompts_per_iteration=2", "data.eval_prompts=null", "evaluation.seeds_per_prompt=1"),
    *("stages.t2i.samples=4", "stages.t2i.optimizer.lr=1e-3"),
    *("stages.i2v.samples=2", "stages.i2v.optimizer.lr=6e-4"),
    *("guards.baseline_iterations=2", "guards.window=2"),
]
STOP = [
    *("guards.action=stop", "guards.stop_on=[brightness]", "guards.watch=[brightness]"),
    f"guards.thresholds={{{GUARD}: 1.0}}",
]
CONSTANT = ["rewards=[{name: constant}]"]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be where the configuration finds ``examples``, and leave PyTorch its threads."""
    threads = torch.get_num_threads()
    monkeypatch.chdir(ROOT)
    yield
    torch.set_num_threads(threads)


def _train(folder: Path, *more: str) -> tuple[Invoked, list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the short run; return what was told, its metrics and its alarms."""
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle moving left\na blue square moving up\n")
    place = [f"data.prompts={prompts}", f"output_dir={folder / 'run'}"]
    called = ["train", "configs/hacked_reward.yaml", *SHORT, *place, *more]
    result = CliRunner().invoke(app, called)
    told = Invoked(result.exit_code, " ".join(result.stdout.split()), result.stderr)
    assert isinstance(result.exception, SystemExit | None), result.exception
    return told, _lines(folder / "run/metrics.jsonl"), _lines(folder / "run/guard_alarms.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.is_file() else []


@pytest.mark.slow
def test_the_guard_of_brightness_catches_it_and_every_place_says_so(tmp_path: Path) -> None:
    told, metrics, alarms = _train(tmp_path)
    assert told.exit_code == 0, told.stderr
    drift = [line[f"guard_z/{GUARD}"] for line in metrics]
    assert drift[:2] == [None, None]
    assert drift[-1] > drift[-2] > 1  # the threshold that the file sets
    first, *_ = (alarm for alarm in alarms if alarm["guard"] == GUARD)
    assert first["deviations"] == drift[first["iteration"]] > 1
    assert first["action"] == "warn"
    assert metrics[-1][f"guard/{GUARD}"] > metrics[0][f"guard/{GUARD}"]
    by = f"by iteration {first['iteration'] + 1}, {first['deviations']:.2f} standard deviations"
    assert f"warning: guard {GUARD} rose to {first['value']:.4g} {by}" in told.stdout
    page = build_report(tmp_path / "run").read_text()
    figures = (number(first["value"]), credit(first["deviations"]))
    cells = (str(first["iteration"] + 1), *figures, "warn")
    row = f'<th scope="row">{GUARD}</th>' + "".join(f"<td>{cell}</td>" for cell in cells)
    assert row in page


@pytest.mark.slow
def test_it_stops_the_run_where_that_is_asked_for(tmp_path: Path) -> None:
    told, metrics, alarms = _train(tmp_path, *STOP)
    assert told.exit_code == 1
    assert told.stderr.startswith(f"error: guard {GUARD} rose to ")
    assert len(metrics) < 5
    (alarm,) = alarms
    assert (alarm["guard"], alarm["iteration"] + 1, alarm["action"]) == (
        GUARD,
        len(metrics),
        "stop",
    )
    assert (tmp_path / f"run/checkpoints/iteration_{len(metrics):08d}").is_dir()
    assert "stopped the run" in build_report(tmp_path / "run").read_text()


@pytest.mark.slow
def test_without_that_reward_it_is_quiet(tmp_path: Path) -> None:
    """The same run under a constant reward: the drift is not the sampler's own."""
    _, metrics, alarms = _train(tmp_path, *CONSTANT)
    assert all(abs(line[f"guard_z/{GUARD}"]) < 0.5 for line in metrics[2:])
    assert GUARD not in [alarm["guard"] for alarm in alarms]
