"""What a reward is said to need is the least that it can score."""

import math
from dataclasses import replace

import pytest
import torch

from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.media_needs import ANYTHING, MEDIA_NEEDS, VBENCH_FPS, media_needs
from workflow_rl.rewards.motion import DynamicDegree
from workflow_rl.rewards.registry import REWARDS, build_reward

WITHOUT_WEIGHTS = [
    "directed_motion",
    "dynamic_degree",
    "frame_change",
    "motion_amount",
    "motion_smoothness",
    "sharpness",
    "temporal_flickering",
]


def noise(frames: int | None, height: int, width: int, fps: float | None = 8.0) -> RewardBatch:
    """Two videos, or images where there are no frames."""
    shape = (2, 3, height, width) if frames is None else (2, 3, frames, height, width)
    media = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    kind = "image" if frames is None else "video"
    return RewardBatch(["a red circle moving left"] * 2, ["0", "1"], media, kind, fps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_the_least_can_be_scored_and_less_cannot(name: str) -> None:
    pytest.importorskip("cv2")
    needs, reward = MEDIA_NEEDS[name], build_reward({"name": name}).reward
    frames, side = (needs.frames if needs.video else None), needs.side
    larger = side if needs.exact else side + 1
    least = noise(frames, side, larger)
    assert score_safely(reward, least).failures == {}
    less = [noise(frames, side - 1, larger)] if side > 1 else []
    if frames is not None:
        less.append(noise(frames - 1, side, larger))
    if needs.fps:
        less.append(replace(least, fps=None))
    if needs.exact:
        less.append(noise(frames, side, side + 1))
    for batch in less:
        result = score_safely(reward, batch)
        constant = name == "frame_change" and bool((result.scores == 0).all())
        assert set(result.failures) == {0, 1} or constant, tuple(batch.media.shape)


@pytest.mark.parametrize("name", ["constant", "jpeg_size"])
def test_what_needs_nothing_scores_one_pixel(name: str) -> None:
    assert media_needs(name) == ANYTHING
    for frames in (None, 1):
        result = score_safely(build_reward({"name": name}).reward, noise(frames, 1, 1, None))
        assert result.failures == {}


def test_every_reward_has_needs() -> None:
    assert {name for name in REWARDS if media_needs(name) != ANYTHING} == set(MEDIA_NEEDS)


@pytest.mark.parametrize("fps", [1.0, 8.0, 11.9, 12.1, 16.0, 20.5, 23.976, 24.0, 30.0, 60.0])
def test_dynamic_degree_looks_at_the_frames_that_it_is_said_to(
    fps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def speeds(video_CTHW: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(len(range(0, video_CTHW.shape[1], step)))
        return torch.zeros(1)

    monkeypatch.setattr("workflow_rl.rewards.motion._speeds", speeds)
    needs = MEDIA_NEEDS["dynamic_degree"]
    for frames in (1, 2, 3, 9, 81):
        DynamicDegree()(noise(frames, 1, 1, fps))
        assert seen[-1] == needs.frames_seen(frames, fps)
        assert needs.frames_seen(frames, None) == frames  # whatever rate the model has
        every = max(1, round(fps / VBENCH_FPS))
        assert seen[-1] == math.ceil(frames / every)
