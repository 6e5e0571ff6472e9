"""Metrics of a run: ``metrics.jsonl`` always, and what else the user looks at.

One line per iteration, with sorted keys and numbers that read back exactly. Wall-clock times have
names under ``time/`` and nothing else depends on the clock: a resumed run's lines equal those of
one never stopped, byte for byte, once these keys are left out.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol, Self

from workflow_rl.errors import UserError
from workflow_rl.training.iteration_log import IterationLog

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TIME_PREFIX = "time/"


class Sink(Protocol):
    """Somewhere that numbers go besides ``metrics.jsonl``."""

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Take in the finite numbers of an iteration."""

    def close(self) -> None:
        """Finish."""


class MetricsLog:
    """Writes the metrics of a run.

    Parameters
    ----------
    run_dir : Path
        Holds ``metrics.jsonl`` and the folder ``tensorboard``; made if missing.
    tensorboard : bool
        Write TensorBoard events.
    wandb, trackio : mapping or None
        Keyword arguments of their `init` (project, name, …); None leaves them out. A name that is
        missing or None is the run directory's.

    Raises
    ------
    UserError
        `wandb` or `trackio` is configured but not installed; nothing was written then.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        tensorboard: bool,
        wandb: Mapping[str, Any] | None,
        trackio: Mapping[str, Any] | None,
    ) -> None:
        services = {"wandb": wandb, "trackio": trackio}
        modules = {
            name: _import_extra(name) for name, settings in services.items() if settings is not None
        }
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / METRICS_FILE
        self._lines = IterationLog(self.path)
        self._sinks: list[Sink] = []
        if tensorboard:
            self._sinks.append(_TensorBoard(run_dir / TENSORBOARD_FOLDER))
        if wandb is not None:
            self._sinks.append(_Wandb(modules["wandb"], run_dir, wandb))
        if trackio is not None:
            self._sinks.append(_Trackio(modules["trackio"], run_dir, trackio))

    def log(
        self, iteration: int, metrics: Mapping[str, Any], times: Mapping[str, float] | None = None
    ) -> None:
        """Write an iteration's line and force it to the disk.

        Parameters
        ----------
        iteration : int
            Greater than that of the line before.
        metrics : mapping of str to JSON value
            Must not depend on the clock. Numbers that are not finite become null; only numbers go
            to the other places.
        times : mapping of str to float, optional
            Wall-clock seconds; written under ``time/<name>``.

        Raises
        ------
        ValueError
            `iteration` was logged already, or a metric has a name that is reserved.
        WorkflowRLError
            The disk refuses.
        """
        values = {**metrics, **{f"{TIME_PREFIX}{name}": s for name, s in (times or {}).items()}}
        if "iteration" in values or any(name.startswith(TIME_PREFIX) for name in metrics):
            raise ValueError(f"'iteration' and {TIME_PREFIX}* are not names of metrics")
        self._lines.append(iteration, values)
        numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
        for sink in self._sinks:
            sink.write(iteration, numbers)

    def truncate_after(self, iteration: int) -> None:
        """Forget what was logged after ``iteration``; see `IterationLog.truncate_after`."""
        self._lines.truncate_after(iteration)

    def close(self) -> None:
        """Close the other places."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; the torn last line of a killed run is left out.

    Raises
    ------
    UserError
        The file is missing, or a line that is not the last one is damaged.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; give a run directory that has trained")
    return IterationLog(path).read()


def _is_number(value: Any) -> bool:
    """Whether a curve can be drawn of it."""
    return isinstance(value, int | float) and math.isfinite(value)


def _import_extra(name: str) -> ModuleType:
    """Import a service's client; a clear error where it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:  # no origin: a mere folder of that name
        raise UserError(
            f"logging.{name} is configured but the package {name} is not installed; "
            f"run pip install 'workflow-rl[{name}]' or set logging.{name}: null"
        )
    return importlib.import_module(name)


def _named(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that were given, with the run directory's name as the run's name."""
    given = {key: value for key, value in settings.items() if value is not None}
    return {"name": run_dir.resolve().name, **given}


class _TensorBoard:
    """TensorBoard events; what an earlier process logged past the first iteration is hidden."""

    def __init__(self, folder: Path) -> None:
        from torch.utils import tensorboard  # takes a second, and not every run wants it

        self._make_writer = tensorboard.SummaryWriter
        self._folder = folder
        self._writer: tensorboard.SummaryWriter | None = None

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            self._writer = self._make_writer(str(self._folder), purge_step=iteration)
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, iteration)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Wandb:
    """Weights & Biases; a resumed run continues under the same id."""

    def __init__(self, client: ModuleType, run_dir: Path, settings: Mapping[str, Any]) -> None:
        run_id = hashlib.blake2b(str(run_dir.resolve()).encode(), digest_size=8).hexdigest()
        named = _named(run_dir, settings)
        self._run = client.init(dir=str(run_dir), id=run_id, resume="allow", **named)

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=iteration)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """Trackio; a resumed run continues under the same name."""

    def __init__(self, client: ModuleType, run_dir: Path, settings: Mapping[str, Any]) -> None:
        self._client = client
        client.init(resume="allow", **_named(run_dir, settings))

    def write(self, iteration: int, numbers: Mapping[str, float]) -> None:
        self._client.log(dict(numbers), step=iteration)

    def close(self) -> None:
        self._client.finish()
