"""Laws of the metrics: exact, strict JSON, comparable after a resume."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.training.metrics_log import MetricsLog, read_metrics


def make(run_dir: Path, tensorboard: bool = False) -> MetricsLog:
    """Return a log that writes the file alone."""
    return MetricsLog(run_dir, tensorboard=tensorboard, wandb=None, trackio=None)


def write(run_dir: Path, iterations: range) -> bytes:
    """Log some iterations, return the file."""
    with make(run_dir) as log:
        for iteration in iterations:
            log.log(iteration, {"reward_mean": iteration / 3, "b": None}, {"step": 0.5})
        return log.path.read_bytes()


def test_a_line_is_on_disk_at_once_with_sorted_keys(tmp_path: Path) -> None:
    log = make(tmp_path / "run")
    log.log(1, {"z": 1, "a": 0.1}, {"step": 2.5})
    assert log.path.read_text() == '{"a": 0.1, "iteration": 1, "time/step": 2.5, "z": 1}\n'
    log.close()


@settings(max_examples=50, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_back_exactly(tmp_path_factory: pytest.TempPathFactory, number: float) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    with make(run_dir) as log:
        log.log(0, {"x": number})
    [line] = read_metrics(run_dir / "metrics.jsonl")
    assert math.copysign(1, line["x"]) == math.copysign(1, number)
    assert line["x"] == number


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    values = {"a": math.nan, "b": [math.inf, 1.0], "c": {"d": -math.inf}}
    with make(tmp_path) as log:
        log.log(0, values)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"iteration": 0, "a": None, "b": [None, 1.0], "c": {"d": None}}


@pytest.mark.parametrize("name", ["iteration", "time/step"])
def test_reserved_names_are_refused(tmp_path: Path, name: str) -> None:
    with make(tmp_path) as log, pytest.raises(ValueError, match="not names of metrics"):
        log.log(0, {name: 1})


def test_an_iteration_is_logged_once_even_by_two_processes(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    with make(tmp_path) as log:
        with pytest.raises(ValueError, match="iteration 2 after 2"):
            log.log(2, {})
        log.log(3, {})
    assert [line["iteration"] for line in read_metrics(log.path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("torn", [b"", b'{"iter', b'{"iteration": 6}', b"\0\0", b'{"a": "\r'])
@pytest.mark.parametrize("checkpoint", [0, 3, 5])
def test_a_resumed_file_equals_one_never_stopped(
    tmp_path: Path, torn: bytes, checkpoint: int
) -> None:
    expected = write(tmp_path / "whole", range(1, 9))
    run_dir = tmp_path / "killed"
    path = run_dir / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(write(tmp_path / "first", range(1, 6)) + torn)

    with make(run_dir) as log:
        log.truncate_after(checkpoint)
    assert [line["iteration"] for line in read_metrics(path)] == [*range(1, checkpoint + 1)]

    assert write(run_dir, range(checkpoint + 1, 9)) == expected
    assert [p.name for p in run_dir.iterdir()] == ["metrics.jsonl"]


def test_truncation_in_the_middle_of_writing_and_before_it(tmp_path: Path) -> None:
    with make(tmp_path) as log:
        log.truncate_after(0)
        assert not log.path.exists()
        for iteration in (1, 2, 3):
            log.log(iteration, {})
        log.truncate_after(1)
        log.log(2, {"again": True})
    assert read_metrics(log.path) == [{"iteration": 1}, {"iteration": 2, "again": True}]


def test_a_torn_line_is_not_written_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 0}\n{"iter')
    assert read_metrics(path) == [{"iteration": 0}]
    with make(tmp_path) as log, pytest.raises(WorkflowRLError, match="half a line"):
        log.log(1, {})
    assert path.read_bytes().endswith(b'{"iter')


@pytest.mark.parametrize("bad", [b"{\n", b"3\n", b"{}\n", b'{"iteration": "x"}\n', b"\xff\n"])
def test_damage_in_the_middle_is_an_error(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"iteration": 0}\n' + bad + b'{"iteration": 2}\n'
    path.write_bytes(content)
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)
    with make(tmp_path) as log, pytest.raises(UserError, match="line 2"):
        log.truncate_after(1)
    assert path.read_bytes() == content


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_gets_the_finite_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (1, 3):  # the second process resumes from iteration 2
        with make(tmp_path, tensorboard=True) as log:
            log.truncate_after(first - 1)
            for iteration in range(first, first + 4):
                metrics = {"reward_mean": first, "note": "text", "bad": math.nan, "none": None}
                log.log(iteration, metrics, {"step": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward_mean", "time/step"]
    curve = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert curve == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 3), (6, 3)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()  # a folder such as wandb leaves behind is not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    settings: dict[str, Any] = {"wandb": None, "trackio": None, name: {"project": "p"}}
    with pytest.raises(UserError, match=rf"pip install 'workflow-rl\[{name}\]'"):
        MetricsLog(tmp_path / "run", tensorboard=False, **settings)
    assert not (tmp_path / "run").exists()


FAKE = """
calls = []
class Run:
    def log(self, numbers, step): calls.append(("log", numbers, step))
    def finish(self): calls.append(("finish",))
def init(**settings):
    calls.append(("init", settings))
    return Run()
def log(metrics, step): calls.append(("log", metrics, step))
def finish(): calls.append(("finish",))
"""


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(FAKE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, name, raising=False)
    configured = {"project": "p", "name": None}
    settings: dict[str, Any] = {"wandb": None, "trackio": None, name: configured}
    with MetricsLog(tmp_path / "run7", tensorboard=False, **settings) as log:
        log.log(4, {"a": 1.5, "text": "x", "bad": math.nan})

    calls = sys.modules[name].calls
    monkeypatch.delitem(sys.modules, name)
    assert calls[0][1]["project"] == "p"
    assert calls[0][1]["name"] == "run7"
    assert calls[0][1]["resume"] == "allow"
    assert calls[1:] == [("log", {"a": 1.5}, 4), ("finish",)]
