"""The guards: what was measured to see a reward being hacked, and where it drifted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.numbers import UNKNOWN, credit, number
from workflow_rl.report.run_data import GuardAlarm, GuardBaseline, RunData

VALUE, DRIFT = "guard/", "guard_z/"
MOST_ALARMS = 50
NOT_MEASURED = "not measured"
NO_BREAK = "\N{NO-BREAK SPACE}"
HEADS = ("Guard", "State", "Drift", "Largest", "Threshold", "Last", "At the start (5 to 95 %)")


@dataclass(frozen=True)
class GuardView:
    """One guard: its curve with the band of the start, its drift in deviations, its alarms.

    ``drift`` has a value per iteration, NaN where there is no baseline. ``measured`` is False where
    no iteration has a value.
    """

    name: str
    alarms: list[GuardAlarm]
    baseline: GuardBaseline | None
    drift: list[float]
    chart: Chart
    measured: bool

    @property
    def state(self) -> str:
        """What is to be said of it, such as ``stopped the run``, ``2 alarms`` or ``quiet``."""
        if not self.measured:
            return NOT_MEASURED
        if any(alarm.action == "stop" for alarm in self.alarms):
            return "stopped the run"
        count = len(self.alarms)
        return f"{count} alarm{'s' if count > 1 else ''}" if count else "quiet"

    @property
    def last(self) -> float:
        """The drift after the last iteration."""
        return self.drift[-1] if self.drift else math.nan

    @property
    def largest(self) -> float:
        """The drift that was farthest from 0, with its sign."""
        return max(filter(math.isfinite, self.drift), key=abs, default=math.nan)

    @property
    def reach(self) -> float:
        """The largest drift as a share of the threshold; 0 where it is not known."""
        share = math.nan if self.baseline is None else abs(self.largest) / self.baseline.threshold
        return share if math.isfinite(share) else 0.0

    @property
    def row(self) -> tuple[str, ...]:
        """The figures of :data:`HEADS`."""
        if self.baseline is None or not self.measured:
            return (self.name, self.state, *[UNKNOWN] * 5)
        start = number(self.baseline.mean)
        if self.baseline.quantiles:
            low, high = self.baseline.quantiles[0], self.baseline.quantiles[-1]
            start += f" ({number(low)} to {number(high)})".replace(" ", NO_BREAK)
        return (
            self.name,
            self.state,
            credit(self.last),
            credit(self.largest),
            number(self.baseline.threshold, 4),
            number(self.baseline.mean + self.last * self.baseline.std),
            start,
        )


def guard_views(run: RunData) -> list[GuardView]:
    """Return the guards of a run: those with alarms first, then by how near they came to one."""
    measured = [key.removeprefix(VALUE) for key in run.metrics if key.startswith(VALUE)]
    views = [_guard(run, name) for name in dict.fromkeys([*run.guards, *measured])]
    return sorted(views, key=lambda view: (-len(view.alarms), -view.reach))


def alarm_rows(run: RunData) -> list[tuple[str, str, str, str, str]]:
    """Return guard, iteration, value, deviations and action of the first alarms."""
    return [
        (a.guard, str(a.iteration), number(a.value), credit(a.deviations), a.action)
        for a in run.alarms[:MOST_ALARMS]
    ]


def _guard(run: RunData, name: str) -> GuardView:
    alarms = [alarm for alarm in run.alarms if alarm.guard == name]
    values = run.metrics.get(f"{VALUE}{name}", [])
    drift = run.metrics.get(f"{DRIFT}{name}", [])
    baseline = run.guards.get(name)
    measured = any(math.isfinite(value) for value in values)
    iterations = run.iterations[: len(values)]
    series = [Series("each iteration", iterations, values, faint=baseline is not None)]
    band = None if baseline is None else _band(baseline)
    if baseline is None or band is None:
        return GuardView(name, alarms, baseline, drift, Chart(name, series), measured)
    means = [baseline.mean + z * baseline.std for z in drift]
    series.append(Series("mean of the last ones", run.iterations[: len(means)], means))
    if alarms:
        points = [a.iteration for a in alarms], [a.value for a in alarms]
        series.append(Series("alarms", *points, alarm=True))
    chart = Chart(name, series, reference=baseline.mean, expected=band, legend=False)
    return GuardView(name, alarms, baseline, drift, chart, measured)


def _band(baseline: GuardBaseline) -> tuple[float, float] | None:
    """Return what is no drift; no guard's figure is below 0."""
    reach = baseline.threshold * baseline.std
    if not math.isfinite(baseline.mean + reach):
        return None
    return max(0.0, baseline.mean - reach), baseline.mean + reach
