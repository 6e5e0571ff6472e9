"""What `train` and `resume` do around the training itself, which is replaced here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Invoke
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.errors import UserError

FakeTraining = Callable[[Callable[..., int | None]], list[tuple[RunConfig, bool]]]


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Replace the training; the list that is returned gets its calls."""

    def replace(body: Callable[..., int | None]) -> list[tuple[RunConfig, bool]]:
        calls: list[tuple[RunConfig, bool]] = []

        def fake(config: RunConfig, *, resume: bool, listener: Any) -> int | None:
            calls.append((config, resume))
            return body(listener)

        monkeypatch.setattr("workflow_rl.training.trainer.train", fake)
        return calls

    return replace


def test_train_then_resume_the_same_configuration(
    invoke: Invoke, workspace: Path, training: FakeTraining
) -> None:
    calls = training(lambda listener: None)
    result = invoke("train", "run.yaml", "seed=3")
    assert result.exit_code == 0
    assert "next: workflow-rl report run" in result.stdout
    assert invoke("resume", "run").exit_code == 0
    config = load_config("run.yaml", ["seed=3"])
    assert calls == [(config, False), (config, True)]
    assert load_run_config(Path("run")) == config


def test_stopped_run_says_how_to_go_on(
    invoke: Invoke, workspace: Path, training: FakeTraining
) -> None:
    training(lambda listener: 7)
    result = invoke("train", "run.yaml")
    assert result.exit_code == 130
    assert "stopped after iteration 7" in result.stdout
    assert "workflow-rl resume run" in result.stdout


def test_run_stopped_at_once_says_how_to_go_on(
    invoke: Invoke, workspace: Path, training: FakeTraining
) -> None:
    def interrupt(listener: object) -> None:
        raise KeyboardInterrupt

    training(interrupt)
    result = invoke("train", "run.yaml")
    assert result.exit_code == 130
    assert "stopped at once; go on from the last checkpoint" in result.stdout
    assert "workflow-rl resume run" in result.stdout


def test_fault_found_while_loading_leaves_no_run(
    invoke: Invoke, workspace: Path, training: FakeTraining
) -> None:
    def fail(listener: object) -> None:
        raise UserError("weights of flux are truncated; download the model again")

    training(fail)
    assert "truncated" in invoke("train", "run.yaml").one_line_error()
    assert not Path("run").exists()


def test_fault_in_a_run_that_has_begun_keeps_what_it_wrote(
    invoke: Invoke, workspace: Path, training: FakeTraining
) -> None:
    def fail(listener: Any) -> None:
        Path("run/metrics.jsonl").write_text("{}\n")
        raise UserError("ten updates in a row were not finite; lower the learning rate")

    training(fail)
    invoke("train", "run.yaml").one_line_error()
    assert Path("run/metrics.jsonl").exists()


def test_overwrite_starts_anew(invoke: Invoke, workspace: Path, training: FakeTraining) -> None:
    training(lambda listener: Path("run/metrics.jsonl").write_text("{}\n") and None)
    invoke("train", "run.yaml")
    training(lambda listener: None)
    assert invoke("train", "run.yaml", "seed=2", "--overwrite").exit_code == 0
    assert not Path("run/metrics.jsonl").exists()
