"""The evaluations: reward and measures over time, and the same samples before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.embed import Embedder, Medium
from workflow_rl.report.intervals import Statistics
from workflow_rl.report.numbers import number
from workflow_rl.report.run_data import EvaluationRecord, RunData

MOST_PAIRS = 12


@dataclass(frozen=True)
class Shown:
    """One sample of an evaluation: its score and the media of every stage, first stage first."""

    label: str
    score: str
    media: list[tuple[str, Medium]]


@dataclass(frozen=True)
class Pair:
    """The same prompt and seed before and after."""

    prompt: str
    seed: int
    sides: list[Shown]
    change: float


def first_and_last(run: RunData) -> tuple[EvaluationRecord, EvaluationRecord] | None:
    """Return the evaluations to compare, or None when there are no two of the same samples."""
    if len(run.evaluations) < 2:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    if (first.prompts, first.seeds) != (last.prompts, last.seeds):
        return None
    return first, last


def evaluation_chart(run: RunData, statistics: Statistics, level: str) -> Chart:
    """Return the reward of every evaluation, with intervals."""
    series = _interval_series(run, statistics, "reward", [e.scores for e in run.evaluations], 0)
    return Chart(
        "Reward in evaluation", [series], f"Same prompts and seeds; band: {level} interval."
    )


def measure_charts(run: RunData, statistics: Statistics) -> list[Chart]:
    """Return one chart per component of the reward and further measure."""
    names = measure_names(run)
    return [
        Chart(
            name,
            [
                _interval_series(
                    run,
                    statistics,
                    name,
                    [e.measures.get(name, [math.nan] * len(e.prompts)) for e in run.evaluations],
                    1,
                )
            ],
        )
        for name in names
    ]


def pairs(run: RunData, embed: Embedder) -> list[Pair]:
    """Return the first shown samples before and after, side by side."""
    ends = first_and_last(run)
    if ends is None:
        return []
    first, last = ends
    rows = [row for row in first.media_rows if row in last.media_rows][:MOST_PAIRS]
    return [
        Pair(
            first.prompts[row],
            first.seeds[row],
            [
                _shown(label, e, row, run.stages, embed)
                for label, e in (("before", first), ("after", last))
            ],
            last.scores[row] - first.scores[row],
        )
        for row in rows
    ]


def _shown(
    label: str, evaluation: EvaluationRecord, row: int, stages: Sequence[str], embed: Embedder
) -> Shown:
    place = evaluation.media_rows.index(row)
    media = [
        (stage, embed(evaluation.media[stage][place]))
        for stage in stages
        if stage in evaluation.media
    ]
    return Shown(label, number(evaluation.scores[row]), media)


def _interval_series(
    run: RunData, statistics: Statistics, label: str, values: Sequence[Sequence[float]], colour: int
) -> Series:
    intervals = [
        statistics.interval(scores, evaluation.prompts)
        for scores, evaluation in zip(values, run.evaluations, strict=True)
    ]
    return Series(
        label,
        [e.iteration for e in run.evaluations],
        [i.mean for i in intervals],
        low=[i.low for i in intervals],
        high=[i.high for i in intervals],
        colour=colour,
        markers=True,
    )


def measure_names(run: RunData) -> list[str]:
    """Names of the measures, without one that only repeats the reward (its one component)."""
    names = dict.fromkeys(name for e in run.evaluations for name in e.measures)
    return [
        name
        for name in names
        if any(not _equal(e.measures.get(name, []), e.scores) for e in run.evaluations)
    ]


def _equal(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )
