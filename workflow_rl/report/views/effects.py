"""What training did to each reward and to the diversity: the same samples before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from workflow_rl.evaluation.statistics import PairedComparison
from workflow_rl.report.forest import draw_forest
from workflow_rl.report.intervals import Statistics
from workflow_rl.report.pair_cells import pair_bar, pair_cells
from workflow_rl.report.run_data import EvaluationRecord, RunData
from workflow_rl.report.views.evaluation import first_and_last, measure_names
from workflow_rl.report.views.rewards import reward_weights, term_of

REWARD = "reward"
ONE_SEED = "Not measured: it needs two seeds of a prompt, evaluation.seeds_per_prompt: 2 or more."
NOT_KEPT = "Not measured in these evaluations; workflow-rl evaluate measures it."


@dataclass(frozen=True)
class Effects:
    """A titled table of comparisons; ``chart`` is the same drawn, ``note`` a sentence."""

    title: str
    note: str
    rows: list[list[str]]
    chart: Markup


def effects(run: RunData, statistics: Statistics) -> list[Effects]:
    """Return the tables: rewards trained on, those that are not, and diversity.

    Nothing where no two evaluations are of the same samples.
    """
    ends = first_and_last(run)
    if ends is None:
        return []
    first, last = ends
    weights = reward_weights(run.config.rewards)
    trained = {REWARD: statistics.compare(first.scores, last.scores, first.prompts)}
    best = _best(run, first)
    if best is not None:
        name = f"{REWARD} at its best, iteration {best.iteration}"
        trained[name] = statistics.compare(first.scores, best.scores, first.prompts)
    others: dict[str, PairedComparison] = {}
    for name in measure_names(run):
        if name in first.measures and name in last.measures:
            group = trained if weights.get(term_of(name, weights)) else others
            pair = first.measures[name], last.measures[name]
            group[name] = statistics.compare(*pair, first.prompts)
    note = "" if best is None else "The best was chosen by these same samples, so it flatters."
    shown = [_effects("Trained on", note, trained)]
    if others:
        shown.append(_effects("Not trained on", "What the training did besides.", others))
    return [*shown, _diversity(first, last, statistics)]


def _best(run: RunData, first: EvaluationRecord) -> EvaluationRecord | None:
    """Return the evaluation with the highest mean; None where that is the first or the last."""
    samples = first.prompts, first.seeds
    same = [e for e in run.evaluations if (e.prompts, e.seeds) == samples]
    best = max(same, key=_mean_score)
    return None if best is same[0] or _mean_score(best) <= _mean_score(same[-1]) else best


def _mean_score(evaluation: EvaluationRecord) -> float:
    finite = [score for score in evaluation.scores if math.isfinite(score)]
    return sum(finite) / len(finite) if finite else -math.inf


def _diversity(first: EvaluationRecord, last: EvaluationRecord, statistics: Statistics) -> Effects:
    title = "Diversity"
    before, after = first.diversity, last.diversity
    prompts = list(dict.fromkeys(first.prompts))
    if not len(before) == len(after) == len(prompts) or not _any_pair(before, after):
        reason = ONE_SEED if len(prompts) == len(first.prompts) else NOT_KEPT
        return Effects(title, reason, [], Markup(""))
    note = (
        "How far apart the samples of one prompt are from seed to seed: root mean square "
        "difference of their pixels, from 0 to 1. Pairs are prompts."
    )
    return _effects(title, note, {"diversity": statistics.compare(before, after, prompts)})


def _any_pair(before: list[float], after: list[float]) -> bool:
    return any(math.isfinite(b - a) for b, a in zip(before, after, strict=True))


def _effects(title: str, note: str, pairs: Mapping[str, PairedComparison]) -> Effects:
    return Effects(
        title,
        note,
        [[name, *pair_cells(pair)] for name, pair in pairs.items()],
        draw_forest([pair_bar(name, pair) for name, pair in pairs.items()]),
    )
