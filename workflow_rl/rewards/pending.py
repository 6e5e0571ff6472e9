"""Scores on their way: samples are handed over as they are made, and all joined at the end."""

import math
import time
from collections.abc import Mapping, Sequence
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
from workflow_rl.rewards.groupwise import ALONE, NOT_FINITE, take
from workflow_rl.rewards.registry import GroupKind, RewardTerm


class PendingScores:
    """The scores of one stage's samples by one reward that is computed elsewhere.

    Samples are sent as soon as they are enough for a request, counted from the first, in whatever
    portions they are added: the requests, and so the numbers, are those of adding all at once.

    Parameters
    ----------
    reward : ScoresElsewhere
    group_size : int or None
        Where the reward compares the samples of a group: each so many samples are one, and a
        request of their own, named by its number. Samples that come with group ids are whole
        groups, of any size. None: requests are of ``reward.batch_size`` samples.
    """

    def __init__(self, reward: ScoresElsewhere, group_size: int | None = None) -> None:
        self._reward = reward
        self._group_size = group_size
        self._held: RewardBatch | None = None
        self._size = 0
        self._sent: list[tuple[list[int], Future[RewardScores]]] = []
        self._failed: dict[int, str] = {}
        self._whole_at = math.inf

    def __len__(self) -> int:
        """Samples so far."""
        return self._size

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
        size = self._group_size or self._reward.batch_size
        whole = len(held) - len(held) % size
        for start in range(0, whole, size):
            self._send_range(part(held, start, start + size), first + start)
        self._held = part(held, whole, len(held)) if whole < len(held) else None

    def flush(self) -> None:
        """Send what is left: there will be no more."""
        if self._held is not None:
            held, self._held = self._held, None
            self._send_range(held, self._size - len(held))
        self._whole_at = min(self._whole_at, time.monotonic())

    def result(self, timeout_s: float | None) -> RewardScores:
        """Send what is left and wait for all.

        Parameters
        ----------
        timeout_s : float or None
            What has no score so many seconds after :meth:`flush` has failed; None waits for ever.

        Returns
        -------
        RewardScores
            Of all samples, in the order in which they were added.
        """
        self.flush()
        deadline = None if timeout_s is None else self._whole_at + timeout_s
        joined = all_failed(self._size, "not scored")
        joined.failures.update(self._failed)
        for rows, future in self._sent:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            scores = _result(future, len(rows), left, timeout_s)
            _place(joined, rows, scores)
        return RewardScores(joined.scores, dict(sorted(joined.failures.items())), joined.components)

    def cancel(self) -> None:
        """Give up on all: nobody will ask for the result."""
        for _, future in self._sent:
            future.cancel()

    def _send_range(self, batch: RewardBatch, first: int) -> None:
        """Send a request with the samples from ``first`` on."""
        if self._group_size:
            batch = replace(batch, group_ids=[str(first // self._group_size)] * len(batch))
        self._send(batch, list(range(first, first + len(batch))))

    def _send(self, batch: RewardBatch, rows: list[int]) -> None:
        """Send a request with those of its samples that can be scored; the others fail."""
        finite = batch.media.isfinite().flatten(1).all(1).tolist()
        if not all(finite):
            kept = [place for place, is_finite in enumerate(finite) if is_finite]
            lost = [row for row, is_finite in zip(rows, finite, strict=True) if not is_finite]
            self._failed |= dict.fromkeys(lost, NOT_FINITE)
            batch, rows = take(batch, kept), [rows[place] for place in kept]
        if batch.group_ids and len(rows) == 1:
            self._failed[rows[0]] = ALONE
        elif rows:
            self._sent.append((rows, self._reward.submit(batch)))


class ArrivingScores:
    """Scores of a tree that is still growing: those of the terms that are computed elsewhere.

    Parameters
    ----------
    terms : sequence of RewardTerm
    samples : mapping of str to int or None
        The stages of the chain in order, and how many samples each makes of one of the stage
        before. Samples are added in the order of the tree, so that a group's are together. None
        where all that there is to score is given to :meth:`add_to`.
    """

    def __init__(
        self, terms: Sequence[RewardTerm], samples: Mapping[str, int] | None = None
    ) -> None:
        self._stages = [term.on or list(samples or [None])[-1] for term in terms]
        self._limits = [term.timeout_s for term in terms]
        self._pending: dict[int, PendingScores] = {}
        for index, term in enumerate(terms):
            if isinstance(term.reward, ScoresElsewhere):
                if isinstance(term.reward, LoadsWeights):
                    term.reward.load()
                size = _group_size(term.group, self._stages[index], samples)
                self._pending[index] = PendingScores(term.reward, size)

    def add(self, stage: str, batch: RewardBatch) -> None:
        """Hand over the next samples of a stage."""
        for index, pending in self._pending.items():
            if self._stages[index] == stage:
                pending.add(batch)

    def add_to(self, index: int, batch: RewardBatch) -> None:
        """Hand over samples to term ``index`` alone, with group ids if it compares them."""
        if index in self._pending:
            self._pending[index].add(batch)

    def flush(self) -> None:
        """Send what is left: there will be no more."""
        for pending in self._pending.values():
            pending.flush()

    def result(self, index: int, size: int) -> RewardScores:
        """Wait for the ``size`` scores of term ``index``, which is computed elsewhere."""
        pending = self._pending[index]
        if len(pending) != size:
            raise RuntimeError(f"{len(pending)} samples of {size} were handed over")
        return pending.result(self._limits[index])

    def cancel(self) -> None:
        """Give up on all: nobody will ask for the results."""
        for pending in self._pending.values():
            pending.cancel()


def _group_size(
    group: GroupKind | None, stage: str | None, samples: Mapping[str, int] | None
) -> int | None:
    """Samples of a stage that are one group; None where each is scored alone, or they say it."""
    if group is None or samples is None or stage is None:
        return None
    counts = list(samples.values())[: list(samples).index(stage) + 1]
    return math.prod(counts) if group == "prompt" else counts[-1]


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
