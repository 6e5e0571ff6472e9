"""Every reward apart: its curve, whether it is trained on, and its part in each stage's credit."""

from __future__ import annotations

import math

from workflow_rl.config.run import RewardConfig
from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.numbers import number
from workflow_rl.report.run_data import RunData

REWARD, SPREAD, CONTRIBUTION = "reward/", "reward_std/", "contribution/"


def reward_weights(rewards: tuple[RewardConfig, ...]) -> dict[str, float]:
    """Return each term's weight by the label that it is logged as.

    The labels are those of :class:`workflow_rl.rewards.composite.CompositeReward`.
    """
    weights: dict[str, float] = {}
    for reward in rewards:
        name = reward.name or (reward.callable or "").replace(":", ".")
        base = name if reward.on is None else f"{name}@{reward.on}"
        label, count = base, 1
        while label in weights:
            count += 1
            label = f"{base}#{count}"
        weights[label] = reward.weight
    return weights


def reward_charts(run: RunData) -> list[Chart]:
    """Return one curve per reward and per part of one, over the samples of training."""
    weights = reward_weights(run.config.rewards)
    names = [name.removeprefix(REWARD) for name in run.metrics if name.startswith(REWARD)]
    order = list(weights)
    names.sort(key=lambda name: (_place(term_of(name, weights), order), name))
    return [_chart(run, name, weights) for name in names]


def contribution_charts(run: RunData) -> list[Chart]:
    """Return per stage how large each reward's part in its credit is."""
    charts = []
    for stage in run.stages:
        keys = [
            key for key in run.metrics if key.startswith(CONTRIBUTION) and key.endswith(f"/{stage}")
        ]
        series = [
            Series(
                key.removeprefix(CONTRIBUTION).removesuffix(f"/{stage}"),
                run.iterations,
                run.metrics[key],
                colour=index,
            )
            for index, key in enumerate(keys)
        ]
        if len(series) > 1:
            note = "Root mean square of each reward's part in the stage's advantages."
            charts.append(Chart(f"Whose credit: {stage}", series, note, from_zero=True))
    return charts


def _chart(run: RunData, name: str, weights: dict[str, float]) -> Chart:
    mean = run.metrics[f"{REWARD}{name}"]
    spread = run.metrics.get(f"{SPREAD}{name}")
    low = high = None
    if spread is not None:
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
    label = term_of(name, weights)
    weight = weights.get(label, math.nan)
    colour = 2 if weight and label == name else 4
    return Chart(
        name,
        [Series(name, run.iterations, mean, low=low, high=high, colour=colour)],
        _mark(name, label, weight),
    )


def term_of(name: str, weights: dict[str, float]) -> str:
    """Return the label of the term that ``name`` is, or is a part of."""
    found = [label for label in weights if name == label or name.startswith(f"{label}/")]
    return max(found, key=len, default=name)


def _place(label: str, order: list[str]) -> int:
    return order.index(label) if label in order else len(order)


def _mark(name: str, label: str, weight: float) -> str:
    if math.isnan(weight):
        return ""
    if name != label:
        return f"Part of {label}."
    return f"Trained on, weight {number(weight, 4)}." if weight else "Not trained on: weight 0."
