"""What each section of the report shows, computed from a run's data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workflow_rl.evaluation.statistics import (
    Interval,
    PairedComparison,
    bootstrap_interval,
    paired_bootstrap,
)
from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.embed import Embedder, Medium
from workflow_rl.report.numbers import duration, number, percent, signed
from workflow_rl.report.run_data import EvaluationRecord, RunData, SampleNode

MOST_PAIRS = 12
STAGE_METRICS = {
    "kl": ("KL to the reference", "How far the stage has moved from its start."),
    "grad_norm": ("Gradient norm", "Before clipping."),
    "clip_fraction": ("Clip fraction", "Share of samples and steps outside the PPO clip range."),
    "c2_max_log_ratio": (
        "C2: largest |log-ratio| before the update",
        "0: training recomputes exactly what the rollout sampled.",
    ),
    "loss": ("Loss", "Policy gradient and KL."),
    "lr": ("Learning rate", ""),
}
RATIO_METRICS = ("ratio_min", "ratio_mean", "ratio_max")


@dataclass(frozen=True)
class Tile:
    """One figure of the header."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class MeasureRow:
    """A measure of the same samples before and after."""

    name: str
    before: str
    after: str
    difference: str
    interval: str


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


@dataclass(frozen=True)
class StageCharts:
    """The training curves of one stage."""

    name: str
    frozen: bool
    charts: list[Chart]


class Statistics:
    """The intervals of the report, at the confidence the run's configuration asks for."""

    def __init__(self, run: RunData) -> None:
        self.confidence = run.config.evaluation.confidence
        self._samples = run.config.evaluation.bootstrap_samples

    def interval(self, values: Sequence[float], prompts: Sequence[str]) -> Interval:
        """Return the mean with an interval over prompts."""
        return bootstrap_interval(
            values, clusters=prompts, confidence=self.confidence, samples=self._samples
        )

    def compare(
        self, before: Sequence[float], after: Sequence[float], prompts: Sequence[str]
    ) -> PairedComparison:
        """Return the paired comparison with an interval over prompts."""
        return paired_bootstrap(
            before, after, clusters=prompts, confidence=self.confidence, samples=self._samples
        )


def first_and_last(run: RunData) -> tuple[EvaluationRecord, EvaluationRecord] | None:
    """Return the evaluations to compare, or None when there are no two of the same samples."""
    if len(run.evaluations) < 2:
        return None
    first, last = run.evaluations[0], run.evaluations[-1]
    if (first.prompts, first.seeds) != (last.prompts, last.seeds):
        return None
    return first, last


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
    times = run.metrics.get("time/iteration", [])
    total = sum(t for t in times if math.isfinite(t))
    each = f"{number(total / len(times))} s per iteration" if times else ""
    shown += [
        Tile("Training samples", f"{run.videos:,}", f"in {len(run.iterations)} iterations"),
        Tile("Training time", duration(total), each),
    ]
    gates = [run.metrics.get(f"c2_max_log_ratio/{stage}", []) for stage in run.stages]
    largest = max((v for values in gates for v in values if math.isfinite(v)), default=math.nan)
    if math.isfinite(largest):
        shown.append(Tile("Largest |log-ratio|", number(largest), "before an update; 0 is exact"))
    return shown


def evaluation_chart(run: RunData, statistics: Statistics, level: str) -> Chart:
    """Return the reward of every evaluation, with intervals."""
    series = _interval_series(run, statistics, "reward", [e.scores for e in run.evaluations], 0)
    return Chart(
        "Reward in evaluation", [series], f"Same prompts and seeds; band: {level} interval."
    )


def measure_charts(run: RunData, statistics: Statistics) -> list[Chart]:
    """Return one chart per component of the reward and further measure."""
    names = _measure_names(run)
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


def measure_rows(run: RunData, statistics: Statistics) -> list[MeasureRow]:
    """Return the paired comparison of the reward and of every measure."""
    ends = first_and_last(run)
    if ends is None:
        return []
    first, last = ends
    rows = [("reward", first.scores, last.scores)]
    rows += [
        (name, first.measures[name], last.measures[name])
        for name in _measure_names(run)
        if name in first.measures and name in last.measures
    ]
    shown = []
    for name, before, after in rows:
        comparison = statistics.compare(before, after, first.prompts)
        change = comparison.difference
        shown.append(
            MeasureRow(
                name,
                number(comparison.before),
                number(comparison.after),
                signed(change.mean),
                f"{signed(change.low)} to {signed(change.high)}",
            )
        )
    return shown


def training_chart(run: RunData) -> Chart:
    """Return the reward of the samples trained on."""
    mean = run.metrics.get("reward_mean", [])
    spread = run.metrics.get("reward_std", [math.nan] * len(mean))
    series = Series(
        "reward",
        run.iterations[: len(mean)],
        mean,
        low=[m - s for m, s in zip(mean, spread, strict=True)],
        high=[m + s for m, s in zip(mean, spread, strict=True)],
        colour=2,
    )
    return Chart(
        "Reward in training",
        [series],
        "Other prompts each iteration; band: ± 1 standard deviation.",
    )


