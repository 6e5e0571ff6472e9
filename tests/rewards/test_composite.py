"""A weighted sum over a tree gives every leaf its own and its ancestors' scores."""

import math
from collections.abc import Sequence

import pytest
import torch

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import AcceptedKind, MediaKind, RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward, StageMedia
from workflow_rl.rewards.constant import ConstantReward
from workflow_rl.rewards.registry import RewardTerm


class Brightness:
    """Mean of the media; fails where it is above 0.9."""

    name = "brightness"
    media_kind: AcceptedKind = "any"

    def __init__(self, media_kind: AcceptedKind = "any") -> None:
        self.media_kind = media_kind
        self.calls = 0

    def __call__(self, batch: RewardBatch) -> RewardScores:
        self.calls += 1
        means = batch.media.flatten(1).mean(1)
        failures = dict.fromkeys((means > 0.9).nonzero().flatten().tolist(), "too bright")
        return RewardScores(means, failures, {"double": 2 * means})


def stage(values: Sequence[float], kind: MediaKind, parents: Sequence[int] = ()) -> StageMedia:
    """A stage whose samples have the given brightness."""
    shape = (-1, 1, 1, 1, 1) if kind == "video" else (-1, 1, 1, 1)
    media = torch.tensor(values).view(shape).expand(len(values), 3, *[2] * (len(shape) - 2))
    ids = [f"{kind}{i}" for i in range(len(values))]
    return StageMedia(RewardBatch(["p"] * len(values), ids, media, kind), parents)


def tree() -> dict[str, StageMedia]:
    """Two images, two videos of the first and one of the second."""
    return {
        "t2i": stage([0.1, 0.5], "image"),
        "i2v": stage([0.2, 0.3, 0.4], "video", [0, 0, 1]),
    }


def test_an_image_reward_counts_for_the_videos_of_that_image() -> None:
    on_image = Brightness("image")
    composite = CompositeReward(
        [RewardTerm(Brightness("video"), 2.0), RewardTerm(on_image, -1.0, on="t2i")]
    )
    scores = composite.score_tree(tree())
    torch.testing.assert_close(scores.total, torch.tensor([0.3, 0.5, 0.3]))
    torch.testing.assert_close(scores.components["brightness"], torch.tensor([0.2, 0.3, 0.4]))
    torch.testing.assert_close(scores.components["brightness@t2i"], torch.tensor([0.1, 0.1, 0.5]))
    torch.testing.assert_close(
        scores.components["brightness@t2i/double"], torch.tensor([0.2, 0.2, 1.0])
    )
    assert on_image.calls == 1
    assert scores.failures == {}


def test_a_chain_of_three_follows_parents_of_parents() -> None:
    media = tree() | {"shot2": stage([0.0] * 4, "video", [2, 1, 0, 2])}
    scores = CompositeReward([RewardTerm(Brightness(), on="t2i")]).score_tree(media)
    torch.testing.assert_close(scores.total, torch.tensor([0.5, 0.1, 0.1, 0.5]))
    scores = CompositeReward([RewardTerm(Brightness(), on="i2v")]).score_tree(media)
    torch.testing.assert_close(scores.total, torch.tensor([0.4, 0.3, 0.2, 0.4]))


def test_a_failed_image_fails_its_videos_and_no_others() -> None:
    media = tree() | {"t2i": stage([1.0, 0.5], "image")}
    terms = [RewardTerm(Brightness()), RewardTerm(Brightness(), on="t2i")]
    scores = CompositeReward(terms).score_tree(media)
    assert scores.failures == {0: "brightness@t2i: too bright", 1: "brightness@t2i: too bright"}
    assert scores.total.isnan().tolist() == [True, True, False]
    assert scores.components["brightness"].isfinite().all()


def test_a_reward_with_weight_0_is_logged_and_fails_nothing() -> None:
    media = {"i2v": stage([1.0, 0.5], "video")}
    terms = [RewardTerm(ConstantReward(3.0)), RewardTerm(Brightness(), weight=0.0)]
    scores = CompositeReward(terms).score_tree(media)
    assert scores.total.tolist() == [3.0, 3.0]
    assert scores.failures == {}
    assert scores.component_failures["brightness"] == {0: "too bright"}
    assert scores.components["brightness"][0].isnan()


def test_two_of_a_kind_are_logged_apart() -> None:
    terms = [RewardTerm(ConstantReward(1.0)), RewardTerm(ConstantReward(2.0), weight=10.0)]
    scores = CompositeReward(terms).score_tree(tree())
    assert scores.components["constant"].tolist() == [1.0] * 3
    assert scores.components["constant#2"].tolist() == [2.0] * 3
    assert scores.total.tolist() == [21.0] * 3


def test_a_sum_that_overflows_is_a_failure() -> None:
    terms = [RewardTerm(ConstantReward(3e38)), RewardTerm(ConstantReward(3e38))]
    scores = CompositeReward(terms).score_tree(tree())
    assert scores.total.isnan().all()
    assert len(scores.failures) == 3


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (RewardTerm(ConstantReward(), on="t2v"), "did you mean 't2i'"),
        (RewardTerm(Brightness("image")), "stage 'i2v' makes videos"),
        (RewardTerm(Brightness("video"), on="t2i"), "stage 't2i' makes images"),
    ],
)
def test_a_reward_on_the_wrong_stage_is_refused(term: RewardTerm, words: str) -> None:
    with pytest.raises(UserError, match=words):
        CompositeReward([term]).check_stages({"t2i": "image", "i2v": "video"})


@pytest.mark.parametrize("terms", [[], [RewardTerm(ConstantReward(), weight=0.0)]])
def test_a_sum_of_nothing_is_refused(terms: list[RewardTerm]) -> None:
    with pytest.raises(UserError, match="weight other than 0"):
        CompositeReward(terms)


@pytest.mark.parametrize("parents", [[], [0, 0], [0, 0, 2], [0, -1, 0]])
def test_parents_that_do_not_fit_are_refused(parents: list[int]) -> None:
    media = tree() | {"i2v": stage([0.2, 0.3, 0.4], "video", parents)}
    with pytest.raises(ValueError, match="parents"):
        CompositeReward([RewardTerm(ConstantReward())]).score_tree(media)


def test_constant_is_constant() -> None:
    assert ConstantReward(0.1)(tree()["i2v"].batch).scores.tolist() == pytest.approx([0.1] * 3)
    assert math.isfinite(ConstantReward().value)
