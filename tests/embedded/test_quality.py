"""The reader of videos is right about videos that were drawn."""

from __future__ import annotations

import torch

from workflow_rl.embedded import quality, world


def test_drawn_videos_show_what_their_captions_say() -> None:
    generator = torch.Generator().manual_seed(0)
    captions = list(world.all_captions())
    videos = world.sample_videos(captions, generator).transpose(1, 2)
    noisy = (videos + 0.05 * torch.randn(videos.shape, generator=generator)).clamp(0, 1)
    result = quality.measure(noisy, captions)
    assert result.colour == 1
    assert result.shape == 1
    assert result.direction > 0.9, "only shapes that start at their edge stay"


def test_wrong_captions_are_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    shown = [world.Caption("circle", "red", "left")] * 8
    videos = world.sample_videos(shown, generator).transpose(1, 2)
    told = [world.Caption("square", "green", "right")] * 8
    result = quality.measure(videos, told)
    assert (result.colour, result.shape, result.direction) == (0, 0, 0)
    assert result.motion_pixels < 0


def test_centres_are_found_to_a_quarter_of_a_pixel() -> None:
    centres = world.sample_centres(20, torch.Generator().manual_seed(0))
    for index, shape in enumerate(world.SHAPES):
        caption = world.Caption(shape, "blue", "up")
        grounds = world.ground("up").expand(len(centres), -1, -1, -1)
        masks, _ = quality.foreground(world.draw(caption, centres), grounds)
        found, places = quality.locate_shapes(masks)
        assert (found == index).all()
        assert (places - centres).abs().max() <= 0.26
