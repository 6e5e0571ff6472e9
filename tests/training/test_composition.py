"""Composed rewards in a chain of random tiny models: who moves, who stays, what is logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.constant import ConstantReward
from workflow_rl.rewards.groupwise import Groupwise
from workflow_rl.rewards.registry import RewardTerm
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod

BATCH = {"prompts": PROMPTS, "seeds": [0, 1]}
MakeMethod = Callable[..., WorkflowRLMethod]


class _Brightness:
    media_kind = "any"

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name = name
        self.factor = factor
        self.breaks = False

    def __call__(self, batch: RewardBatch) -> RewardScores:
        if self.breaks:
            raise RuntimeError("broken")
        values = self.factor * batch.media.flatten(1).mean(1)
        return RewardScores(values, components={"part": values})


class _WinRate(Groupwise):
    """Share of the group that is darker."""

    name = "win_rate"

    def __init__(self) -> None:
        self.groups: list[int] = []

    def score_group(self, group: RewardBatch) -> RewardScores:
        self.groups.append(len(group))
        bright = group.media.flatten(1).mean(1)
        return RewardScores((bright[:, None] > bright[None, :]).float().mean(1))


def _weights(method: WorkflowRLMethod) -> dict[str, dict[str, torch.Tensor]]:
    return {
        policy.name: {name: p.detach().clone() for name, p in policy.parameters().items()}
        for policy in method.policies
    }


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_an_image_reward_credited_to_images_moves_not_one_bit_of_the_video_model(
    make_method: MakeMethod,
) -> None:
    video = RewardTerm(_Brightness("video", 100.0))
    image = RewardTerm(_Brightness("image", 50.0), 0.5, on="t2i", credit_to=("t2i",))
    trained = []
    for terms in ([video], [video, image]):
        method = make_method(reward=CompositeReward(terms), beta=0.0, combine="advantages")
        before = _weights(method)
        _, metrics = method.managed_train_step(BATCH, 0)
        trained.append(_weights(method))
        assert not _equal(before["i2v"], trained[-1]["i2v"])
    assert _equal(trained[0]["i2v"], trained[1]["i2v"])
    assert not _equal(trained[0]["t2i"], trained[1]["t2i"])
    assert metrics["contribution/image@t2i/t2i"] == pytest.approx(0.5, abs=0.01)
    assert metrics["contribution/video/i2v"] == pytest.approx(1.0, abs=0.01)
    assert "contribution/image@t2i/i2v" not in metrics


@pytest.mark.parametrize("combine", ["sum", "zscore", "rank", "advantages"])
def test_constant_rewards_move_not_one_bit(make_method: MakeMethod, combine: str) -> None:
    terms = [
        RewardTerm(ConstantReward(0.1), 0.3),
        RewardTerm(ConstantReward(7.0), -2.0, on="t2i"),
        RewardTerm(ConstantReward(0.7), on="t2i", credit_to=("t2i",)),
    ]
    method = make_method(reward=CompositeReward(terms), combine=combine)
    before = _weights(method)
    method.managed_train_step(BATCH, 0)
    after = _weights(method)
    assert all(_equal(before[stage], after[stage]) for stage in before)


def test_a_win_rate_trains_and_sees_the_whole_prompt(make_method: MakeMethod) -> None:
    reward = _WinRate()
    terms = [RewardTerm(reward), RewardTerm(_Brightness("video"), weight=0.0)]
    method = make_method(reward=CompositeReward(terms), beta=0.0)
    _, metrics = method.managed_train_step(BATCH, 0)
    assert reward.groups == [4, 4]
    assert metrics["reward_failed"] == 0
    assert metrics["grad_norm/t2i"] > 0
    assert metrics["grad_norm/i2v"] > 0


def test_the_keys_are_the_same_when_a_reward_fails_even_after_a_resume(
    make_method: MakeMethod,
) -> None:
    def make(reward: _Brightness) -> WorkflowRLMethod:
        terms = [RewardTerm(reward), RewardTerm(_Brightness("logged"), weight=0.0)]
        return make_method(reward=CompositeReward(terms), beta=0.0)

    reward, broken = _Brightness("video"), _Brightness("video")
    broken.breaks = True
    method = make(reward)
    _, whole = method.managed_train_step(BATCH, 0)
    resumed = make(broken)
    resumed.load_state(method.state_tensors(), method.state_values())
    _, failed = resumed.managed_train_step(BATCH, 1)
    assert whole.keys() == failed.keys()
    assert failed["reward_failed/video"] == 8
    assert {"reward/video/part", "reward_std/video", "reward_std/logged"} <= failed.keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"credit_to": ("t2v",)}, "no stage"),
        ({"credit_to": ("t2i",)}, "stage 'i2v' trains, but no reward"),
    ],
)
def test_credit_that_cannot_be_is_refused(
    make_method: MakeMethod, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        make_method(reward=CompositeReward([RewardTerm(_Brightness("r"), **options)]), beta=0.0)
