"""The reward pays for the named shape's travel in the named direction, and for nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from workflow_rl.embedded.world import (
    COLOURS,
    DIRECTIONS,
    MARGIN,
    NUM_FRAMES,
    SHAPES,
    SIZE,
    Caption,
    all_captions,
    draw,
    ground,
)
from workflow_rl.rewards.base import RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.directed_motion import DirectedMotion, start_position

CAPTIONS = list(all_captions())
GROUNDS = torch.stack([ground(caption.direction) for caption in CAPTIONS]).unsqueeze(2)
STEP = 2.0
TRAVEL = STEP * (NUM_FRAMES - 1) / SIZE


def films(captions: list[Caption], step: float = STEP, across: float = 3.3) -> Tensor:
    """Clean videos: each shape moves ``step`` pixels a frame in its direction, through the middle.

    ``across`` is the distance of the path from the frame's middle.
    """
    time_T = torch.arange(NUM_FRAMES) - (NUM_FRAMES - 1) / 2
    videos = []
    for caption in captions:
        x, y = DIRECTIONS[caption.direction]
        middle = torch.tensor([SIZE / 2 + across * y, SIZE / 2 + across * x])
        centres = middle + time_T[:, None] * step * torch.tensor([x, y])
        assert ((centres >= MARGIN) & (centres <= SIZE - MARGIN)).all()
        videos.append(draw(caption, centres).transpose(0, 1))
    return torch.stack(videos)


def score(videos: Tensor, captions: list[Caption]) -> RewardScores:
    """Score videos by captions, as a run does."""
    prompts = [str(caption) for caption in captions]
    ids = [str(i) for i in range(len(prompts))]
    return score_safely(DirectedMotion(), RewardBatch(prompts, ids, videos, "video"))


def rename(captions: list[Caption], field: str, known: list[str], by: int) -> list[Caption]:
    """Captions with the shape, colour or direction that is ``by`` further on in the list."""
    values = [known[(known.index(getattr(c, field)) + by) % len(known)] for c in captions]
    return [replace(c, **{field: v}) for c, v in zip(captions, values, strict=True)]


@pytest.fixture(scope="module")
def clean() -> Tensor:
    """One clean video of every caption."""
    return films(CAPTIONS)


@pytest.mark.parametrize("step", [0.0, 0.3, 1.1, STEP, 2.5])
def test_a_clean_video_scores_its_travel(step: float) -> None:
    expected = torch.full((48,), step * (NUM_FRAMES - 1) / SIZE)
    result = score(films(CAPTIONS, step), CAPTIONS)
    torch.testing.assert_close(result.scores, expected, rtol=0, atol=0.01)
    assert result.components["fidelity"].min() > 0.98
    assert result.failures == {}


def test_a_static_video_scores_exactly_0() -> None:
    assert score(films(CAPTIONS, 0.0), CAPTIONS).scores.abs().max() < 1e-6


def test_the_opposite_direction_is_negative_and_a_cross_one_nothing(clean: Tensor) -> None:
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up"}
    cross = {"left": "up", "right": "down", "up": "left", "down": "right"}
    back = score(clean, [replace(c, direction=opposite[c.direction]) for c in CAPTIONS]).scores
    torch.testing.assert_close(back, torch.full((48,), -TRAVEL), rtol=0, atol=0.01)
    aside = score(clean, [replace(c, direction=cross[c.direction]) for c in CAPTIONS]).scores
    assert aside.abs().max() < 0.01


@pytest.mark.parametrize("by", [1, 2, 3])
def test_another_colour_scores_nothing(clean: Tensor, by: int) -> None:
    captions = rename(CAPTIONS, "colour", list(COLOURS), by)
    assert score(clean, captions).scores.abs().max() < 0.01 * TRAVEL


@pytest.mark.parametrize("by", [1, 2])
def test_another_shape_scores_under_a_fifth(clean: Tensor, by: int) -> None:
    assert score(clean, rename(CAPTIONS, "shape", list(SHAPES), by)).scores.max() < 0.2 * TRAVEL


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.3])
def test_brightness_hardly_matters(clean: Tensor, factor: float) -> None:
    scores = score((clean * factor).clamp(0, 1), CAPTIONS).scores
    torch.testing.assert_close(scores, torch.full((48,), TRAVEL), rtol=0.15, atol=0)
    assert scores.mean() > 0.96 * TRAVEL


def test_a_little_noise_hardly_matters(clean: Tensor) -> None:
    noise = 0.03 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    scores = score((clean + noise).clamp(0, 1), CAPTIONS).scores
    torch.testing.assert_close(scores, torch.full((48,), TRAVEL), rtol=0.1, atol=0)


def cheats(clean: Tensor) -> dict[str, Tensor]:
    """Videos that move something other than one whole shape step by step."""
    first, last = clean[:, :, :1], clean[:, :, -1:]
    fade = torch.linspace(0, 1, NUM_FRAMES).view(1, 1, -1, 1, 1)
    jump = torch.cat([first.expand(-1, -1, 4, -1, -1), last.expand(-1, -1, 5, -1, -1)], 2)
    empty = clean.clone()
    empty[:, :, 4] = GROUNDS[: len(clean), :, 0]
    bright = clean.clone()
    bright[:, :, :, :2] = 1.0
    return {
        "smear": clean.cummax(2).values,
        "left behind": torch.maximum(clean, first),
        "fade over": first * (1 - fade) + last * fade,
        "jump": jump,
        "vanish": empty,
        "bright bar": bright,
        "blurred away": GROUNDS[: len(clean)].lerp(clean, 0.2),
    }


@pytest.mark.parametrize("name", sorted(cheats(torch.zeros(1, 3, NUM_FRAMES, SIZE, SIZE))))
def test_a_cheat_scores_clearly_lower(clean: Tensor, name: str) -> None:
    scores = score(cheats(clean)[name], CAPTIONS).scores
    assert scores.max() < 0.7 * TRAVEL
    assert scores.mean() < 0.4 * TRAVEL


def test_going_back_at_a_jump_and_forth_in_steps_gains_nothing() -> None:
    caption = Caption("circle", "red", "right")
    x = torch.tensor([8.0, 11, 14, 17, 20, 8, 11, 14, 17])
    video = draw(caption, torch.stack([x, torch.full_like(x, 16.0)], 1))
    scores = score(video.transpose(0, 1)[None], [caption]).scores
    assert scores[0].item() == pytest.approx(9 / SIZE, abs=0.01)


def test_the_score_falls_smoothly_as_a_shape_blurs() -> None:
    """No cliff: each step of a slow blend into a round blob costs a little."""
    captions = [c for c in CAPTIONS if c.shape == "square"]
    square, circle = films(captions), films([replace(c, shape="circle") for c in captions])
    scores = torch.stack(
        [score(torch.lerp(square, circle, w), captions).scores for w in torch.linspace(0, 1, 21)]
    )
    steps = scores.diff(dim=0) / TRAVEL
    assert steps.max() < 0.02
    assert steps.min() > -0.2


@pytest.mark.parametrize("value", [0.0, 1.0, 0.05])
def test_a_video_of_nothing_scores_0_and_does_not_fail(value: float) -> None:
    result = score(torch.full((48, 3, NUM_FRAMES, SIZE, SIZE), value), CAPTIONS)
    assert result.scores.abs().max() < 1e-3
    assert result.failures == {}


def test_a_video_of_noise_scores_about_0() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand((48, 3, NUM_FRAMES, SIZE, SIZE), generator=generator)
    assert score(noise, CAPTIONS).scores.abs().max() < 0.01


def test_a_prompt_of_another_world_fails_alone(clean: Tensor) -> None:
    prompts = [str(CAPTIONS[0]), "a cat playing the piano", str(CAPTIONS[2])]
    batch = RewardBatch(prompts, ["0", "1", "2"], clean[:3], "video")
    result = score_safely(DirectedMotion(), batch)
    assert list(result.failures) == [1]
    assert "a cat playing the piano" in result.failures[1]
    assert result.scores.isnan().tolist() == [False, True, False]
    torch.testing.assert_close(result.scores[2], score(clean, CAPTIONS).scores[2])


@pytest.mark.parametrize("shape", [(1, 3, 9, 16, 16), (1, 4, 9, 32, 32), (1, 3, 1, 32, 32)])
def test_videos_it_cannot_judge_fail(shape: tuple[int, ...]) -> None:
    result = score(torch.zeros(shape), CAPTIONS[:1])
    assert "ValueError" in result.failures[0]


def test_a_video_scores_the_same_in_any_batch(clean: Tensor) -> None:
    together = score(clean, CAPTIONS).scores
    alone = torch.cat([score(clean[i : i + 1], CAPTIONS[i : i + 1]).scores for i in (0, 17, 40)])
    torch.testing.assert_close(together[[0, 17, 40]], alone)


def test_start_position_is_measured_along_the_direction_of_travel(clean: Tensor) -> None:
    prompts = [str(caption) for caption in CAPTIONS]
    starts = start_position(clean, prompts)
    torch.testing.assert_close(starts, torch.full((48,), -TRAVEL / 2), rtol=0, atol=0.01)
    ends = start_position(clean.flip(2), prompts)
    torch.testing.assert_close(ends, torch.full((48,), TRAVEL / 2), rtol=0, atol=0.01)


def test_start_position_of_nothing_is_unknown() -> None:
    prompts = [str(caption) for caption in CAPTIONS]
    assert start_position(GROUNDS.expand(-1, -1, NUM_FRAMES, -1, -1), prompts).isnan().all()