def stage_charts(run: RunData) -> list[StageCharts]:
    """Return the curves of every stage, first stage first."""
    stages = []
    for index, (name, config) in enumerate(run.config.stages.items()):
        charts = [
            Chart(title, [Series(title, run.iterations, run.metrics[key], colour=index)], note)
            for metric, (title, note) in STAGE_METRICS.items()
            if (key := f"{metric}/{name}") in run.metrics
        ]
        if all(f"{metric}/{name}" in run.metrics for metric in RATIO_METRICS):
            low, mean, high = (run.metrics[f"{metric}/{name}"] for metric in RATIO_METRICS)
            series = Series("mean ratio", run.iterations, mean, low=low, high=high, colour=index)
            note = "New over old probability; band: least to greatest."
            charts.insert(2, Chart("PPO ratio", [series], note, reference=1.0))
        stages.append(StageCharts(name, config.freeze, charts))
    return stages


def variance_charts(run: RunData) -> list[Chart]:
    """Return how the reward's variance splits between prompts and stages."""
    charts = []
    for suffix, names, title, note in (
        (
            "share",
            run.stages,
            "Share of the variance within a prompt",
            "The stage with the larger share drives the reward.",
        ),
        ("eta2", ["prompt", *run.stages], "Share of the sum of squares", "They add up to 1."),
        ("F", run.stages, "F statistic", "About 1 where a stage makes no difference of its own."),
    ):
        series = [
            Series(name, run.iterations, run.metrics[key], colour=_colour(run, name))
            for name in names
            if (key := f"variance/{name}_{suffix}") in run.metrics
        ]
        if series:
            reference = 1.0 if suffix == "F" else None
            charts.append(Chart(title, series, note, reference=reference, from_zero=True))
    return charts


def other_metrics(run: RunData) -> list[tuple[str, str, str, str, str]]:
    """Return name, first, last, least and greatest value of every metric no chart shows."""
    charted = {f"{m}/{s}" for s in run.stages for m in (*STAGE_METRICS, *RATIO_METRICS)}
    charted |= {
        f"variance/{n}_{x}" for n in ("prompt", *run.stages) for x in ("share", "eta2", "F")
    }
    charted |= {"reward_mean", "reward_std"}
    rows = []
    for name, values in sorted(run.metrics.items()):
        finite = [v for v in values if math.isfinite(v)]
        if name not in charted and finite:
            figures = (finite[0], finite[-1], min(finite), max(finite))
            first, last, least, greatest = (number(v, 4) for v in figures)
            rows.append((name, first, last, least, greatest))
    return rows


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
            [_shown(label, e, row, embed) for label, e in (("before", first), ("after", last))],
            last.scores[row] - first.scores[row],
        )
        for row in rows
    ]


def failures(run: RunData) -> list[tuple[str, int]]:
    """Return what failed and how often: rewards, updates, groups, and the causes that were kept."""
    counted: Counter[str] = Counter()
    for name, values in run.metrics.items():
        total = int(sum(v for v in values if math.isfinite(v)))
        kind, _, owner = name.partition("/")
        if kind == "reward_failed":
            part = f" of {owner}" if owner else ""
            counted[f"training samples without a reward{part}"] += total
        elif kind == "groups_skipped":
            counted[f"groups of {owner} with fewer than two samples left"] += total
        elif kind == "groups_flat":
            counted[f"groups of {owner} with equal rewards, so without credit"] += total
        elif kind == "skipped_updates_total":
            skipped = int(max(values, default=0))
            counted[f"updates of {owner} skipped for a value that was not finite"] += skipped
    for evaluation in run.evaluations:
        lost = sum(not math.isfinite(score) for score in evaluation.scores)
        counted["evaluation samples without a reward"] += lost
        counted.update(f"evaluation: {reason}" for reason in evaluation.failures)
    for rollout in run.rollouts:
        for group in rollout.groups:
            counted.update(f"saved group: {reason}" for reason in _reasons(group.children))
    return [(cause, count) for cause, count in counted.items() if count]


def _reasons(nodes: Sequence[SampleNode]) -> list[str]:
    own = [node.failed for node in nodes if node.failed is not None]
    return own + [reason for node in nodes for reason in _reasons(node.children)]


def _shown(label: str, evaluation: EvaluationRecord, row: int, embed: Embedder) -> Shown:
    place = evaluation.media_rows.index(row)
    media = [(stage, embed(paths[place])) for stage, paths in evaluation.media.items()]
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


def _measure_names(run: RunData) -> list[str]:
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


def _colour(run: RunData, name: str) -> int:
    return run.stages.index(name) if name in run.stages else len(run.stages)


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _or_lowest(value: float) -> float:
    return value if math.isfinite(value) else -math.inf
