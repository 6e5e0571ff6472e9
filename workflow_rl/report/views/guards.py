"""The guards: what was measured to see a reward being hacked, and where it drifted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.numbers import number, signed
from workflow_rl.report.run_data import GuardAlarm, RunData

PREFIX = "guard/"
MOST_ALARMS = 50


@dataclass(frozen=True)
class GuardView:
    """One guard: its curve with the band of the start, and its alarms."""

    name: str
    alarms: list[GuardAlarm]
    chart: Chart

    @property
    def state(self) -> str:
        """What is to be said of it: ``stopped the run``, ``2 alarms`` or ``quiet``."""
        if any(alarm.action == "stop" for alarm in self.alarms):
            return "stopped the run"
        count = len(self.alarms)
        return f"{count} alarm{'s' if count > 1 else ''}" if count else "quiet"


def guard_views(run: RunData) -> list[GuardView]:
    """Return the guards of a run, those with alarms first."""
    measured = [key.removeprefix(PREFIX) for key in run.metrics if key.startswith(PREFIX)]
    views = [_guard(run, name) for name in dict.fromkeys([*run.guards, *measured])]
    return sorted(views, key=lambda view: -len(view.alarms))


def alarm_rows(run: RunData) -> list[tuple[str, str, str, str, str]]:
    """Return guard, iteration, value, deviations and action of the first alarms."""
    return [
        (a.guard, str(a.iteration), number(a.value), signed(a.deviations), a.action)
        for a in run.alarms[:MOST_ALARMS]
    ]


def _guard(run: RunData, name: str) -> GuardView:
    alarms = [alarm for alarm in run.alarms if alarm.guard == name]
    values = run.metrics.get(f"{PREFIX}{name}", [])
    series = [Series(name, run.iterations[: len(values)], values)]
    if alarms:
        points = [a.iteration for a in alarms], [a.value for a in alarms]
        series.append(Series("alarms", *points, alarm=True))
    baseline = run.guards.get(name)
    reach = math.nan if baseline is None else baseline.threshold * baseline.std
    if baseline is None or not math.isfinite(baseline.mean + reach):
        return GuardView(name, alarms, Chart(name, series))
    note = (
        f"Band: {number(baseline.mean)} ± {number(baseline.threshold, 2)} standard deviations, "
        "as at the start."
    )
    chart = Chart(
        name,
        series,
        note,
        reference=baseline.mean,
        expected=(baseline.mean - reach, baseline.mean + reach),
    )
    return GuardView(name, alarms, chart)
