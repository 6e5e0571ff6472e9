"""A groupwise reward sees whole groups, and what fails in one stays in it."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import MediaKind, RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.composite import CompositeReward, StageMedia, group_ids
from workflow_rl.rewards.constant import ConstantReward
from workflow_rl.rewards.groupwise import Groupwise, GroupwiseCallable
from workflow_rl.rewards.registry import RewardTerm, build_reward, build_rewards

HERE = "tests.rewards.test_groupwise"


def brighter_than_mean(
    media: Tensor, prompts: Sequence[str], sample_ids: Sequence[str], fail: float = 2.0
) -> dict[str, Tensor]:
    """Brightness less that of the group; raises where a sample has the brightness ``fail``."""
    bright = media.flatten(1).mean(1)
    if (bright == fail).any():
        raise RuntimeError(f"broken {'+'.join(sample_ids)}")
    return {"margin": bright - bright.mean()}


class Rank(Groupwise):
    """Place in the group by brightness, and what it was called with."""

    name = "rank"

    def __init__(self) -> None:
        self.called: list[list[str]] = []

    def score_group(self, group: RewardBatch) -> RewardScores:
        self.called.append(list(group.sample_ids))
        places = group.media.flatten(1).mean(1).argsort().argsort().float()
        return RewardScores(places, {0: "shy"} if "shy" in group.sample_ids[0] else {})


def images(
    values: Sequence[float], groups: Sequence[str] = (), ids: Sequence[str] | None = None
) -> RewardBatch:
    media = torch.tensor(values).view(-1, 1, 1, 1).expand(len(values), 3, 2, 2)
    names = list(ids or [f"s{i}" for i in range(len(values))])
    return RewardBatch(["p"] * len(values), names, media, "image", group_ids=groups)


def test_groups_are_scored_apart_wherever_their_samples_lie() -> None:
    reward = Rank()
    result = score_safely(reward, images([0.1, 0.9, 0.3, 0.2, 0.5], ["a", "b", "a", "b", "a"]))
    assert result.scores.tolist() == [0.0, 1.0, 1.0, 0.0, 2.0]
    assert reward.called == [["s0", "s2", "s4"], ["s1", "s3"]]
    assert score_safely(reward, images([0.1, 0.9])).scores.tolist() == [0.0, 1.0]


class Ends(Groupwise):
    """Ends its program over the group of ``s1``."""

    name = "ends"

    def score_group(self, group: RewardBatch) -> RewardScores:
        if "s1" in group.sample_ids:
            raise SystemExit("no licence")
        return RewardScores(group.media.flatten(1).mean(1))


def test_a_group_that_ends_its_program_fails_alone() -> None:
    result = score_safely(Ends(), images([0.5, 0.0, 0.25, 0.0], ["a", "b", "a", "b"]))
    assert result.failures == dict.fromkeys([1, 3], "SystemExit: no licence")
    assert result.scores[[0, 2]].tolist() == [0.5, 0.25]


def test_a_group_that_raises_fails_alone() -> None:
    term = build_reward(
        {"callable": f"{HERE}:brighter_than_mean", "group": "prompt", "args": {"fail": 0.5}}
    )
    assert isinstance(term.reward, GroupwiseCallable)
    result = score_safely(term.reward, images([0.25, 0.5, 0.75, 0.0], ["a", "b", "a", "b"]))
    assert result.scores.nan_to_num(9).tolist() == [-0.25, 9.0, 0.25, 9.0]
    assert result.failures == dict.fromkeys([1, 3], "RuntimeError: broken s1+s3")
    assert result.components["margin"].isnan().tolist() == [False, True, False, True]


def test_a_sample_fails_alone_and_one_that_is_not_finite_is_not_compared() -> None:
    reward = Rank()
    batch = images(
        [math.nan, 0.4, 0.3, 0.2, 0.1], ["a"] * 3 + ["b"] * 2, ["n", "x", "y", "shy", "z"]
    )
    result = score_safely(reward, batch)
    assert result.failures == {0: "not finite", 3: "shy"}
    assert reward.called == [["x", "y"], ["shy", "z"]]
    assert result.scores.nan_to_num(9).tolist() == [9.0, 1.0, 0.0, 9.0, 0.0]


def test_one_alone_has_nothing_to_be_compared_with() -> None:
    result = score_safely(Rank(), images([0.1, 0.2, math.nan], ["a", "b", "b"]))
    assert result.scores.isnan().all()
    assert "alone in its group" in result.failures[0]
    assert "alone in its group" in result.failures[1]


def stage(size: int, kind: MediaKind, parents: Sequence[int]) -> StageMedia:
    axes = (3, 2, 2) if kind == "image" else (3, 1, 2, 2)
    ids = [f"{kind}{i}" for i in range(size)]
    media = torch.arange(size).div(10).view(-1, *[1] * len(axes)).expand(size, *axes)
    return StageMedia(RewardBatch(["p"] * size, ids, media, kind), parents)


def tree() -> dict[str, StageMedia]:
    """The same text twice: two trees of two images with two videos each."""
    return {
        "t2i": stage(4, "image", [0, 0, 1, 1]),
        "i2v": stage(8, "video", [0, 0, 1, 1, 2, 2, 3, 3]),
    }


def test_groups_are_those_of_the_tree() -> None:
    media = tree()
    assert group_ids(media, "i2v", "prompt") == ["0"] * 4 + ["1"] * 4
    assert group_ids(media, "i2v", "parent") == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert group_ids(media, "t2i", "prompt") == group_ids(media, "t2i", "parent")
    assert group_ids(media, "t2i", "parent") == ["0", "0", "1", "1"]
    alone = {"i2v": StageMedia(media["i2v"].batch)}
    assert group_ids(alone, "i2v", "prompt") == ["0"] * 8  # one text, one prompt


@pytest.mark.parametrize(("group", "sizes"), [(None, [4, 4]), ("parent", [2, 2, 2, 2])])
def test_a_composite_hands_over_whole_groups(group: str | None, sizes: list[int]) -> None:
    reward = Rank()
    composite = CompositeReward([RewardTerm(reward, group=group)])  # type: ignore[arg-type]
    scores = composite.score_tree(tree())
    assert [len(ids) for ids in reward.called] == sizes
    assert scores.total.tolist() == [float(i) for size in sizes for i in range(size)]


def test_evaluation_leaves_out_what_compares_samples() -> None:
    constant = RewardTerm(ConstantReward(2.0), weight=0.0)
    composite = CompositeReward([RewardTerm(Rank()), constant])
    assert composite.pointwise().labels == ["constant"]
    assert composite.pointwise().score_tree(tree()).total.tolist() == [2.0] * 8
    plain = CompositeReward([RewardTerm(ConstantReward(2.0))])
    assert plain.pointwise() is plain
    with pytest.raises(UserError, match="add a reward that scores a sample alone"):
        build_rewards([{"callable": f"{HERE}:brighter_than_mean", "group": "prompt"}])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "constant", "group": "prompt"}, "leave group out"),
        ({"callable": f"{HERE}:brighter_than_mean", "group": "batch"}, "give prompt or parent"),
    ],
)
def test_a_group_that_cannot_be_is_refused(entry: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_reward(entry)


def test_the_pairwise_judge_compares_those_of_a_prompt_unless_told() -> None:
    assert build_reward({"name": "vlm_pairwise"}).group == "prompt"
    assert build_reward({"name": "vlm_pairwise", "group": "parent"}).group == "parent"
    assert build_reward({"callable": f"{HERE}:brighter_than_mean"}).group is None


def test_group_ids_must_match() -> None:
    with pytest.raises(ValueError, match="1 group ids"):
        images([0.1, 0.2], ["a"])
