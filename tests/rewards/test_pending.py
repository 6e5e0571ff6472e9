"""What is made is sent as soon as it is enough for a request, and comes back in its place."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future

import pytest
import torch

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward, StageMedia
from workflow_rl.rewards.pending import ArrivingScores, PendingScores
from workflow_rl.rewards.registry import GroupKind, RewardTerm


class Away:
    """A reward elsewhere that answers at once, with each sample's brightness; or never."""

    name = "away"
    media_kind: AcceptedKind = "any"

    def __init__(self, batch_size: int = 2, *, answers: bool = True) -> None:
        self.batch_size = batch_size
        self.answers = answers
        self.asked: list[list[str]] = []
        self.groups: list[list[str]] = []
        self.futures: list[Future[RewardScores]] = []

    def submit(self, batch: RewardBatch) -> Future[RewardScores]:
        self.asked.append(list(batch.sample_ids))
        self.groups.append(list(batch.group_ids))
        future: Future[RewardScores] = Future()
        if self.answers:
            future.set_result(RewardScores(batch.media.flatten(1).mean(1)))
        self.futures.append(future)
        return future

    def score(self, batch: RewardBatch, timeout_s: float | None) -> RewardScores:
        raise NotImplementedError

    def __call__(self, batch: RewardBatch) -> RewardScores:
        raise NotImplementedError


def images(first: int, size: int) -> RewardBatch:
    """Images ``first`` and on, of that brightness."""
    media = torch.arange(first, first + size).view(-1, 1, 1, 1).expand(size, 3, 2, 2) / 100
    return RewardBatch(["p"] * size, [f"s{first + i}" for i in range(size)], media, "image")


def test_whole_requests_are_sent_at_once_and_the_rest_at_the_end() -> None:
    reward = Away(batch_size=3)
    pending = PendingScores(reward)
    pending.add(images(0, 2))
    assert reward.asked == []
    pending.add(images(2, 5))
    assert reward.asked == [["s0", "s1", "s2"], ["s3", "s4", "s5"]]
    scores = pending.result(None).scores
    assert reward.asked[2:] == [["s6"]]
    assert scores.tolist() == pytest.approx([i / 100 for i in range(7)])


@pytest.mark.parametrize(
    ("group", "sizes"),
    [("prompt", {"t2i": 2, "i2v": 6}), ("parent", {"t2i": 2, "i2v": 3})],
)
@pytest.mark.parametrize("stage", ["t2i", "i2v"])
def test_a_group_is_sent_when_its_last_sample_is_there(
    group: GroupKind, sizes: dict[str, int], stage: str
) -> None:
    reward, size = Away(batch_size=1), sizes[stage]
    arriving = ArrivingScores([RewardTerm(reward, on=stage, group=group)], {"t2i": 2, "i2v": 3})
    other = "i2v" if stage == "t2i" else "t2i"
    for row in range(size - 1):
        arriving.add(stage, images(row, 1))
        arriving.add(other, images(row, 1))
    assert reward.asked == []
    arriving.add(stage, images(size - 1, size + 1))
    assert [len(ids) for ids in reward.asked] == [size, size]
    assert reward.groups == [["0"] * size, ["1"] * size]


@pytest.mark.parametrize("group", ["prompt", "parent"])
def test_groups_that_arrive_are_those_of_the_whole_tree(group: GroupKind) -> None:
    first, second = images(0, 4), images(4, 12)
    media = {
        "t2i": StageMedia(first, [0, 0, 1, 1]),
        "i2v": StageMedia(second, [row // 3 for row in range(12)]),
    }
    asked = []
    for grows in (False, True):
        reward = Away()
        composite = CompositeReward([RewardTerm(reward, group=group)])
        arriving = composite.arriving({"t2i": 2, "i2v": 3}) if grows else None
        if arriving is not None:
            arriving.add("t2i", first)
            for row in range(12):
                arriving.add("i2v", images(4 + row, 1))
        total = composite.score_tree(media, arriving).total
        assert total.tolist() == pytest.approx([i / 100 for i in range(4, 16)])
        asked.append((reward.asked, reward.groups))
    assert asked[0] == asked[1]


def test_what_is_not_finite_is_not_sent_and_who_is_left_alone_is_not_either() -> None:
    reward = Away()
    pending = PendingScores(reward, group_size=3)
    batch = images(0, 6)
    media = batch.media.clone()
    media[[0, 4, 5], 0, 0, 0] = math.nan
    pending.add(RewardBatch(batch.prompts, batch.sample_ids, media, "image"))
    assert reward.asked == [["s1", "s2"]]
    result = pending.result(None)
    alone = "alone in its group: nothing to compare it with"
    assert result.failures == {0: "not finite", 3: alone, 4: "not finite", 5: "not finite"}
    assert result.scores.isfinite().tolist() == [False, True, True, False, False, False]


def test_the_time_limit_begins_when_the_last_sample_is_there() -> None:
    """However long another reward takes in between, and once for all."""
    pending = PendingScores(Away(answers=False))
    pending.add(images(0, 4))
    pending.flush()
    time.sleep(0.3)
    began = time.monotonic()
    assert set(pending.result(0.3).failures.values()) == {"timed out after 0.3 s"}
    assert time.monotonic() - began < 0.2


def test_scores_of_a_tree_that_was_not_all_handed_over_are_refused() -> None:
    composite = CompositeReward([RewardTerm(Away())])
    arriving = composite.arriving({"t2i": 1})
    arriving.add("t2i", images(0, 3))
    with pytest.raises(RuntimeError, match="3 samples of 4"):
        composite.score_tree({"t2i": StageMedia(images(0, 4))}, arriving)


def test_to_give_up_cancels_every_request() -> None:
    reward = Away(answers=False)
    arriving = ArrivingScores([RewardTerm(reward)], {"t2i": 1})
    arriving.add("t2i", images(0, 4))
    arriving.cancel()
    assert [future.cancelled() for future in reward.futures] == [True, True]
