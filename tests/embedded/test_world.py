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
    ground = torch.stack([world.ground(c.direction) for c in captions]).unsqueeze(2)
    centres = world.sample_paths(captions, generator())
    assert centres.min() >= world.MARGIN
    assert centres.max() <= world.SIZE - world.MARGIN
    # A shape cut off by the edge would lose area.
    colours = torch.tensor([world.COLOURS[c.colour] for c in captions]).view(-1, 3, 1, 1, 1)
    area = ((videos - ground) / (colours - ground))[:, 0].sum(dim=(2, 3))
    torch.testing.assert_close(area, area[:, :1].expand_as(area), rtol=0.03, atol=0)


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


def test_a_placed_shape_starts_at_its_side_and_anywhere_across() -> None:
    captions = [c for c in world.placed_captions() for _ in range(4)]
    images = world.sample_images(captions, generator())
    ground = torch.stack([world.ground(c.direction) for c in captions])
    colours = torch.tensor([world.COLOURS[c.colour] for c in captions]).view(-1, 3, 1, 1)
    masks = ((images - ground) / (colours - ground))[:, 0]
    grid = (torch.arange(world.SIZE) + 0.5) / world.SIZE - 0.5
    x, y = (masks.sum(1) @ grid), (masks.sum(2) @ grid)
    centres = torch.stack([x, y], dim=1) / masks.sum((1, 2)).unsqueeze(1)
    sides = torch.tensor([world.PLACES[c.place] for c in captions if c.place is not None])
    along, across = (centres * sides).sum(1), (centres * sides.flip(1)).sum(1)
    assert along.min() > 0.08
    assert across.abs().mean() > 0.12
    assert across.mean().abs() < 0.03


def test_start_says_nothing_about_the_direction() -> None:
    starts = {}
    for name in world.DIRECTIONS:
        captions = [world.Caption("circle", "red", name)] * 50
        starts[name] = world.sample_paths(captions, generator(3))[:, 0]
    first = starts.pop("left")
    for other in starts.values():
        assert torch.equal(first, other)


def test_the_ground_is_lighter_towards_where_the_shape_heads() -> None:
    for direction, (x, y) in world.DIRECTIONS.items():
        ground = world.ground(direction)
        assert ground.mean(dim=(1, 2)).tolist() == pytest.approx(
            [g + light / 2 for g, light in zip(world.GROUND, world.GLOW, strict=True)]
        )
        for along, way in ((ground.diff(dim=2), x), (ground.diff(dim=1), y)):
            assert torch.equal(along.sign(), torch.full_like(along, way))
            assert along.max() <= max(world.GLOW) / world.SIZE + 1e-6


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
