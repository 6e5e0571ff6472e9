"""Shows a training run while it goes: a live line with ETA and reward, and a log file."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from workflow_rl.config.run_dir import LOG_FILE

if TYPE_CHECKING:
    from workflow_rl.evaluation.chain import Evaluation
    from workflow_rl.runtime.driver import ProgressEvent


class _WarningsShown(logging.Handler):
    """Shows what the package warns of, beside the live line."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning."""
        text = f"{record.levelname.lower()}: {record.getMessage()}"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class ConsoleListener:
    """Is told how a run goes, and tells the user and the log.

    Parameters
    ----------
    console
        Where to show it. On a terminal a live line stays at the bottom; elsewhere each iteration
        is a line.
    progress
        The live line; it is started and stopped by `showing`.
    log
        Gets every line, with its time.
    """

    def __init__(self, console: Console, progress: Progress, log: logging.Logger) -> None:
        self._console = console
        self._progress = progress
        self._log = log
        self._task: TaskID | None = None
        self._figures = ""
        self._first: int | None = None
        self._began = time.perf_counter()

    def message(self, text: str) -> None:
        """Show one line."""
        self._log.info(text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def progress(self, stage: str, event: "ProgressEvent") -> None:
        """Show on the live line which denoising step a stage is at; elsewhere nothing."""
        if self._console.is_terminal:
            working = f"{stage}: step {event.step}/{event.num_steps} of {event.batch_size} samples"
            self._update(description=f"{self._figures}  {working}".strip())

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        """Show that iteration ``number`` (1-based) of ``total`` is done."""
        seconds = metrics["time/iteration"]
        if self._first is None:  # later ones are timed from the end of this one
            self._first, self._began = number, time.perf_counter() - seconds
        mean_seconds = (time.perf_counter() - self._began) / (number - self._first + 1)
        figures = f"reward {metrics['reward_mean']:.4f}  {seconds:.1f} s"
        eta = f"ETA {format_duration(mean_seconds * (total - number))}"
        line = f"iteration {number}/{total}  {figures}  {eta}"
        self._log.info(line)
        if not self._console.is_terminal:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        self._figures = f"{figures}  {eta}"
        self._update(completed=number, total=total, description=self._figures)

    def _update(self, **fields: Any) -> None:
        """Change the live line, which begins with the first thing to show."""
        if self._task is None:
            self._task = self._progress.add_task("training", total=None)
        self._progress.update(self._task, **fields)

    def evaluation(self, number: int, evaluation: "Evaluation") -> None:
        """Show the mean reward of an evaluation after ``number`` iterations."""
        count = len(evaluation.scores)
        failed = ""
        if evaluation.failures:
            first = " ".join(next(iter(evaluation.failures.values())).split())
            failed = f", {len(evaluation.failures)} failed ({first})"
        mean = float(evaluation.scores.nanmean())
        self.message(
            f"evaluation after {number} iterations: reward {mean:.4f} over {count} samples{failed}"
        )


def show_message(text: str) -> None:
    """Show one line beside a command's output."""
    typer.echo(text, err=True)


def format_duration(seconds: float) -> str:
    """Return ``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def showing(run_dir: Path, console: Console | None = None) -> Iterator[ConsoleListener]:
    """Show a run and the package's warnings on the console; keep all it logs in ``train.log``."""
    console = console or Console()
    log = logging.getLogger("workflow_rl")
    handler = logging.FileHandler(run_dir / LOG_FILE, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    level = log.level
    shown = _WarningsShown(console)
    log.addHandler(handler)
    log.addHandler(shown)
    log.setLevel(logging.INFO)
    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    try:
        with progress:
            yield ConsoleListener(console, progress, log)
    finally:
        log.setLevel(level)
        log.removeHandler(shown)
        log.removeHandler(handler)
        handler.close()
