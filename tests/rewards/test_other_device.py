"""Reward networks on a device beside the CPU, with media from either: the same scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.other_device import OTHER, other_device
from tests.rewards.qwen_checkpoints import clips, save_hps, save_videoalign, write_config
from tests.rewards.test_clip_scores import head_state, open_clip_shapes
from tests.rewards.test_image_reward import shapes as image_reward_shapes
from tests.rewards.tiny_networks import by_formula, images, save_clip, save_tensors
from tests.rewards.tiny_qwen import HIDDEN, reward_model
from workflow_rl.rewards import hpsv3, videoalign
from workflow_rl.rewards.aesthetic import Aesthetic
from workflow_rl.rewards.base import Reward, RewardBatch, score_safely
from workflow_rl.rewards.clip_scores import ClipScore
from workflow_rl.rewards.hpsv2 import HPSv2
from workflow_rl.rewards.hpsv3 import HPSv3, PreferenceHead
from workflow_rl.rewards.image_reward import ImageReward
from workflow_rl.rewards.videoalign import VideoAlign

pytestmark = pytest.mark.usefixtures("small_pictures")
Factory = Callable[..., Reward]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_clip(tmp_path_factory.mktemp("clip"))


def _clipscore(folder: Path, clip: str) -> Factory:
    return partial(ClipScore, clip)


def _hpsv2(folder: Path, clip: str) -> Factory:
    weights = save_tensors(folder / "hps.safetensors", by_formula(open_clip_shapes()))
    return partial(HPSv2, weights, clip)


def _aesthetic(folder: Path, clip: str) -> Factory:
    return partial(Aesthetic, save_tensors(folder / "head.safetensors", head_state()), clip)


def _image_reward(folder: Path, clip: str) -> Factory:
    weights = save_tensors(folder / "w.safetensors", by_formula(image_reward_shapes()))
    return partial(ImageReward, weights, clip)


def _hpsv3(folder: Path, clip: str) -> Factory:
    saved = save_hps(folder, (reward_model(hpsv3.TOKENS), PreferenceHead(HIDDEN).eval()))
    return partial(HPSv3, saved.weights, saved.base, saved.template)


def _videoalign(folder: Path, clip: str) -> Factory:
    write_config(folder)
    head = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(6))
    saved, _ = save_videoalign(folder, reward_model(videoalign.TOKENS), head, "full")
    return partial(VideoAlign, str(folder), saved.template, saved.base)


REWARDS: Mapping[str, tuple[Callable[[Path, str], Factory], RewardBatch]] = {
    "clipscore": (_clipscore, images()),
    "hpsv2": (_hpsv2, images()),
    "aesthetic": (_aesthetic, images()),
    "imagereward": (_image_reward, images()),
    "hpsv3": (_hpsv3, images()),
    "videoalign": (_videoalign, clips()),
}


@pytest.mark.parametrize("name", REWARDS)
def test_scores_are_the_same(name: str, folder: Path, clip: str) -> None:
    save, batch = REWARDS[name]
    make = save(folder, clip)
    expected = score_safely(make(device="cpu"), batch)
    assert expected.failures == {}
    with other_device():
        reward = make(device=str(OTHER), dtype="float32")
        for media in (batch.media, batch.media.to(OTHER)):
            found = score_safely(reward, replace(batch, media=media))
            assert found.failures == {}
            torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=1e-4)
