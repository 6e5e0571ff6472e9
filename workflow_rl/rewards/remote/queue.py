"""The requests that wait for a reward at its server, joined into batches."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from workflow_rl.rewards.base import Reward, RewardBatch, RewardScores, one_line, score_safely
from workflow_rl.rewards.pending import join_batches

FIRST_RETRY_S = 1
"""Seconds that a client is asked to wait before anything was timed."""


class QueueFullError(Exception):
    """There is no room; ``retry_after_s`` is when there may be."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(f"the queue is full, try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


@dataclass
class _Request:
    batch: RewardBatch
    future: "Future[RewardScores]" = field(default_factory=Future)


class ScoringQueue:
    """Scores requests one batch at a time, in the order in which they came.

    A request is never split; requests of like media that wait together are joined while they have
    no more than ``batch_size`` samples.

    Parameters
    ----------
    reward : Reward
        Called in one thread of the queue's own.
    batch_size : int
        Samples of joined requests, at most.
    wait_s : float
        Seconds that a request which leaves room waits for others.
    capacity : int
        Samples that may wait. A request that finds none waiting is taken whatever its size.
    timeout_s : float or None
        Seconds after which a batch has failed.
    on_batch : callable
        Told of each batch's samples and seconds.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        batch_size: int,
        wait_s: float,
        capacity: int,
        timeout_s: float | None = None,
        on_batch: Callable[[int, float], None] = lambda samples, seconds: None,
    ) -> None:
        self._reward = reward
        self._batch_size = batch_size
        self._wait_s = wait_s
        self._capacity = capacity
        self._timeout_s = timeout_s
        self._on_batch = on_batch
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._seconds_per_sample = 0.0
        threading.Thread(target=self._work, name=f"queue of {reward.name}", daemon=True).start()

    def __len__(self) -> int:
        """Samples that wait."""
        return sum(len(request.batch) for request in list(self._waiting))

    def submit(self, batch: RewardBatch) -> "Future[RewardScores]":
        """Queue a request; cancelling the result before its turn takes it out.

        Raises
        ------
        QueueFullError
        """
        request = _Request(batch)
        with self._changed:
            waiting = len(self)
            if waiting and waiting + len(batch) > self._capacity:
                raise QueueFullError(max(FIRST_RETRY_S, round(waiting * self._seconds_per_sample)))
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    def _work(self) -> None:
        while True:
            taken = self._next()
            taken = [request for request in taken if request.future.set_running_or_notify_cancel()]
            if taken:
                self._score(taken)

    def _next(self) -> list[_Request]:
        """Take the first request and those that join it."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            deadline = time.monotonic() + self._wait_s
            while self._room() > 0 and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            taken = self._joined()
            for _ in taken:
                self._waiting.popleft()
            return taken

    def _joined(self) -> list[_Request]:
        """The requests at the head of the queue that go together."""
        first, size = self._waiting[0].batch, 0
        taken: list[_Request] = []
        for request in self._waiting:
            size += len(request.batch)
            if taken and (size > self._batch_size or not _alike(first, request.batch)):
                break
            taken.append(request)
        return taken

    def _room(self) -> int:
        """How many samples could join those that go next."""
        joined = self._joined()
        if len(joined) < len(self._waiting):
            return 0
        return self._batch_size - sum(len(request.batch) for request in joined)

    def _score(self, requests: list[_Request]) -> None:
        batches = [_own_groups(request.batch, str(i)) for i, request in enumerate(requests)]
        began = time.monotonic()
        try:
            joined = join_batches(batches)
            scores = score_safely(self._reward, joined, self._timeout_s)
        except Exception as error:  # noqa: BLE001  the queue goes on, whatever became of a batch
            for request in requests:
                request.future.set_exception(RuntimeError(one_line(error)))
            return
        seconds = time.monotonic() - began
        self._seconds_per_sample = seconds / len(joined)
        self._on_batch(len(joined), seconds)
        start = 0
        for request in requests:
            stop = start + len(request.batch)
            request.future.set_result(_rows(scores, start, stop))
            start = stop


def _alike(a: RewardBatch, b: RewardBatch) -> bool:
    """Whether two batches can be one."""
    return (
        (a.media_kind, a.media.shape[1:], a.fps) == (b.media_kind, b.media.shape[1:], b.fps)
    ) and bool(a.group_ids) == bool(b.group_ids)


def _own_groups(batch: RewardBatch, request: str) -> RewardBatch:
    """The batch with groups that are its own, whatever they are called in another."""
    return replace(batch, group_ids=[f"{request}:{group}" for group in batch.group_ids])


def _rows(scores: RewardScores, start: int, stop: int) -> RewardScores:
    return RewardScores(
        scores.scores[start:stop],
        {row - start: why for row, why in scores.failures.items() if start <= row < stop},
        {name: values[start:stop] for name, values in scores.components.items()},
    )
