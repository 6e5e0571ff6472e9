"""Scores of several candidates on the same samples, and what they say of one another.

Differences, win rates and effects are of pairs: the same prompt and seed of a candidate and of the
baseline. A sample that failed on either side leaves its pair out, which is counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workflow_rl.evaluation.diversity import FloatArray, prompt_diversity
from workflow_rl.evaluation.statistics import (
    Interval,
    PairedComparison,
    bootstrap_interval,
    paired_bootstrap,
)

TOTAL = "weighted sum"
"""Name of the sum of all rewards with their weights."""
FORMAT = 1


@dataclass(frozen=True)
class ScoredCandidate:
    """One candidate's scores.

    Attributes
    ----------
    label : str
    description : Mapping
        What it is, as JSON values: ``argument``, a run's ``iteration`` and ``weights``, and the
        ``shapes`` of its samples, ``[H, W]`` or ``[T, H, W]``.
    trained_on : tuple of str or None
        Names of the rewards that it was trained on; None where nothing is known of that.
    total : Tensor
        float32 ``[N]``, the weighted sum; NaN where failed.
    measures : Mapping of str to Tensor
        Each reward, and ``reward/part``, float32 ``[N]``, NaN where failed.
    failures : Mapping of int to str
        Why, per failed row.
    made : bool array ``[N]``
        Which samples exist whole, whatever a reward says of them.
    distances : list of arrays
        As :func:`workflow_rl.evaluation.diversity.distances` gives them.
    """

    label: str
    description: Mapping[str, Any]
    trained_on: tuple[str, ...] | None
    total: torch.Tensor
    measures: Mapping[str, torch.Tensor]
    failures: Mapping[int, str]
    made: npt.NDArray[np.bool_]
    distances: list[FloatArray]


@dataclass(frozen=True)
class Against:
    """One candidate against the baseline: the weighted sum, each measure, and its diversity."""

    total: PairedComparison
    measures: Mapping[str, PairedComparison]
    diversity: PairedComparison


@dataclass(frozen=True)
class Comparison:
    """Everything that an evaluation found.

    ``sources`` maps a measure to the names of the rewards that it comes from. ``means``,
    ``diversity`` and ``against`` have one entry per candidate; the baseline's ``against`` is None.
    """

    candidates: tuple[ScoredCandidate, ...]
    baseline: int
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    sources: Mapping[str, Sequence[str]]
    means: tuple[Mapping[str, Interval], ...]
    diversity: tuple[Interval, ...]
    against: tuple[Against | None, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def measures(self) -> list[str]:
        """Names of the measures, in the order of the rewards."""
        return list(self.sources)

    @property
    def several_seeds(self) -> bool:
        """Whether a prompt has more than one sample, without which nothing is diverse."""
        return len(set(self.prompts)) < len(self.prompts)

    def trained(self, index: int, measure: str) -> bool | None:
        """Whether a candidate was trained on what a measure comes from; None: not known."""
        names = self.candidates[index].trained_on
        if names is None:
            return None
        return not set(names).isdisjoint(self.sources[measure])

    def to_json(self) -> dict[str, Any]:
        """Return all figures as JSON values; what is not known is None."""
        return {
            "format": FORMAT,
            **self.settings,
            "baseline": self.candidates[self.baseline].label,
            "prompts": list(self.prompts),
            "seeds": list(self.seeds),
            "candidates": [self._candidate(i) for i in range(len(self.candidates))],
        }

    def _candidate(self, index: int) -> dict[str, Any]:
        candidate, against = self.candidates[index], self.against[index]
        return {
            "label": candidate.label,
            **candidate.description,
            "trained_on": None if candidate.trained_on is None else list(candidate.trained_on),
            "failures": dict(Counter(candidate.failures.values()).most_common()),
            "rewards": {
                name: {
                    "trained": self.trained(index, name),
                    "mean": _interval(self.means[index][name]),
                    "against_baseline": None if against is None else _pair(against.measures[name]),
                    "scores": _numbers(_values(candidate, name)),
                }
                for name in self.measures
            },
            "diversity": {
                "mean": _interval(self.diversity[index]),
                "against_baseline": None if against is None else _pair(against.diversity),
            },
        }


def compare(
    candidates: Sequence[ScoredCandidate],
    prompts: Sequence[str],
    seeds: Sequence[int],
    sources: Mapping[str, Sequence[str]],
    *,
    baseline: int = 0,
    confidence: float = 0.95,
    samples: int = 2000,
    settings: Mapping[str, Any] | None = None,
) -> Comparison:
    """Estimate means, differences to the baseline, win rates, effects and diversity.

    Parameters
    ----------
    prompts, seeds
        Of each row; several seeds of one prompt are resampled together.
    sources
        Measure to the rewards that it comes from, several for ``TOTAL`` where the sum is shown.
    confidence, samples
        Of the intervals, see :mod:`workflow_rl.evaluation.statistics`.
    settings
        What else to tell with the figures, as JSON values.
    """
    options: dict[str, Any] = {"confidence": confidence, "samples": samples}
    base = candidates[baseline]

    def mean_of(candidate: ScoredCandidate, name: str) -> Interval:
        return bootstrap_interval(_values(candidate, name), clusters=prompts, **options)

    def diversity_of(candidate: ScoredCandidate, made: npt.NDArray[np.bool_]) -> FloatArray:
        return prompt_diversity(candidate.distances, prompts, made)

    def against(candidate: ScoredCandidate) -> Against:
        both = base.made & candidate.made
        pairs = {
            name: paired_bootstrap(
                _values(base, name), _values(candidate, name), clusters=prompts, **options
            )
            for name in dict.fromkeys([TOTAL, *sources])
        }
        return Against(
            pairs[TOTAL],
            {name: pairs[name] for name in sources},
            paired_bootstrap(diversity_of(base, both), diversity_of(candidate, both), **options),
        )

    return Comparison(
        candidates=tuple(candidates),
        baseline=baseline,
        prompts=tuple(prompts),
        seeds=tuple(seeds),
        sources=sources,
        means=tuple({name: mean_of(c, name) for name in sources} for c in candidates),
        diversity=tuple(bootstrap_interval(diversity_of(c, c.made), **options) for c in candidates),
        against=tuple(None if c is base else against(c) for c in candidates),
        settings=dict(settings or {}) | {"confidence": confidence, "bootstrap_samples": samples},
    )


def _values(candidate: ScoredCandidate, name: str) -> list[float]:
    values: list[float] = (candidate.total if name == TOTAL else candidate.measures[name]).tolist()
    return values


def _numbers(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with None for what is not a number."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return _known(asdict(interval))


def _pair(pair: PairedComparison) -> dict[str, Any]:
    figures = {"baseline": pair.before, "candidate": pair.after, "effect": pair.effect}
    return _known(figures) | {
        "difference": _interval(pair.difference),
        "wins": _interval(pair.wins),
    }
