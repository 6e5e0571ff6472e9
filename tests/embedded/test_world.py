"""Laws of the embedded world."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from workflow_rl.embedded import world


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_captions_round_trip() -> None:
    captions = world.all_captions()
    assert len(set(captions)) == 48
    for caption in captions:
        assert world.parse_caption(str(caption)) == caption


@pytest.mark.parametrize(
    "text", ["", "a red circle", "a pink circle moving left", "one red circle moving left"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        world.parse_caption(text)


def test_held_out_split_is_disjoint_complete_and_balanced() -> None:
    held_out, train = world.held_out_captions(), world.train_captions()
    assert len(held_out) == 12
    assert len(train) == 36
    assert set(held_out) | set(train) == set(world.all_captions())
    for field, share in (("shape", 4), ("colour", 3), ("direction", 3)):
        counts = Counter(vars(caption)[field] for caption in held_out)
        assert set(counts.values()) == {share}, field


def test_shapes_lie_fully_inside_the_frame() -> None:
    captions = [c for c in world.all_captions() for _ in range(4)]
    videos = world.sample_videos(captions, generator())
    ground = torch.tensor(world.GROUND).view(1, 3, 1, 1, 1)
    centres = world.sample_paths(captions, generator())
    assert centres.min() >= world.MARGIN
    assert centres.max() <= world.SIZE - world.MARGIN
    # A shape cut off by the edge would lose area.
    amount = (videos - ground).abs().sum(dim=(1, 3, 4))
    torch.testing.assert_close(amount, amount[:, :1].expand_as(amount), rtol=0.03, atol=0)


def test_videos_move_only_along_their_direction_and_stop_at_the_edge() -> None:
    captions = [c for c in world.all_captions() for _ in range(8)]
    paths = world.sample_paths(captions, generator())
    way = torch.tensor([world.DIRECTIONS[c.direction] for c in captions])
    steps = paths.diff(dim=1)
    along = (steps * way.unsqueeze(1)).sum(dim=2)
    assert torch.equal((steps * way.flip(1).unsqueeze(1)).sum(dim=2), torch.zeros_like(along))
    assert along.min() >= 0
    assert along.max() <= world.MIN_SPEED + world.SPEED_RANGE + 1e-5
    assert (along[:, -1] == 0).any(), "some shapes reach the edge"
    inside = ((paths[:, -1] > world.MARGIN) & (paths[:, -1] < world.SIZE - world.MARGIN)).all(1)
    assert (along[inside] > world.MIN_SPEED - 1e-5).all(), "a shape stops at the edge alone"


def test_start_says_nothing_about_the_direction() -> None:
    starts = {}
    for name in world.DIRECTIONS:
        captions = [world.Caption("circle", "red", name)] * 50
        starts[name] = world.sample_paths(captions, generator(3))[:, 0]
    first = starts.pop("left")
    for other in starts.values():
        assert torch.equal(first, other)


def test_same_generator_same_pixels() -> None:
    captions = list(world.all_captions())
    first, second = (world.sample_videos(captions, generator(7)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, world.sample_videos(captions, generator(8)))
    assert first.shape == (48, 3, world.NUM_FRAMES, world.SIZE, world.SIZE)
    assert first.min() >= 0
    assert first.max() <= 1


def test_drawing_is_anti_aliased() -> None:
    """Moving by a tenth of a pixel changes the picture a little, never not at all."""
    centre = torch.tensor([[16.0, 16.0]])
    for shape in world.SHAPES:
        change = world.coverage(shape, centre + 0.1) - world.coverage(shape, centre)
        assert 0 < change.abs().max() < 0.3
