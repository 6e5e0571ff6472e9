"""What failed, how often and why."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from workflow_rl.report.run_data import RunData, SampleNode

MOST_CAUSES = 50


def failures(run: RunData) -> list[tuple[str, int]]:
    """Return what failed and how often: rewards, updates, groups and media."""
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
        counted["images and videos of evaluations not written"] += sum(evaluation.lost.values())
    counted["images and videos of rollouts not written"] += sum(run.lost.values())
    return [(cause, count) for cause, count in counted.items() if count]


def failure_causes(run: RunData) -> list[tuple[str, str, int]]:
    """Return where, why and how often something failed, the most frequent first.

    Of training, older runs kept the causes in their saved groups only.
    """
    counted: Counter[tuple[str, str]] = Counter()
    for label, causes in run.causes.items():
        for reason, count in causes.items():
            counted["training", f"{label}: {reason}"] += count
    if not run.causes:
        groups = [group for rollout in run.rollouts for group in rollout.groups]
        for group in groups:
            counted.update(("saved groups", reason) for reason in _reasons(group.children))
    for reason, count in run.lost.items():
        counted["media of rollouts", reason] += count
    for evaluation in run.evaluations:
        counted.update(("evaluation", reason) for reason in evaluation.failures)
        for reason, count in evaluation.lost.items():
            counted["media of evaluations", reason] += count
    return [(*where, count) for where, count in counted.most_common(MOST_CAUSES)]


def _reasons(nodes: Sequence[SampleNode]) -> list[str]:
    own = [node.failed for node in nodes if node.failed is not None]
    return own + [reason for node in nodes for reason in _reasons(node.children)]
