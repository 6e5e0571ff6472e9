"""Writes intervals and paired comparisons into the cells of a table and the bars of a plot."""

from __future__ import annotations

import math
from collections.abc import Callable

from workflow_rl.evaluation.statistics import Interval, PairedComparison
from workflow_rl.report.forest import Bar
from workflow_rl.report.numbers import number, percent, signed

PAIR_HEADS = ("difference", "higher", "effect", "pairs")
"""Heads of what `pair_cells` writes after the two means."""
MEASURE_HEADS = ("measure", "before", "after", *PAIR_HEADS)
"""Heads of a table with a measure in each row."""


def pair_cells(pair: PairedComparison) -> list[str]:
    """Write both means, the difference, the win rate, the effect and how many pairs there are."""
    difference = pair.difference
    left_out = f" of {difference.count + difference.failed}" if difference.failed else ""
    return [
        number(pair.before),
        number(pair.after),
        with_ends(difference, signed),
        percent(pair.wins.mean) + _ends(pair.wins, lambda share: f"{100 * share:.0f}"),
        signed(pair.effect, 2),
        f"{difference.count}{left_out}",
    ]


def with_ends(interval: Interval, write: Callable[[float], str]) -> str:
    """Write a mean and the ends of its interval, where they are known."""
    return write(interval.mean) + _ends(interval, write)


def with_interval(interval: Interval) -> str:
    """Write a mean and the ends of its interval, and how many samples failed."""
    text = with_ends(interval, number)
    return text + (f" ({interval.failed} failed)" if interval.failed else "")


def pair_bar(name: str, pair: PairedComparison) -> Bar:
    """Return the difference in units of the baseline's spread, to be drawn beside others."""
    difference = pair.difference
    scale = pair.effect / difference.mean if difference.mean else math.nan
    return Bar(name, pair.effect, difference.low * scale, difference.high * scale)


def _ends(interval: Interval, write: Callable[[float], str]) -> str:
    if not math.isfinite(interval.low):
        return ""
    return f" [{write(interval.low)}, {write(interval.high)}]"
