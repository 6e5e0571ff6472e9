"""Rewards without a network, by what they must say of images anyone can picture."""

import math

import pytest
import torch

from workflow_rl.rewards.base import MediaKind, Reward, RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.jpeg_size import JpegSize
from workflow_rl.rewards.sharpness import Sharpness
from workflow_rl.rewards.temporal_flickering import TemporalFlickering


def score(reward: Reward, media: torch.Tensor) -> RewardScores:
    kind: MediaKind = "image" if media.dim() == 4 else "video"
    names = [str(row) for row in range(len(media))]
    return score_safely(reward, RewardBatch(names, names, media, kind, fps=8.0))


def noise(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def test_noise_is_a_larger_jpeg_than_a_flat_image() -> None:
    images = torch.stack([torch.full((3, 512, 512), 0.5), noise(3, 512, 512)])
    flat, rough = score(JpegSize(), images).scores.tolist()
    assert flat == pytest.approx(4.7, abs=1)  # kB, shared facts: Pillow, quality 95
    assert rough == pytest.approx(308, rel=0.2)
    assert score(JpegSize(quality=50), images).scores[1] < rough / 2


def test_sharpness_is_the_variance_of_the_laplacian() -> None:
    image = torch.zeros(1, 3, 5, 5)
    image[..., 2, 2] = 1.0  # a white dot: the 3×3 Laplacians are 0, 255 beside it, −4·255 on it
    laplacians = torch.tensor([0, 255, 0, 255, -1020, 255, 0, 255, 0.0])
    assert score(Sharpness(), image).scores.item() == pytest.approx(
        laplacians.var(correction=0).item(), rel=1e-5
    )


def test_blur_and_flatness_are_less_sharp() -> None:
    sharp = noise(3, 32, 32)
    blurred = torch.nn.functional.avg_pool2d(sharp, 3, 1, 1)
    scores = score(Sharpness(), torch.stack([sharp, blurred, torch.full_like(sharp, 0.3)])).scores
    assert scores[0] > scores[1] > scores[2] == 0


def test_flicker_is_the_published_formula() -> None:
    videos = torch.zeros(3, 3, 4, 2, 2)
    videos[1, :, ::2] = 1.0
    videos[2, :, 2:] = 51 / 255
    scores = score(TemporalFlickering(), videos).scores
    torch.testing.assert_close(scores, torch.tensor([1.0, 0.0, (255 - 51 / 3) / 255]))


def test_one_frame_cannot_flicker() -> None:
    assert score(TemporalFlickering(), torch.zeros(1, 3, 1, 2, 2)).scores.isnan().all()


@pytest.mark.parametrize("reward", [JpegSize(), Sharpness(), TemporalFlickering()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pixels_that_are_not_finite_fail_their_sample_alone(reward: Reward, bad: float) -> None:
    videos = noise(3, 3, 2, 8, 8)
    videos[1, 0, 0, 0, 0] = bad
    result = score(reward, videos)
    assert result.scores.isnan().tolist() == [False, True, False]
    assert "not finite" in result.failures[1]
