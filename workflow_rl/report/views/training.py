"""The curves of training: the reward, every stage, and where the variance comes from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.numbers import number
from workflow_rl.report.run_data import RunData

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
EMPTY = "no values yet"
NO_KL = "not measured: kl_weight is 0"
RATIO_METRICS = ("ratio_min", "ratio_mean", "ratio_max")


@dataclass(frozen=True)
class StageCharts:
    """The training curves of one stage."""

    name: str
    frozen: bool
    charts: list[Chart]


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
            Chart(
                title,
                [Series(title, run.iterations, run.metrics[key], colour=index)],
                note,
                empty=NO_KL if metric == "kl" and not config.kl_weight else EMPTY,
            )
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
    prefixes = ("reward/", "reward_std/", "contribution/", "guard/", "guard_z/")
    rows = []
    for name, values in sorted(run.metrics.items()):
        finite = [v for v in values if math.isfinite(v)]
        if name not in charted and not name.startswith(prefixes) and finite:
            figures = (finite[0], finite[-1], min(finite), max(finite))
            first, last, least, greatest = (number(v, 4) for v in figures)
            rows.append((name, first, last, least, greatest))
    return rows


def _colour(run: RunData, name: str) -> int:
    return run.stages.index(name) if name in run.stages else len(run.stages)
