"""Bootstrap intervals of means and of paired differences.

Several seeds of one prompt are not independent: where prompts are given as clusters, whole prompts
are resampled (the cluster bootstrap; Davison and Hinkley 1997, section 3.8). With few clusters the
plain percentile interval is too narrow; its quantiles are moved outwards so that its width is that
of a Student t interval when the data are Gaussian (the expanded percentile interval; Hesterberg
2015, "What Teachers Should Know About the Bootstrap", section 5.2).

A NaN is a failed sample: it enters nothing and is counted.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
DRAWS_AT_ONCE = 1_000_000
"""Bound on the indices drawn at once, so that memory does not grow with the resamples."""


@dataclass(frozen=True)
class Interval:
    """A mean with its interval.

    Attributes
    ----------
    mean, low, high : float
        ``low`` and ``high`` are NaN with fewer than two clusters, all are NaN without samples.
    count : int
        Samples that entered.
    failed : int
        Samples that were NaN.
    clusters : int
        Independent units among the samples that entered.
    """

    mean: float
    low: float
    high: float
    count: int
    failed: int
    clusters: int


@dataclass(frozen=True)
class PairedComparison:
    """Two sets of scores on the same samples.

    Attributes
    ----------
    difference : Interval
        Of ``after - before``; its ``failed`` counts the pairs with a NaN on either side.
    before, after : float
        Means over the pairs that entered, so that ``after - before`` is the difference's mean.
    wins : Interval
        Share of the pairs in which ``after`` is higher; a tie counts one half.
    effect : float
        The difference in standard deviations of ``before`` over the pairs that entered (Glass
        1976's delta), so that rewards of different scales can be set side by side; NaN with fewer
        than two pairs or where ``before`` does not vary.
    """

    difference: Interval
    before: float
    after: float
    wins: Interval
    effect: float

    @property
    def win_rate(self) -> float:
        """Share of the pairs in which ``after`` is higher; a tie counts one half."""
        return self.wins.mean


def bootstrap_interval(
    values: Sequence[float] | FloatArray,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Estimate the mean of ``values`` and its bootstrap interval.

    Parameters
    ----------
    values : Sequence of float
        One value per sample; NaN where it failed.
    clusters : Sequence, optional
        One label per sample, such as its prompt; samples of one label are resampled together.
    confidence : float
        Probability that the interval holds the mean, in (0, 1).
    samples : int
        Resamples.
    seed : int
        The same seed and values give the same interval.

    Raises
    ------
    ValueError
        When lengths differ, a value is infinite, or ``confidence`` or ``samples`` is out of range.
    """
    array = _vector(values)
    if not 0 < confidence < 1 or samples < 1:
        raise ValueError(
            f"expected 0 < confidence < 1 and samples >= 1, got {confidence} and {samples}"
        )
    valid = ~np.isnan(array)
    labels = _labels(clusters, len(array))[valid]
    kept = array[valid]
    failed = int((~valid).sum())
    if len(kept) == 0:
        return Interval(np.nan, np.nan, np.nan, 0, failed, 0)

    # Sums of distances to the smallest value: equal values have exactly their own value as mean.
    lowest = float(kept.min())
    _, unit = np.unique(labels, return_inverse=True)
    count_C = _vector(np.bincount(unit))
    total_C = _vector(np.bincount(unit, weights=kept - lowest))
    mean = lowest + float(total_C.sum() / count_C.sum())
    units = len(count_C)
    if units < 2:
        return Interval(mean, np.nan, np.nan, len(kept), failed, units)
    means_S = _resampled_means(total_C, count_C, samples, np.random.default_rng(seed))
    tail = _expanded_tail(confidence, units)
    low, high = np.quantile(means_S, [tail, 1 - tail])
    return Interval(mean, lowest + float(low), lowest + float(high), len(kept), failed, units)


def paired_bootstrap(
    before: Sequence[float] | FloatArray,
    after: Sequence[float] | FloatArray,
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
) -> PairedComparison:
    """Compare scores of the same samples, such as the same prompts and seeds, before and after.

    A pair enters when both of its scores are numbers. Parameters as for
    :func:`bootstrap_interval`.

    Raises
    ------
    ValueError
        As :func:`bootstrap_interval`.
    """
    before_N, after_N = _vector(before), _vector(after)
    if len(before_N) != len(after_N):
        raise ValueError(f"expected pairs, got {len(before_N)} before and {len(after_N)} after")
    delta_N = after_N - before_N
    won_N = np.where(np.isnan(delta_N), np.nan, 0.5 + 0.5 * np.sign(delta_N))
    difference, wins = (
        bootstrap_interval(
            values_N, clusters=clusters, confidence=confidence, samples=samples, seed=seed
        )
        for values_N in (delta_N, won_N)
    )
    entered = before_N[~np.isnan(delta_N)]
    if len(entered) == 0:
        return PairedComparison(difference, np.nan, np.nan, wins, np.nan)
    before_mean = float(entered.mean())
    effect = _over_spread(difference.mean, entered)
    return PairedComparison(difference, before_mean, before_mean + difference.mean, wins, effect)


def _over_spread(difference: float, before: FloatArray) -> float:
    """``difference`` in standard deviations of ``before``; NaN where there is no spread."""
    if len(before) < 2 or np.ptp(before) == 0:
        return float("nan")
    return difference / float(before.std(ddof=1))


def _vector(values: Sequence[float] | npt.NDArray[Any]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or np.isinf(array).any():
        raise ValueError(f"expected a flat list of finite numbers or NaN, got {array!r}")
    return array


def _labels(clusters: Sequence[Hashable] | None, count: int) -> IntArray:
    """Number the cluster of each sample; without clusters each sample is its own."""
    if clusters is None:
        return np.arange(count)
    if len(clusters) != count:
        raise ValueError(f"expected one cluster per value, got {len(clusters)} for {count} values")
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in clusters], dtype=np.intp)


def _resampled_means(
    total_C: FloatArray, count_C: FloatArray, samples: int, generator: np.random.Generator
) -> FloatArray:
    """Mean of each resample of whole clusters, ``[samples]``."""
    units = len(total_C)
    at_once = max(1, DRAWS_AT_ONCE // units)
    means = []
    for start in range(0, samples, at_once):
        picks = generator.integers(units, size=(min(at_once, samples - start), units))
        means.append(total_C[picks].sum(1) / count_C[picks].sum(1))
    return np.concatenate(means)


def _expanded_tail(confidence: float, units: int) -> float:
    """Probability to cut off at either end: ``Phi(-sqrt(n / (n - 1)) * t)`` (Hesterberg 2015).

    ``t`` is the quantile of Student's t with ``n - 1`` degrees of freedom, by its expansion in
    ``1 / (n - 1)`` about the Gaussian quantile (Abramowitz and Stegun 1964, 26.7.5).
    """
    normal = NormalDist()
    z = normal.inv_cdf(0.5 + confidence / 2)
    degrees = units - 1
    t = (
        z
        + (z**3 + z) / (4 * degrees)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    )
    return normal.cdf(-t * (units / degrees) ** 0.5)
