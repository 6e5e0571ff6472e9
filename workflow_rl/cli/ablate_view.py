"""Shows what an ablation will train, and how its runs go. Imports nothing heavy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from workflow_rl.ablation.jobs import (
    Job,
    exists,
    fault_at_end,
    is_finished,
    is_stale,
    iterations_done,
)
from workflow_rl.ablation.runner import Outcome
from workflow_rl.cli.progress import format_duration

PARTS = 4
"""Off a terminal a run's progress is told this often."""


def show_plan(
    jobs: Sequence[Job],
    left_out: Mapping[str, str],
    *,
    slots: int,
    out: Path,
    console: Console | None = None,
) -> None:
    """Print a line per run: what it makes and how far it is."""
    console = console or Console()
    _, last = list(jobs[0].config.stages.items())[-1]
    made = "images" if last.task == "t2i" else "videos"
    width = max(len(job.name) for job in jobs)
    for job in jobs:
        line = (
            f"{job.name:{width}}  {job.planned} {made}, {job.iterations} iterations: {_state(job)}"
        )
        print_line(console, line)
    for name, reason in left_out.items():
        print_line(console, f"left out: {name}: {reason}")
    todo = sum(job.planned for job in jobs if not is_finished(job))
    print_line(
        console, f"{len(jobs)} runs, {slots} at once, {todo} {made} in unfinished runs, in {out}"
    )


def _state(job: Job) -> str:
    if is_finished(job):
        return "finished, its end to do again" if fault_at_end(job) else "finished"
    if is_stale(job):
        return "to replace another configuration's"
    return f"to go on after {iterations_done(job)}" if exists(job) else "to do"


class JobsDisplay:
    """One live line per run that is going; off a terminal, lines now and then."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._told: dict[str, int] = {}

    def started(self, job: Job, where: str) -> None:
        """A run has begun."""
        device = f" on GPU {where}" if where else ""
        done = iterations_done(job) if exists(job) else 0
        self._began[job.name] = time.monotonic()
        self._told[job.name] = done * PARTS // job.iterations
        if self._console.is_terminal:
            self._tasks[job.name] = self._progress.add_task(
                f"{job.name}{device}", total=job.iterations, completed=done
            )
        else:
            print_line(self._console, f"{job.name}: begins{device}")

    def progress(self, job: Job, done: int, reward: float | None) -> None:
        """A run has done some iterations."""
        shown = "" if reward is None else f"  reward {reward:.4f}"
        if job.name in self._tasks:
            task = self._tasks[job.name]
            self._progress.update(task, completed=done, description=f"{job.name}{shown}")
            return
        part = done * PARTS // job.iterations
        if part > self._told[job.name]:
            self._told[job.name] = part
            print_line(self._console, f"{job.name}: iteration {done}/{job.iterations}{shown}")

    def stopping(self) -> None:
        """The runs that are going were asked to stop."""
        print_line(
            self._console,
            "stopping: each run ends its iteration with a checkpoint, and the same command goes "
            "on from there; Ctrl-C once more ends them now, without one",
        )

    def ended(self, job: Job, outcome: Outcome) -> None:
        """A run has ended."""
        if job.name in self._tasks:
            self._progress.remove_task(self._tasks.pop(job.name))
        seconds = time.monotonic() - self._began.get(job.name, time.monotonic())
        reason = f": {outcome.reason}" if outcome.reason else ""
        took = f" after {format_duration(seconds)}"
        print_line(self._console, f"{job.name}: {outcome.state}{took}{reason}")


@contextmanager
def showing_jobs(console: Console | None = None) -> Iterator[JobsDisplay]:
    """Show the runs while they go."""
    console = console or Console()
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield JobsDisplay(console, progress)


def print_line(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
