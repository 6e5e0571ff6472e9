"""Text is read for real: the weights are in the package."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.ocr import OcrTextMatch, edit_distance, quoted_text, text_match


def sign(text: str) -> torch.Tensor:
    """A white image with black text, ``[3, H, W]``."""
    image = Image.new("RGB", (256, 96), "white")
    font = ImageFont.load_default(40)
    ImageDraw.Draw(image).text((16, 24), text, fill="black", font=font)
    return torch.from_numpy(np.asarray(image).copy()).movedim(2, 0) / 255


@pytest.fixture(scope="module")
def reward() -> OcrTextMatch:
    made = OcrTextMatch(min_side=320, frames={"every": 2})
    made.load()
    return made


def test_text_in_images_is_read_and_compared(reward: OcrTextMatch) -> None:
    images = torch.stack([sign("HELLO 2049"), sign("HELLO 2099"), sign(""), sign("HELLO 2049")])
    prompts = ['a sign that says "Hello 2049"'] * 3 + ["a sign"]
    result = score_safely(reward, RewardBatch(prompts, list("abcd"), images, "image"))
    assert result.scores[:3].tolist() == pytest.approx([1.0, 8 / 9, 0.0])
    assert result.failures == {3: "the prompt has no text in quotes"}


def test_a_video_is_scored_by_every_nth_frame(reward: OcrTextMatch) -> None:
    video = torch.stack([sign("OPEN"), sign("SHUT"), sign(""), sign("SHUT")], dim=1)
    batch = RewardBatch(["'OPEN' in neon"], ["0"], video[None], "video")
    assert score_safely(reward, batch).scores.tolist() == [0.5]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ('a shop sign reading "Open late"', "Open late"),
        ("a cake that says 'Happy' and “Birthday”", "Happy Birthday"),
        ("the baker's shop, at five o'clock", ""),
        ("the baker's 'Best bread'", "Best bread"),
        ("no text", ""),
    ],
)
def test_wanted_text_is_what_the_prompt_quotes(prompt: str, expected: str) -> None:
    assert quoted_text(prompt) == expected


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "abc", 3), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("a", "a", 0)],
)
def test_edit_distance(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == distance


def test_match_ignores_case_spaces_and_what_surrounds_and_is_never_negative() -> None:
    assert text_match("we are OPEN late now", "openlate") == 1
    assert text_match("completely different words", "xyz") == 0
    assert text_match("opem", "open") == 0.75
