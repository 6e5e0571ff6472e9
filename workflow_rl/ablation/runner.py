"""Trains the runs of an ablation as processes of their own, several at once."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Protocol

from workflow_rl.ablation.jobs import Job, is_finished, iterations_done, prepare
from workflow_rl.errors import UserError
from workflow_rl.training.metrics_log import METRICS_FILE
from workflow_rl.training.signals import graceful_stop

CONSOLE_FILE = "console.log"
"""In a run's directory: all that its process printed, of every try."""
POLL_SECONDS = 0.2
TAIL_BYTES = 65536


@dataclass(frozen=True)
class Outcome:
    """How a run's process ended; ``reason`` says why it failed."""

    state: Literal["finished", "failed", "stopped"]
    reason: str = ""


class Display(Protocol):
    """Who is told how the runs go."""

    def started(self, job: Job, where: str) -> None:
        """The process of a run has begun; ``where`` names its device, if one was chosen."""

    def progress(self, job: Job, done: int, reward: float | None) -> None:
        """A run has done ``done`` iterations; ``reward`` is the last one's mean."""

    def stopping(self) -> None:
        """The runs that are going were asked to stop; told once, outside the signal's handler."""

    def ended(self, job: Job, outcome: Outcome) -> None:
        """The process of a run has ended, or could not begin."""


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    slot: int
    seen: int = 0
    """Bytes of metrics that were there at the last look."""


def run_jobs(
    jobs: Sequence[Job],
    slots: Sequence[Mapping[str, str]],
    command: Callable[[Job], Sequence[str]],
    display: Display,
) -> dict[str, Outcome]:
    """Train runs until all have ended, one process per slot at a time.

    A run whose process fails does not touch the others. SIGINT or SIGTERM asks every process to
    end its iteration and write a checkpoint; a second SIGINT kills them. When this process dies,
    however that is, the standard input of each run's process ends.

    Parameters
    ----------
    jobs
        In the order in which they begin.
    slots
        The environment of each slot's processes, such as ``{"CUDA_VISIBLE_DEVICES": "1"}`` on top
        of ``PATH`` and the rest.
    command
        The command that trains a run to its end, from wherever it is.
    display
        Is told how they go.

    Returns
    -------
    dict of str to Outcome
        By name of the run; those that were not begun before a stop are missing.
    """
    waiting, running = list(jobs), list[_Running]()
    free = list(range(len(slots)))
    outcomes: dict[str, Outcome] = {}
    asked = False

    def end(job: Job, outcome: Outcome) -> None:
        outcomes[job.name] = outcome
        display.ended(job, outcome)

    try:
        with graceful_stop() as stop:
            while running or (waiting and not stop.requested):
                while waiting and free and not stop.requested:
                    job = waiting.pop(0)
                    try:
                        running.append(_start(job, free[0], slots[free[0]], command(job)))
                    except (OSError, UserError) as error:
                        end(job, Outcome("failed", " ".join(str(error).split())))
                        continue
                    slot = free.pop(0)
                    display.started(job, slots[slot].get("CUDA_VISIBLE_DEVICES", ""))
                time.sleep(POLL_SECONDS)
                if stop.requested and not asked:
                    _ask_to_stop(running)
                    display.stopping()
                    asked = True
                for run in list(running):
                    _tell(run, display)
                    if run.process.poll() is not None:
                        running.remove(run)
                        free = sorted([*free, run.slot])
                        end(run.job, _outcome(run, stopped=stop.requested))
    finally:
        for run in running:
            run.process.kill()
            run.process.wait()
    return outcomes


def _start(job: Job, slot: int, environment: Mapping[str, str], command: Sequence[str]) -> _Running:
    """Start a run's process in a session of its own: a terminal's Ctrl-C reaches only this one."""
    prepare(job)
    with (job.run_dir / CONSOLE_FILE).open("ab") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    return _Running(job, process, slot)


def _ask_to_stop(running: Sequence[_Running]) -> None:
    for run in running:
        with suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGTERM)


def _tell(run: _Running, display: Display) -> None:
    metrics = run.job.run_dir / METRICS_FILE
    size = metrics.stat().st_size if metrics.is_file() else 0
    if size != run.seen:
        run.seen = size
        display.progress(run.job, iterations_done(run.job), _last_reward(metrics))


def _last_reward(metrics: Path) -> float | None:
    try:
        *_, line, _torn = _tail(metrics).split(b"\n")
        reward = json.loads(line).get("reward_mean")
    except ValueError:  # no whole line, or a first one that the tail cuts
        return None
    return float(reward) if isinstance(reward, int | float) else None


def _outcome(run: _Running, *, stopped: bool) -> Outcome:
    code = run.process.returncode
    if code == 0 and is_finished(run.job):
        return Outcome("finished")
    if stopped:
        return Outcome("stopped")
    log = run.job.run_dir / CONSOLE_FILE
    if code < 0:
        name = signal.Signals(-code).name
        memory = ", as a machine out of memory does" if name == "SIGKILL" else ""
        return Outcome("failed", f"its process was ended by {name}{memory}; see {log}")
    lines = _tail(log).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    return Outcome("failed", f"{last.removeprefix('error: ')}; see {log}")


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file; none where there is no file."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        _seek_near_end(file)
        return file.read()


def _seek_near_end(file: IO[bytes]) -> None:
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
