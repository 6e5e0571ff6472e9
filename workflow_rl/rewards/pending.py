"""Scores on their way: samples are handed over as they are made, and all joined at the end."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

import torch
from torch import Tensor

from workflow_rl.rewards.base import (
    LoadsWeights,
    RewardBatch,
    RewardScores,
    ScoresElsewhere,
    all_failed,
    checked,
    one_line,
)
from workflow_rl.rewards.groupwise import take
from workflow_rl.rewards.registry import RewardTerm


class PendingScores:
    """The scores of one stage's samples by one reward that is computed elsewhere.

    Samples are sent ``reward.batch_size`` at a time, counted from the first, in whatever portions
    they are added: the requests, and so the numbers, are those of adding all at once. Samples with
    group ids are sent a group at a time, and must be added together.
    """

    def __init__(self, reward: ScoresElsewhere) -> None:
        self._reward = reward
        self._held: RewardBatch | None = None
        self._size = 0
        self._sent: list[tuple[list[int], Future[RewardScores]]] = []
        self._not_finite: list[int] = []

    def add(self, batch: RewardBatch) -> None:
        """Take in the next samples of the stage; send what is enough for a request."""
        if batch.group_ids:
            for rows in _rows_of_groups(batch.group_ids):
                self._send(take(batch, rows), [self._size + row for row in rows])
            self._size += len(batch)
            return
        held = batch if self._held is None else join_batches([self._held, batch])
        first = self._size + len(batch) - len(held)
        self._size += len(batch)
        size = self._reward.batch_size
        whole = len(held) - len(held) % size
        for start in range(0, whole, size):
            self._send(
                part(held, start, start + size), list(range(first + start, first + start + size))
            )
        self._held = part(held, whole, len(held)) if whole < len(held) else None

    def flush(self) -> None:
        """Send what is left: there will be no more."""
        if self._held is not None:
            held, self._held = self._held, None
            self._send(held, list(range(self._size - len(held), self._size)))

    def result(self, timeout_s: float | None) -> RewardScores:
        """Send what is left and wait for all.

        Parameters
        ----------
        timeout_s : float or None
            What has no score after so many seconds has failed; None waits for ever.

        Returns
        -------
        RewardScores
            Of all samples, in the order in which they were added.
        """
        self.flush()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        joined = all_failed(self._size, "not scored")
        joined.failures.update(dict.fromkeys(self._not_finite, "not finite"))
        for rows, future in self._sent:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            scores = _result(future, len(rows), left, timeout_s)
            _place(joined, rows, scores)
        return RewardScores(joined.scores, dict(sorted(joined.failures.items())), joined.components)

    def cancel(self) -> None:
        """Give up on all: nobody will ask for the result."""
        for _, future in self._sent:
            future.cancel()

    def _send(self, batch: RewardBatch, rows: list[int]) -> None:
        """Send a request with those of its samples that are finite; the others fail."""
        finite = batch.media.isfinite().flatten(1).all(1).tolist()
        if not all(finite):
            kept = [place for place, is_finite in enumerate(finite) if is_finite]
            self._not_finite += [rows[place] for place in range(len(rows)) if not finite[place]]
            batch, rows = take(batch, kept), [rows[place] for place in kept]
        if rows:
            self._sent.append((rows, self._reward.submit(batch)))


class ArrivingScores:
    """Scores of a tree that is still growing: those of the terms that are computed elsewhere.

    Parameters
    ----------
    terms : sequence of RewardTerm
    last_stage : str
        The stage of the terms that name none.
    """

    def __init__(self, terms: Sequence[RewardTerm], last_stage: str) -> None:
        self._terms = list(terms)
        self._last = last_stage
        self._pending: dict[int, PendingScores] = {}
        for index, term in enumerate(terms):
            if isinstance(term.reward, ScoresElsewhere):
                if isinstance(term.reward, LoadsWeights):
                    term.reward.load()
                self._pending[index] = PendingScores(term.reward)

    def add(self, stage: str, batch: RewardBatch) -> None:
        """Hand over the next samples of a stage to the terms that score each sample alone."""
        for index, pending in self._pending.items():
            term = self._terms[index]
            if term.group is None and (term.on or self._last) == stage:
                pending.add(batch)

    def add_groups(self, index: int, batch: RewardBatch) -> None:
        """Hand over all samples of the stage of term ``index``, which compares them."""
        if index in self._pending:
            self._pending[index].add(batch)

    def flush(self) -> None:
        """Send what is left: there will be no more."""
        for pending in self._pending.values():
            pending.flush()

    def result(self, index: int) -> RewardScores:
        """Wait for the scores of term ``index``, which is computed elsewhere."""
        return self._pending[index].result(self._terms[index].timeout_s)

    def cancel(self) -> None:
        """Give up on all: nobody will ask for the results."""
        for pending in self._pending.values():
            pending.cancel()


def _result(
    future: Future[RewardScores], size: int, left_s: float | None, limit_s: float | None
) -> RewardScores:
    """The scores of one request; whatever became of it, they are scores or failures."""
    done, _ = wait([future], left_s)
    if not done:
        future.cancel()
        return all_failed(size, f"timed out after {limit_s:g} s")
    error = future.exception()
    return all_failed(size, one_line(error)) if error else checked(future.result(), size)


def _place(joined: RewardScores, rows: list[int], scores: RewardScores) -> None:
    """Write the scores of some rows into those of all; a part that some lack is NaN there."""
    for place, row in enumerate(rows):
        joined.failures.pop(row)
        if place in scores.failures:
            joined.failures[row] = scores.failures[place]
    joined.scores[rows] = scores.scores
    for name, values in scores.components.items():
        whole = joined.components.setdefault(name, torch.full_like(joined.scores, math.nan))
        whole[rows] = values


def _rows_of_groups(group_ids: Sequence[str]) -> list[list[int]]:
    groups: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def part(batch: RewardBatch, start: int, stop: int) -> RewardBatch:
    """Samples ``start`` to ``stop`` of a batch, without copying their media."""
    rows = slice(start, stop)
    return replace(
        batch,
        prompts=batch.prompts[rows],
        sample_ids=batch.sample_ids[rows],
        media=batch.media[rows],
        group_ids=batch.group_ids[rows],
    )


def join_batches(batches: Sequence[RewardBatch]) -> RewardBatch:
    """One batch of many whose media have one shape, one kind and one rate."""
    if len(batches) == 1:
        return batches[0]
    media: Tensor = torch.cat([batch.media for batch in batches])
    return replace(
        batches[0],
        prompts=[prompt for batch in batches for prompt in batch.prompts],
        sample_ids=[sample for batch in batches for sample in batch.sample_ids],
        media=media,
        group_ids=[group for batch in batches for group in batch.group_ids],
    )
