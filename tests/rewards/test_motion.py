"""Rewards of motion, on clips whose motion is known."""

import pytest
import torch
from torch.nn import functional as F

from workflow_rl.rewards.base import Reward, RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.motion import DynamicDegree, MotionAmount, MotionSmoothness
from workflow_rl.rewards.optical_flow import flows, grey_frames, warp

SIZE, FRAMES = 64, 9


def texture(height: int = SIZE, width: int = 4 * SIZE) -> torch.Tensor:
    """A smooth random pattern in [0, 1], ``[3, H, W]``."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, height // 8, width // 8, generator=generator)
    return F.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]


def pan(shifts: list[int]) -> torch.Tensor:
    """A window on a pattern, ``shifts`` pixels from where it began in each frame."""
    pattern = texture()
    return torch.stack([pattern[:, :, s : s + SIZE] for s in shifts], dim=1)


def steady(speed: int) -> torch.Tensor:
    return pan([speed * t for t in range(FRAMES)])


def score(reward: Reward, *videos: torch.Tensor, fps: float | None = 8.0) -> RewardScores:
    names = [str(row) for row in range(len(videos))]
    return score_safely(reward, RewardBatch(names, names, torch.stack(videos), "video", fps))


def test_flow_finds_a_shift_and_points_from_the_first_frame_to_the_second() -> None:
    frames = grey_frames(steady(3))
    flow_N2HW = flows(frames, [(0, 1), (1, 0)])
    inner = flow_N2HW[:, :, 12:-12, 12:-12].flatten(2).median(dim=2).values
    # The window moves right, so the pattern moves left.
    torch.testing.assert_close(inner, torch.tensor([[-3.0, 0.0], [3.0, 0.0]]), atol=0.1, rtol=0)


def test_warping_by_the_flow_gives_the_frame_it_came_from() -> None:
    video = steady(2)
    second = video[:, 1][None]
    warped = warp(second, torch.tensor([-2.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, SIZE, SIZE))
    torch.testing.assert_close(warped[..., 2:], video[:, 0][None, ..., 2:], atol=1e-4, rtol=0)


def test_motion_amount_is_the_speed_at_256_pixels_and_8_fps() -> None:
    result = score(MotionAmount(cap=16.0), steady(0), steady(1), steady(2), steady(8))
    speeds = result.components["speed"]
    scale = 256 / SIZE
    assert speeds[0] == pytest.approx(0, abs=0.2)
    assert speeds[1:3].tolist() == pytest.approx([1 * scale, 2 * scale], rel=0.15)
    assert result.scores[1:].tolist() == pytest.approx([0.25, 0.5, 1.0], abs=0.05)


def test_speed_does_not_depend_on_the_frame_rate() -> None:
    slow = score(MotionAmount(), steady(2)).components["speed"]
    twice_the_frames = pan(list(range(2 * FRAMES - 1)))
    fast = score(MotionAmount(), twice_the_frames, fps=16.0).components["speed"]
    torch.testing.assert_close(slow, fast, rtol=0.15, atol=0)


def test_dynamic_degree_asks_for_a_quarter_of_the_frames_above_vbenchs_speed() -> None:
    # 2 pixels of 64 are 8 of 256, above 6; 1 pixel is 4, below. 9 frames: round(4·9/16) = 2 pairs.
    one = pan([0, 2, *[2] * 7])
    two = pan([0, 2, 4, *[4] * 6])
    result = score(DynamicDegree(), steady(0), steady(1), steady(2), one, two)
    assert result.scores.tolist() == [0, 0, 1, 0, 1]
    assert result.components["moving"].tolist() == pytest.approx([0, 0, 1, 1 / 8, 2 / 8])


def test_dynamic_degree_looks_8_times_a_second() -> None:
    twice_the_frames = pan(list(range(2 * FRAMES - 1)))
    assert score(DynamicDegree(), twice_the_frames, fps=8.0).scores.tolist() == [0]
    assert score(DynamicDegree(), twice_the_frames, fps=16.0).scores.tolist() == [1]


def test_even_motion_is_smoother_than_jerky_motion_and_noise() -> None:
    jerky = pan([0, 4, 4, 8, 8, 12, 12, 16, 16])
    noise = torch.rand(3, FRAMES, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    still, even, stops, random = score(
        MotionSmoothness(), steady(0), steady(2), jerky, noise
    ).scores.tolist()
    assert still == 1
    assert 1 > even > stops > random
    assert even > 0.98


@pytest.mark.parametrize("reward", [MotionAmount(), DynamicDegree(), MotionSmoothness()])
def test_what_cannot_be_measured_fails(reward: Reward) -> None:
    assert score(reward, torch.rand(3, 1, SIZE, SIZE)).scores.isnan().all()
    assert "12 pixels" in score(reward, torch.rand(3, 4, 8, 8)).failures[0]
    broken = steady(1)
    broken[0, 0, 0, 0] = torch.nan
    result = score(reward, steady(1), broken)
    assert result.scores.isnan().tolist() == [False, True]


@pytest.mark.parametrize("reward", [MotionAmount(), DynamicDegree()])
def test_speed_without_a_frame_rate_fails(reward: Reward) -> None:
    assert "frames per second" in score(reward, steady(1), fps=None).failures[0]


@pytest.mark.parametrize("reward", [MotionAmount(), MotionSmoothness()])
def test_equal_videos_get_equal_scores(reward: Reward) -> None:
    first = score(reward, steady(2), steady(1)).scores
    second = score(reward, steady(1), steady(2)).scores
    assert first.tolist() == second.flip(0).tolist()
