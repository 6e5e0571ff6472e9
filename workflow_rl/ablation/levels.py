"""How soon a run reaches a level of the held-out reward."""

import math
from collections.abc import Mapping, Sequence


def mean_score(scores: Sequence[float]) -> float:
    """Return the mean of the scores that did not fail (NaN); NaN if all did."""
    valid = [score for score in scores if not math.isnan(score)]
    return sum(valid) / len(valid) if valid else math.nan


def first_reached(level: float, levels: Mapping[int, float]) -> int | None:
    """Return the first key, such as an iteration, whose level is at least ``level``; None if never.

    As fine as the evaluations are.
    """
    return next((at for at, value in sorted(levels.items()) if value >= level), None)
