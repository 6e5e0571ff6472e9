"""The header: what happened, and the figures that matter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workflow_rl.evaluation.statistics import PairedComparison
from workflow_rl.report.numbers import duration, number, percent, signed
from workflow_rl.report.run_data import RunData
from workflow_rl.report.views.guards import guard_views


@dataclass(frozen=True)
class Tile:
    """One figure of the header."""

    label: str
    value: str
    detail: str = ""


def verdict(run: RunData, comparison: PairedComparison | None) -> tuple[str, str]:
    """Return the headline and its tone: ``up``, ``down`` or ``open``."""
    if comparison is None:
        if len(run.evaluations) > 1:
            return "The first and the last evaluation are of different samples.", "open"
        state = "only evaluated once" if run.evaluations else "not evaluated"
        return f"This run was {state} so far: nothing to compare yet.", "open"
    change = comparison.difference
    ends = (number(comparison.before), number(comparison.after))
    span = "\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}".join(ends)
    if change.low > 0:
        factor = ""
        if comparison.before > 0:
            factor = f", {number(comparison.after / comparison.before, 2)} times the start"
        return f"The mean reward rose: {span}{factor}.", "up"
    if change.high < 0:
        return f"The mean reward fell: {span}.", "down"
    return f"No clear change of the mean reward: {span}.", "open"


def tiles(run: RunData, comparison: PairedComparison | None, level: str) -> list[Tile]:
    """Return the figures of the header."""
    shown = []
    if comparison is not None:
        change = comparison.difference
        held_out = f"{change.count} samples of {change.clusters} prompts"
        shown += [
            Tile(
                "Change of the mean reward",
                signed(change.mean),
                f"{level} interval {signed(change.low)} to {signed(change.high)}",
            ),
            Tile("Better than before", percent(comparison.win_rate), held_out),
        ]
    if run.evaluations:
        means = [_mean(e.scores) for e in run.evaluations]
        best = max(range(len(means)), key=lambda i: _or_lowest(means[i]))
        at = f"after iteration {run.evaluations[best].iteration}; last {number(means[-1])}"
        shown.append(Tile("Best evaluation", number(means[best]), at))
    watched = [guard for guard in guard_views(run) if guard.measured and guard.baseline]
    if watched:
        drifted = list(dict.fromkeys(alarm.guard for alarm in run.alarms))
        first = f"the first was {drifted[0]}" if drifted else "nothing drifted far from the start"
        shown.append(Tile("Guards with an alarm", f"{len(drifted)} of {len(watched)}", first))
    times = run.metrics.get("time/iteration", [])
    total = sum(t for t in times if math.isfinite(t))
    each = f", {number(total / len(times))} s each" if times else ""
    made = f"{run.videos:,} samples in {len(run.iterations)} iterations{each}"
    shown.append(Tile("Training time", duration(total), made))
    gates = [run.metrics.get(f"c2_max_log_ratio/{stage}", []) for stage in run.stages]
    largest = max((v for values in gates for v in values if math.isfinite(v)), default=math.nan)
    if math.isfinite(largest):
        shown.append(Tile("Largest |log-ratio|", number(largest), "before an update; 0 is exact"))
    return shown


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _or_lowest(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
