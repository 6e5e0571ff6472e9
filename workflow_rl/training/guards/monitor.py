"""Measures the guards, compares them with the start, and raises alarms."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workflow_rl.config.guards import GuardsConfig
from workflow_rl.config.run_dir import CONFIG_FILE
from workflow_rl.errors import WorkflowRLError
from workflow_rl.training.guards.alarms import Alarm
from workflow_rl.training.guards.statistics import (
    diversity_groups,
    group_diversity,
    sample_statistics,
)
from workflow_rl.training.iteration_log import IterationLog
from workflow_rl.whole_files import write_whole
from workflow_rl.workflow import StageOutput

BASELINE_FILE = "guards.json"
ALARMS_FILE = "guard_alarms.jsonl"
WORSE = 1.5
"""Factor of the drift at the last alarm from which there is another one."""
BACK = 0.8
"""Share of the threshold below which a guard has left drift."""
LEAST_STD = 1e-6

QUANTILES = (0.05, 0.5, 0.95)
"""Quantiles of the samples at the start that are kept."""


@dataclass
class _Guard:
    """One guard's baseline, recent values and whether it is in drift.

    The baseline is kept as sums over samples and, when it is complete, quantiles; ``samples`` are
    kept until then.
    """

    threshold: float
    count: int
    mean: float
    squares: float
    recent: deque[float]
    alarmed: float = 0.0
    samples: list[float] = field(default_factory=list)
    quantiles: list[float] = field(default_factory=list)

    @property
    def std(self) -> float:
        """Standard deviation of the baseline's samples, never 0."""
        return max(math.sqrt(self.squares / max(1, self.count - 1)), LEAST_STD)

    def learn(self, values: torch.Tensor) -> None:
        """Take samples [N] into the baseline."""
        for value in values.tolist():
            self.count += 1
            delta = value - self.mean
            self.mean += delta / self.count
            self.squares += delta * (value - self.mean)
        self.samples += values.tolist()

    def complete(self) -> None:
        """Take the quantiles of the baseline, and drop its samples."""
        if self.samples:
            values = torch.tensor(self.samples, dtype=torch.float64)
            at = torch.tensor(QUANTILES, dtype=torch.float64)
            self.quantiles = torch.quantile(values, at).tolist()
        self.samples = []

    def drift(self) -> tuple[float, float]:
        """Return the window's mean and its distance from the start in standard deviations."""
        if not self.recent or self.count < 2:
            return math.nan, math.nan
        value = sum(self.recent) / len(self.recent)
        return value, (value - self.mean) / self.std

    def is_alarm(self, deviations: float) -> bool:
        """Take note of the drift; True where it is new or has become worse."""
        size = abs(deviations)
        if size < BACK * self.threshold:
            self.alarmed = 0.0
        if size > self.threshold and size >= WORSE * self.alarmed:
            self.alarmed = size
            return True
        return False

    def judge_again(self, before: float | None) -> None:
        """Hold an alarm raised at the threshold ``before`` to the present drift, and threshold.

        None where a checkpoint has it not: the drift of the alarm counts then. A guard that is not
        in drift stays so: where its threshold was lowered, the next iteration raises the alarm.
        """
        size = self.alarmed
        if before not in (None, self.threshold) and self.alarmed:
            size = abs(self.drift()[1])
        self.alarmed = size if size > self.threshold else 0.0

    @property
    def excess(self) -> float:
        """The drift as a multiple of the threshold."""
        return abs(self.drift()[1]) / self.threshold

    @property
    def drifted(self) -> bool:
        """Whether the guard is in drift."""
        return self.alarmed > 0


