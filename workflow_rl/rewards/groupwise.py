"""Rewards that score a sample against the others of its group, such as a win rate."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from workflow_rl.rewards.base import (
    AcceptedKind,
    RewardBatch,
    RewardScores,
    all_failed,
    checked,
    one_line,
)
from workflow_rl.rewards.python_callable import PythonCallable

NOT_FINITE = "not finite"
ALONE = "alone in its group: nothing to compare it with"


class Groupwise(ABC):
    """A reward whose scores depend on the whole group: write :meth:`score_group`.

    Called as any other reward, it scores group by group. A group is what has one entry in the
    batch's ``group_ids``; a batch without them is one group. **A batch must hold whole groups:**
    who scores samples as they arrive collects a group first.

    A sample whose media are not finite leaves its group, and fails. A group with fewer than two
    samples left fails. What :meth:`score_group` raises fails that group and no other.

    Attributes
    ----------
    name, media_kind
        As of every reward.
    """

    name: str
    media_kind: AcceptedKind = "any"

    @abstractmethod
    def score_group(self, group: RewardBatch) -> RewardScores:
        """Score the samples of one group, two or more, against each other."""

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score each group of the batch."""
        whole = batch.media.isfinite().flatten(1).all(1).tolist()
        groups: dict[str, list[int]] = {}
        for row, group in enumerate(batch.group_ids or [""] * len(batch)):
            groups.setdefault(group, []).append(row)
        result = all_failed(len(batch), NOT_FINITE)
        for rows in groups.values():
            rows = [row for row in rows if whole[row]]
            _put(result, rows, self._score(take(batch, rows)))
        return result

    def _score(self, group: RewardBatch) -> RewardScores:
        if len(group) < 2:
            return all_failed(len(group), ALONE)
        try:
            return checked(self.score_group(group), len(group))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is a failure
            return all_failed(len(group), one_line(error))


def take(batch: RewardBatch, rows: Sequence[int]) -> RewardBatch:
    """Return some samples of a batch."""
    return replace(
        batch,
        prompts=[batch.prompts[row] for row in rows],
        sample_ids=[batch.sample_ids[row] for row in rows],
        media=batch.media[list(rows)],
        group_ids=[batch.group_ids[row] for row in rows] if batch.group_ids else (),
    )


def _put(result: RewardScores, rows: Sequence[int], scores: RewardScores) -> None:
    """Write a group's scores into those of the batch; a part that a group lacks is NaN there."""
    if not rows:
        return
    result.scores[list(rows)] = scores.scores
    for place, row in enumerate(rows):
        del result.failures[row]
        if place in scores.failures:
            result.failures[row] = scores.failures[place]
    for name, values in scores.components.items():
        whole = result.components.setdefault(name, torch.full_like(result.scores, math.nan))
        whole[list(rows)] = values


class GroupwiseCallable(Groupwise):
    """A Python function that is called with one whole group at a time.

    Parameters
    ----------
    function : PythonCallable
        ``fn(media, prompts, sample_ids, **args)`` of the samples of one group; it returns a score
        per sample as for any callable.
    """

    def __init__(self, function: PythonCallable) -> None:
        self.function = function
        self.name = function.name

    def score_group(self, group: RewardBatch) -> RewardScores:
        """Call the function."""
        return self.function(group)
