"""Runs as processes: as many at once as there are slots, and none harms another."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.ablation.made_up import make_config
from workflow_rl.ablation import runner
from workflow_rl.ablation.jobs import Job, make_jobs
from workflow_rl.ablation.runner import CONSOLE_FILE, Outcome, run_jobs
from workflow_rl.ablation.variants import build_variants

FINISH = 'mkdir -p "$0/checkpoints/iteration_00000004"'


class Told:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.began: list[tuple[str, str]] = []
        self.done: list[tuple[str, int, float | None]] = []
        self.outcomes: dict[str, Outcome] = {}
        self.stops = 0

    def started(self, job: Job, where: str) -> None:
        self.began.append((job.name, where))

    def progress(self, job: Job, done: int, reward: float | None) -> None:
        self.done.append((job.name, done, reward))

    def stopping(self) -> None:
        self.stops += 1

    def ended(self, job: Job, outcome: Outcome) -> None:
        self.outcomes[job.name] = outcome


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    """Return nested, shared, only_t2i and only_i2v."""
    return make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[:4]


def _shell(**scripts: str) -> Callable[[Job], Sequence[str]]:
    """Return a command that runs a variant's script; ``$0`` is the run's directory."""
    return lambda job: ["sh", "-c", scripts.get(job.variant, FINISH), str(job.run_dir)]


def _slots(count: int) -> list[dict[str, str]]:
    return [dict(os.environ) | {"CUDA_VISIBLE_DEVICES": str(index)} for index in range(count)]


def test_a_run_that_fails_does_not_touch_the_others(jobs: list[Job]) -> None:
    scripts = {
        "nested": "echo 'error: the disk is full; make room' >&2; exit 1",
        "shared": "kill -9 $$",
        "only_t2i": "exit 0",
    }
    told = Told()
    outcomes = run_jobs(jobs, _slots(1), _shell(**scripts), told)
    assert outcomes == told.outcomes
    logs = {job.variant: job.run_dir / CONSOLE_FILE for job in jobs}
    assert {name.split("/")[0]: (o.state, o.reason) for name, o in outcomes.items()} == {
        "nested": ("failed", f"the disk is full; make room; see {logs['nested']}"),
        "shared": (
            "failed",
            f"its process was ended by SIGKILL, as a machine out of memory does; see "
            f"{logs['shared']}",
        ),
        "only_t2i": ("failed", f"exit code 0; see {logs['only_t2i']}"),
        "only_i2v": ("finished", ""),
    }


def test_a_command_that_cannot_begin_is_a_failure_of_its_run(jobs: list[Job]) -> None:
    def command(job: Job) -> Sequence[str]:
        return ["no-such-program"] if job.variant == "nested" else _shell()(job)

    outcomes = run_jobs(jobs, _slots(1), command, Told())
    assert [o.state for o in outcomes.values()] == ["failed", *["finished"] * 3]
    assert "no-such-program" in outcomes["nested/seed0"].reason


@pytest.mark.parametrize("slots", [1, 2])
def test_no_more_run_at_once_than_there_are_slots(
    jobs: list[Job], tmp_path: Path, slots: int
) -> None:
    log = tmp_path / "log"
    script = f"echo begin >> {log}; sleep 0.2; {FINISH}; echo end >> {log}"
    told = Told()
    run_jobs(jobs, _slots(slots), _shell(**{job.variant: script for job in jobs}), told)
    running, most = 0, 0
    for word in log.read_text().split():
        running += 1 if word == "begin" else -1
        most = max(most, running)
    assert most == slots
    assert {device for _, device in told.began} == {str(index) for index in range(slots)}


def test_progress_is_read_from_the_metrics(jobs: list[Job]) -> None:
    line = '{"iteration": 0, "reward_mean": 0.25}'
    script = f"echo '{line}' >> $0/metrics.jsonl; sleep 0.3; {FINISH}"
    told = Told()
    run_jobs(jobs[:1], _slots(1), _shell(nested=script), told)
    assert told.done == [("nested/seed0", 1, 0.25)]


def test_a_stop_asks_every_process_and_begins_no_other(jobs: list[Job]) -> None:
    script = "trap 'echo asked; exit 130' TERM; while :; do sleep 0.02; done"
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    told = Told()
    outcomes = run_jobs(jobs, _slots(2), _shell(nested=script, shared=script), told)
    timer.join()
    assert {name: o.state for name, o in outcomes.items()} == {
        "nested/seed0": "stopped",
        "shared/seed0": "stopped",
    }
    assert told.stops == 1
    assert [job.run_dir.exists() for job in jobs] == [True, True, False, False]
    assert (jobs[0].run_dir / CONSOLE_FILE).read_text() == "asked\n"