class Guards:
    """The guards of a run: see the package's docstring for files, metrics and rules.

    Parameters
    ----------
    config : GuardsConfig
    run_dir : Path
        Gets ``guards.json`` and ``guard_alarms.jsonl``.
    """

    def __init__(self, config: GuardsConfig, run_dir: Path) -> None:
        self.config = config
        self.baseline_path = run_dir / BASELINE_FILE
        self.alarms = IterationLog(run_dir / ALARMS_FILE)
        self._guards: dict[str, _Guard] = {}
        self._seen = 0
        self._baseline_iterations = config.baseline_iterations

    def look(
        self, iteration: int, outputs: tuple[StageOutput, ...], metrics: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Alarm]]:
        """Measure one iteration; write the baseline when it is complete, and the alarms.

        Parameters
        ----------
        outputs
            What the stages made.
        metrics
            Of the iteration; ``kl/{stage}`` is read, where there is one.

        Returns
        -------
        metrics : dict of str to float
            ``guard/...`` and ``guard_z/...``.
        alarms : list of Alarm
        """
        found, alarms, first_measured = {}, [], False
        learning = self._seen < self._baseline_iterations
        for name, values in self._measure(outputs, metrics).items():
            guard = self._guard(name)
            finite = values[values.isfinite()].double()
            mean = float(finite.mean()) if len(finite) else math.nan
            if len(finite):
                first_measured = first_measured or not guard.recent
                guard.recent.append(mean)
            if learning and not name.startswith("kl/"):
                guard.learn(finite)
            deviations = math.nan if learning else guard.drift()[1]
            found[f"guard/{name}"], found[f"guard_z/{name}"] = mean, deviations
            if guard.is_alarm(deviations):
                alarms.append(self._alarm(iteration, name))
        self._seen += 1
        if self._seen == self._baseline_iterations:
            for guard in self._guards.values():
                guard.complete()
            self.write_baseline()
        elif first_measured and not learning:  # a KL: its baseline needs no samples
            self.write_baseline()
        if alarms:
            self.alarms.append_all(iteration, [_line(alarm) for alarm in alarms])
        return found, alarms

    def _measure(
        self, outputs: tuple[StageOutput, ...], metrics: Mapping[str, float]
    ) -> dict[str, torch.Tensor]:
        watched = self.config.watch
        if not watched:
            return {}
        found: dict[str, torch.Tensor] = {}
        for output, groups in zip(outputs, diversity_groups(outputs), strict=True):
            stage = output.stage.name
            for kind, values in sample_statistics(output.media).items():
                found[f"{kind}/{stage}"] = values
            if len(groups.unique()) < len(groups):
                found[f"diversity/{stage}"] = group_diversity(output.media, groups)
            if f"kl/{stage}" in metrics:
                kl = torch.tensor([float(metrics[f"kl/{stage}"])], dtype=torch.float64)
                found[f"kl/{stage}"] = (2 * kl.clamp_min(0)).sqrt()
        return {name: v for name, v in found.items() if name.split("/")[0] in watched}

    def _guard(self, name: str) -> _Guard:
        if name not in self._guards:
            self._guards[name] = self._new(name)
        return self._guards[name]

    def _new(self, name: str) -> _Guard:
        recent: deque[float] = deque(maxlen=self.config.window)
        threshold = self.config.threshold(name)
        if name.startswith("kl/"):  # mean 0 and standard deviation 1: it is in deviations already
            return _Guard(threshold, 2, 0.0, 1.0, recent)
        return _Guard(threshold, 0, 0.0, 0.0, recent)

    def _alarm(self, iteration: int, name: str) -> Alarm:
        guard = self._guards[name]
        value, deviations = guard.drift()
        action = "stop" if self._stops(name) else "warn"
        key = self.config.threshold_key(name)
        return Alarm(iteration, name, value, deviations, guard.threshold, action, key)

    def _stops(self, name: str) -> bool:
        watched = self.config.watch
        stop_on = watched if self.config.stop_on is None else self.config.stop_on
        kind = name.split("/")[0]
        return self.config.action == "stop" and kind in watched and kind in stop_on

    def _stopping(self) -> list[str]:
        """Return the guards for whose drift the run has to stop, the farthest beyond first."""
        names = [n for n, guard in self._guards.items() if guard.drifted and self._stops(n)]
        return sorted(names, key=lambda name: (-self._guards[name].excess, name))

    def stop_reason(self) -> str | None:
        """Return why the run has to stop, in one line; None where it has not."""
        stopping = self._stopping()
        if not stopping:
            return None
        alarm = self._alarm(self._seen - 1, stopping[0])
        path = self.baseline_path.with_name(CONFIG_FILE)
        return (
            f"{alarm}; the checkpoint is written; to go on all the same, set guards.action: warn "
            f"or raise {alarm.key} in {path}, and resume"
        )

    def write_baseline(self) -> None:
        """Write ``guards.json``; a guard without a baseline or a value is left out."""
        guards = {
            name: {
                "mean": guard.mean,
                "std": guard.std,
                "threshold": guard.threshold,
                "quantiles": guard.quantiles,
            }
            for name, guard in self._guards.items()
            if guard.count > 1 and guard.recent
        }
        content = {
            "guards": guards,
            "baseline_iterations": self._baseline_iterations,
            "window": self.config.window,
        }
        if not guards:
            return
        try:
            write_whole(self.baseline_path, json.dumps(content, sort_keys=True))
        except OSError as error:
            raise WorkflowRLError(
                f"cannot write {self.baseline_path}: {error}; make room and resume"
            ) from error

    def state(self) -> dict[str, Any]:
        """Return what resume needs, as JSON types."""
        return {
            "seen": self._seen,
            "baseline_iterations": self._baseline_iterations,
            "stopped_by": self._stopping(),
            "guards": {
                name: {
                    "count": guard.count,
                    "mean": guard.mean,
                    "squares": guard.squares,
                    "recent": list(guard.recent),
                    "alarmed": guard.alarmed,
                    "threshold": guard.threshold,
                    "samples": guard.samples,
                    "quantiles": guard.quantiles,
                }
                for name, guard in self._guards.items()
            },
        }

    def restore(self, state: Mapping[str, Any] | None, tell: Callable[[str], None]) -> None:
        """Go on from what :meth:`state` returned; thresholds and action are the configuration's.

        The baseline's iterations stay those that the run began with.

        A checkpoint from before there were guards has no state, and one of a run that watched
        nothing has no guards in it: what is left of the start is not known, and a baseline of
        later iterations would hide a drift, so the guards are off, in what comes after it too.
        """
        if state is None or not state["guards"]:
            if self.config.watch:
                tell(
                    "warning: no guard was watched when this run began, so there is no start to "
                    "compare with: the guards stay off"
                )
            self.config = self.config.model_copy(update={"watch": ()})
            return
        self._seen = state["seen"]
        asked = self.config.baseline_iterations
        self._baseline_iterations = state.get("baseline_iterations", asked)
        if asked != self._baseline_iterations:
            tell(
                f"guards.baseline_iterations is {asked}, but this run began with "
                f"{self._baseline_iterations} and keeps to it: what the start is can't change"
            )
        for name, values in state["guards"].items():
            guard = self._guard(name)
            guard.count, guard.mean = values["count"], values["mean"]
            guard.squares, guard.alarmed = values["squares"], values["alarmed"]
            guard.recent.extend(values["recent"])
            guard.samples = list(values.get("samples", []))
            guard.quantiles = list(values.get("quantiles", []))
            guard.judge_again(values.get("threshold"))
        stopping = self._stopping()
        for name in state.get("stopped_by", ()):
            if name not in stopping:
                tell(f"guard {name} had stopped this run; it goes on, as its config.yaml now says")
        if self._seen >= self._baseline_iterations:
            self.write_baseline()


def _line(alarm: Alarm) -> dict[str, Any]:
    return {
        "guard": alarm.guard,
        "value": alarm.value,
        "deviations": alarm.deviations,
        "action": alarm.action,
    }
