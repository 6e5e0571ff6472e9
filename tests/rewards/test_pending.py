"""What is made is sent as soon as it is enough for a request, and comes back in its place."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from dataclasses import replace

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
        assert [p[1:] for p in batch.prompts] == [s[1:] for s in batch.sample_ids]
        self.groups.append(list(batch.group_ids))
        future: Future[RewardScores] = Future()
        if self.answers:
            future.set_result(self.answer(batch))
        self.futures.append(future)
        return future

    def answer(self, batch: RewardBatch) -> RewardScores:
        return RewardScores(batch.media.flatten(1).mean(1))

    def score(self, batch: RewardBatch, timeout_s: float | None) -> RewardScores:
        raise NotImplementedError

    def __call__(self, batch: RewardBatch) -> RewardScores:
        raise NotImplementedError


def images(first: int, size: int) -> RewardBatch:
    """Images ``first`` and on, of that brightness."""
    media = torch.arange(first, first + size).view(-1, 1, 1, 1).expand(size, 3, 2, 2) / 100
    rows = range(first, first + size)
    return RewardBatch([f"p{i}" for i in rows], [f"s{i}" for i in rows], media, "image")


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


def test_groups_that_come_in_portions_keep_their_own_scores() -> None:
    """With ids of their own, and samples of two groups in turns."""
    reward = Away()
    pending = PendingScores(reward)
    for first in (0, 4):
        pending.add(replace(images(first, 4), group_ids=["a", "b", "a", "b"]))
    assert reward.asked == [["s0", "s2"], ["s1", "s3"], ["s4", "s6"], ["s5", "s7"]]
    assert pending.result(None).scores.tolist() == pytest.approx([i / 100 for i in range(8)])


def test_what_is_left_is_sent_once_however_often_it_is_asked_for() -> None:
    reward = Away(batch_size=3)
    composite = CompositeReward([RewardTerm(reward)])
    arriving = composite.arriving({"t2i": 1})
    arriving.add("t2i", images(0, 4))
    arriving.flush()
    total = composite.score_tree({"t2i": StageMedia(images(0, 4))}, arriving).total
    assert reward.asked == [["s0", "s1", "s2"], ["s3"]]
    assert total.tolist() == pytest.approx([0.0, 0.01, 0.02, 0.03])


def test_a_request_of_which_nothing_is_finite_is_not_sent() -> None:
    reward = Away(batch_size=2)
    pending = PendingScores(reward)
    pending.add(replace(images(0, 4), media=torch.full((4, 3, 2, 2), math.inf)))
    assert pending.result(None).failures == dict.fromkeys(range(4), "not finite")
    assert reward.asked == []


def test_a_reward_is_made_ready_for_each_tree() -> None:
    """One that ended since the last is started again."""

    class Loads(Away):
        loads = 0

        def load(self) -> None:
            self.loads += 1

    reward = Loads()
    for number in (1, 2):
        ArrivingScores([RewardTerm(reward)], {"t2i": 1})
        assert reward.loads == number


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


class Answers(Away):
    """Answers a request by its first sample; raises what is an exception."""

    def __init__(self, **answers: RewardScores | Exception) -> None:
        super().__init__(batch_size=2)
        self.answers_to = answers

    def submit(self, batch: RewardBatch) -> Future[RewardScores]:
        answer = self.answers_to.get(batch.sample_ids[0])
        if not isinstance(answer, Exception):
            return super().submit(batch)
        future: Future[RewardScores] = Future()
        future.set_exception(answer)
        return future

    def answer(self, batch: RewardBatch) -> RewardScores:
        answer = self.answers_to.get(batch.sample_ids[0])
        return answer if isinstance(answer, RewardScores) else super().answer(batch)


def test_what_becomes_of_a_request_becomes_of_its_samples_and_no_other() -> None:
    part = {"part": torch.tensor([5.0, 6.0])}
    reward = Answers(
        s0=RewardScores(torch.zeros(3)),
        s2=RewardScores(torch.tensor([0.5, math.inf])),
        s4=RuntimeError("broken\npipe"),
        s6=RewardScores(torch.tensor([0.25, 0.75]), {0: "too dark"}, part),
    )
    pending = PendingScores(reward)
    batch = images(0, 10)
    batch.media[8] = math.nan
    pending.add(batch)
    result = pending.result(None)
    wrong, lost = "returned scores of shape (3,) for 2 samples", "RuntimeError: broken pipe"
    failures = {0: wrong, 1: wrong, 3: "returned inf", 4: lost, 5: lost, 6: "too dark"}
    failures[8] = "not finite"
    assert result.failures == failures
    assert list(result.failures) == sorted(failures)
    assert result.scores.isnan().nonzero().flatten().tolist() == sorted(failures)
    assert result.scores[[2, 7, 9]].tolist() == pytest.approx([0.5, 0.75, 0.09])
    assert result.components["part"][6:8].tolist() == [5.0, 6.0]
    assert result.components["part"].isnan().sum() == 8


def test_the_rest_is_sent_before_rewards_in_the_run_are_called() -> None:
    away = Away(batch_size=3)

    class Here:
        name = "here"
        media_kind: AcceptedKind = "any"

        def __call__(self, batch: RewardBatch) -> RewardScores:
            assert [len(ids) for ids in away.asked] == [3, 1]
            return RewardScores(torch.zeros(len(batch)))

    composite = CompositeReward([RewardTerm(Here()), RewardTerm(away)])
    arriving = composite.arriving({"t2i": 1})
    arriving.add("t2i", images(0, 4))
    assert composite.score_tree({"t2i": StageMedia(images(0, 4))}, arriving).failures == {}


def test_each_term_has_its_own_time_limit_and_what_passes_it_is_given_up() -> None:
    slow, quick = Away(answers=False), Away(answers=False)
    terms = [RewardTerm(slow, timeout_s=0.2), RewardTerm(quick, timeout_s=0.1)]
    arriving = ArrivingScores(terms, {"t2i": 1})
    arriving.add("t2i", images(0, 2))
    reasons = [set(arriving.result(index, 2).failures.values()) for index in (0, 1)]
    assert reasons == [{"timed out after 0.2 s"}, {"timed out after 0.1 s"}]
    assert [future.cancelled() for future in slow.futures + quick.futures] == [True, True]


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
    rewards = [Away(answers=False), Away(answers=False)]
    arriving = ArrivingScores([RewardTerm(reward) for reward in rewards], {"t2i": 1})
    arriving.add("t2i", images(0, 4))
    arriving.cancel()
    for reward in rewards:
        assert [future.cancelled() for future in reward.futures] == [True, True]
