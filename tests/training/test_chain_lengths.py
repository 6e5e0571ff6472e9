"""Chains of one, two and three stages train through the one method, from a configuration alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.training.conftest import PROMPTS
from workflow_rl.card import ModelCard
from workflow_rl.config import PromptRecord, RunConfig
from workflow_rl.config.first_frames import find_first_frame
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import RewardTerm
from workflow_rl.training.build import build_method
from workflow_rl.training.methods.chain import ChainRLMethod
from workflow_rl.training.update import C2Error
from workflow_rl.workflow import StageOutput

SHAPES = {
    "image": {"t2i": "t2i"},
    "video": {"i2v": "i2v"},
    "two_shots": {"t2i": "t2i", "shot1": "i2v", "shot2": "i2v"},
}
Build = Callable[..., ChainRLMethod]


@pytest.fixture
def build(cards: tuple[ModelCard, ModelCard]) -> Build:
    """Build a method from a configuration with two samples per parent at each stage."""
    folders = {card.task.value: str(card.source) for card in cards}

    def make(shape: str, **options: Any) -> ChainRLMethod:
        stage: dict[str, Any] = {
            "samples": 2,
            "num_inference_steps": 3,
            "sde": {"kind": "cps"},
            "optimizer": {"lr": 1e-3},
            "kl_weight": 0.0,
            "rollout_batch_size": 16,
        }
        stages = {
            name: stage
            | {"task": task, "model": folders[task]}
            | ({"num_frames": 5} if task == "i2v" else {})
            for name, task in SHAPES[shape].items()
        }
        config = {
            "output_dir": "unused",
            "stages": stages,
            "data": {"prompts": "unused.txt"},
            "rewards": [{"callable": f"{__name__}:brightness"}],
            "training": {"device": "cpu"},
        }
        return build_method(RunConfig.model_validate(config | options))

    return make


@pytest.fixture
def batch(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return two prompts for a shape, with first frames where it begins with them."""

    def make(shape: str) -> dict[str, Any]:
        records = [PromptRecord(prompt) for prompt in PROMPTS]
        if shape == "video":
            for row, colour in enumerate(("red", "blue")):
                Image.new("RGB", (32, 32), colour).save(tmp_path / f"{colour}.png")
                frame = find_first_frame(tmp_path / f"{colour}.png", "test")
                records[row] = replace(records[row], first_frame=frame)
        return {"prompts": records, "seeds": [0, 0]}

    return make


def brightness(media: torch.Tensor, prompts: list[str], sample_ids: list[str]) -> torch.Tensor:
    """Score images and videos alike."""
    return media.flatten(1).mean(1)


class _Scripted:
    """A reward whose scores are given."""

    name = "scripted"
    media_kind = "video"

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    def __call__(self, batch: RewardBatch) -> RewardScores:
        assert len(batch) == len(self.scores)
        return RewardScores(self.scores)


def _transformers(method: ChainRLMethod) -> dict[str, torch.Tensor]:
    return {
        f"{policy.name}.{name}": parameter.detach().clone()
        for policy in method.policies
        for name, parameter in policy.student.component("transformer").named_parameters()
    }


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_stage_of_any_chain_trains(
    build: Build, batch: Callable[[str], dict[str, Any]], shape: str
) -> None:
    method = build(shape)
    names = list(SHAPES[shape])
    before = _transformers(method)
    losses, metrics = method.managed_train_step(batch(shape), 0)
    assert set(losses) == {f"{name}_pg_loss" for name in names}
    assert _moved(before, _transformers(method)) == set(names)
    assert list(method.get_grad_clip_targets()) == [f"{name}.transformer" for name in names]
    for name in names:
        assert metrics[f"c2_max_log_ratio/{name}"] == 0.0
        assert metrics[f"grad_norm/{name}"] > 0
        assert metrics[f"{name}_weights_version"] == 1
        assert metrics[f"groups_skipped/{name}"] == metrics[f"groups_flat/{name}"] == 0
    shares = [metrics[f"variance/{name}_share"] for name in names]
    assert sum(shares) == pytest.approx(1.0)
    eta2 = [metrics[f"variance/{name}_eta2"] for name in ("prompt", *names)]
    assert sum(eta2) == pytest.approx(1.0)


def test_two_shots_go_on_to_the_bit_from_their_state(
    build: Build, batch: Callable[[str], dict[str, Any]]
) -> None:
    method, resumed = build("two_shots"), build("two_shots")
    method.managed_train_step(batch("two_shots"), 0)
    tensors = {name: tensor.clone() for name, tensor in method.state_tensors().items()}
    resumed.load_state(tensors, method.state_values())
    expected = method.managed_train_step(batch("two_shots"), 1)[1]
    assert resumed.managed_train_step(batch("two_shots"), 1)[1] == expected
    assert _moved(_transformers(method), _transformers(resumed)) == set()


def test_credit_is_nested_at_every_level(
    build: Build, batch: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three levels, one first shot not finite: its second shots fail, and its sibling is alone."""
    method = build("two_shots", credit={"rule": "nested", "normalisation": "none"})
    rewards = torch.arange(16.0).square().reshape(2, 2, 2, 2) / 16
    method.reward = CompositeReward([RewardTerm(_Scripted(rewards.flatten()))])
    rollout = method._rollout

    def spoilt_rollout(*args: Any) -> list[StageOutput]:
        image, shot1, shot2 = rollout(*args)
        media = shot1.media.clone()
        media[3] = math.nan  # prompt 0, image 1, first shot 1
        return [image, replace(shot1, media=media), shot2]

    monkeypatch.setattr(method, "_rollout", spoilt_rollout)
    before = _transformers(method)
    metrics = method.managed_train_step(batch("two_shots"), 0)[1]
    assert method.last is not None
    assert method.last.scores.failures == {
        6: "stage shot1: not finite",
        7: "stage shot1: not finite",
    }
    image, shot1, shot2 = method.last.credit.levels

    shots_PKM = rewards.mean(3)
    images_PK = shots_PKM.mean(2)
    images_PK[0, 1] = shots_PKM[0, 1, 0]
    expected_PK = images_PK - images_PK.mean(1, keepdim=True)
    expected_PKM = shots_PKM - shots_PKM.mean(2, keepdim=True)
    expected_PKM[0, 1] = 0.0
    expected_PKMN = rewards - shots_PKM.unsqueeze(3)
    expected_PKMN[0, 1, 1] = 0.0
    clip = method.settings.advantage_clip
    assert clip is not None
    for level, expected in ((image, expected_PK), (shot1, expected_PKM), (shot2, expected_PKMN)):
        torch.testing.assert_close(level.advantages.float(), expected.clamp(-clip, clip))
    assert shot1.active.flatten().tolist() == [True, True, False, False, True, True, True, True]
    assert metrics["groups_skipped/t2i"] == 0
    assert metrics["groups_skipped/shot1"] == metrics["groups_skipped/shot2"] == 1
    assert metrics["reward_failed"] == 2
    assert _moved(before, _transformers(method)) == {"t2i", "shot1", "shot2"}


def test_the_c2_gate_holds_for_the_last_of_three(
    build: Build, batch: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = build("two_shots")
    score = method.reward.score_tree

    def score_and_disturb(*arguments: Any) -> Any:
        with torch.no_grad():
            for parameter in method.policies[2].parameters().values():
                parameter.add_(1e-3)
        return score(*arguments)

    monkeypatch.setattr(method.reward, "score_tree", score_and_disturb)
    with pytest.raises(C2Error, match=r"stage 'shot2', step \d, sample 'a .*differs"):
        method.managed_train_step(batch("two_shots"), 0)
