"""Requests are joined, bounded, answered apart, and leave when nobody waits for them."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from tests.rewards.remote.conftest import Videos
from tests.rewards.remote.faulty_server import mean_of
from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.remote.queue import QueueFullError, ScoringQueue

WAIT_S = 20.0


class Gated:
    """Scores by the mean once its gate is open; keeps what it was called with."""

    name = "gated"
    media_kind: AcceptedKind = "any"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[RewardBatch] = []

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Wait for the gate, then score."""
        self.calls.append(batch)
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if "raise" in batch.prompts:
            raise RuntimeError("no face found")
        return RewardScores(mean_of(batch.media), components={"twice": 2 * mean_of(batch.media)})


@pytest.fixture
def reward() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


def _queue(reward: Gated, *, batch_size: int = 8, capacity: int = 16) -> ScoringQueue:
    return ScoringQueue(reward, batch_size=batch_size, wait_s=0.0, capacity=capacity)


def _occupied(queue: ScoringQueue, reward: Gated, batch: RewardBatch) -> "Future[RewardScores]":
    """Have the reward busy with a batch, so that what comes next waits."""
    future = queue.submit(batch)
    assert reward.entered.acquire(timeout=WAIT_S)
    return future


def test_requests_that_wait_together_are_joined_and_answered_apart(
    reward: Gated, videos: Videos
) -> None:
    queue = _queue(reward)
    batches = [videos(size) for size in (1, 2, 3, 3, 4)]
    futures = [_occupied(queue, reward, batches[0])]
    futures += [queue.submit(batch) for batch in batches[1:]]
    assert len(queue) == 12
    reward.gate.set()
    for batch, future in zip(batches, futures, strict=True):
        scores = future.result(WAIT_S)
        assert torch.equal(scores.scores, mean_of(batch.media))
        assert torch.equal(scores.components["twice"], 2 * mean_of(batch.media))
    assert [len(call) for call in reward.calls] == [1, 8, 4]
    assert len(queue) == 0


def test_only_like_media_are_joined_and_none_overtakes(reward: Gated, videos: Videos) -> None:
    queue = _queue(reward)
    _occupied(queue, reward, videos(1))
    rates = (8.0, 8.0, 24.0, 8.0)
    futures = [queue.submit(videos(2, fps=rate)) for rate in rates]
    reward.gate.set()
    for future in futures:
        assert future.result(WAIT_S).failures == {}
    assert [(len(call), call.fps) for call in reward.calls[1:]] == [(4, 8.0), (2, 24.0), (2, 8.0)]


def test_a_request_is_never_split(reward: Gated, videos: Videos) -> None:
    reward.gate.set()
    queue = _queue(reward, batch_size=2, capacity=2)
    assert len(queue.submit(videos(9)).result(WAIT_S).scores) == 9
    assert [len(call) for call in reward.calls] == [9]


def test_groups_of_two_requests_stay_apart(reward: Gated, videos: Videos) -> None:
    queue = _queue(reward)
    _occupied(queue, reward, videos(1))
    futures = [queue.submit(videos(4, groups=2)) for _ in range(2)]
    reward.gate.set()
    for future in futures:
        future.result(WAIT_S)
    assert list(reward.calls[1].group_ids) == [*["0:g0", "0:g1"] * 2, *["1:g0", "1:g1"] * 2]


def test_a_full_queue_refuses_and_takes_again(reward: Gated, videos: Videos) -> None:
    queue = _queue(reward, capacity=4)
    _occupied(queue, reward, videos(1))
    waiting = [queue.submit(videos(2)), queue.submit(videos(2))]
    with pytest.raises(QueueFullError) as full:
        queue.submit(videos(1))
    assert full.value.retry_after_s >= 1
    reward.gate.set()
    for future in waiting:
        future.result(WAIT_S)
    assert queue.submit(videos(1)).result(WAIT_S).failures == {}


def test_a_request_that_nobody_waits_for_is_not_scored(reward: Gated, videos: Videos) -> None:
    queue = _queue(reward, batch_size=1)
    _occupied(queue, reward, videos(1))
    gone, kept = queue.submit(videos(2)), queue.submit(videos(3))
    assert gone.cancel()
    reward.gate.set()
    assert len(kept.result(WAIT_S).scores) == 3
    assert [len(call) for call in reward.calls] == [1, 3]


def test_a_sample_that_raises_fails_alone_in_its_own_request(reward: Gated, videos: Videos) -> None:
    queue = _queue(reward)
    _occupied(queue, reward, videos(1))
    good, bad = videos(2), replace(videos(2), prompts=["p", "raise"])
    futures = [queue.submit(good), queue.submit(bad)]
    reward.gate.set()
    assert futures[0].result(WAIT_S).failures == {}
    assert futures[1].result(WAIT_S).failures == {1: "RuntimeError: no face found"}
