"""The embedded world: one coloured shape on a dark ground, 32x32 pixels, 9 frames.

In the images the direction says nothing about where the shape is. Two things give the image model
a hold on it all the same, as the data of real models do. The ground is a little lighter towards the
side that the shape heads for: without a use for the direction word, a model answers every direction
alike. And half of the captions that it is pre-trained on name the side where the shape starts
(`... from the east`): a model that never placed anything by words has nothing to learn it by.

Positions are in pixels, x to the right and y downwards, with pixel (row, col) centred on
(col + 0.5, row + 0.5). Pixels are floats in [0, 1]; every draw comes from the caller's generator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

SIZE = 32
NUM_FRAMES = 9
SHAPE_RADIUS = 5.0
"""Half the side of the box every shape fills, in pixels."""
MARGIN = SHAPE_RADIUS + 0.5
"""Smallest distance of a centre from the frame's edge: half a pixel is the soft outline."""
MIN_SPEED, SPEED_RANGE = 0.2, 2.4
"""Speed is MIN_SPEED + SPEED_RANGE * u**2 pixels per frame with u ~ U(0, 1)."""

SHAPES: tuple[str, ...] = ("circle", "square", "triangle")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.92, 0.14, 0.14),
    "green": (0.12, 0.80, 0.22),
    "blue": (0.18, 0.34, 0.96),
    "yellow": (0.96, 0.86, 0.14),
}
GROUND: tuple[float, float, float] = (0.04, 0.04, 0.06)
GLOW: tuple[float, float, float] = (0.22, 0.22, 0.22)
"""Light added to the ground at the edge that the shape heads for; none at the opposite edge."""
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}


PLACES: dict[str, tuple[float, float]] = {
    "west": (-1.0, 0.0),
    "east": (1.0, 0.0),
    "north": (0.0, -1.0),
    "south": (0.0, 1.0),
}
"""Sides of the frame that a caption can place the shape at."""
PLACE_DEPTH = 0.3
"""Share of the room that counts as being at a side."""


@dataclass(frozen=True)
class Caption:
    """What one caption says. `str(caption)` is the text.

    ``place`` says where the shape starts, None says nothing of it. Only what the image model is
    pre-trained on has captions with a place.
    """

    shape: str
    colour: str
    direction: str
    place: str | None = None

    def __post_init__(self) -> None:
        """Refuse words the world does not know."""
        if (
            self.shape not in SHAPES
            or self.colour not in COLOURS
            or self.direction not in DIRECTIONS
            or self.place not in (None, *PLACES)
        ):
            raise ValueError(
                f"unknown word in {self}; known: {SHAPES}, {tuple(COLOURS)}, {tuple(DIRECTIONS)}, "
                f"{tuple(PLACES)}"
            )

    def __str__(self) -> str:
        text = f"a {self.colour} {self.shape} moving {self.direction}"
        return text if self.place is None else f"{text} from the {self.place}"


def parse_caption(text: str) -> Caption:
    """Read a caption such as `a red circle moving left`.

    Raises
    ------
    ValueError
        If the text is not a caption of this world.
    """
    words = text.strip().lower().split()
    if len(words) != 5 or words[0] != "a" or words[3] != "moving":
        raise ValueError(f"not a caption of the embedded world: {text!r}")
    return Caption(shape=words[2], colour=words[1], direction=words[4])


def all_captions() -> tuple[Caption, ...]:
    """All 48 captions in a fixed order."""
    return tuple(Caption(s, c, d) for s, c, d in product(SHAPES, COLOURS, DIRECTIONS))


def placed_captions() -> tuple[Caption, ...]:
    """All captions with each place, in a fixed order."""
    return tuple(replace(caption, place=place) for caption in all_captions() for place in PLACES)


def held_out_captions() -> tuple[Caption, ...]:
    """The 12 captions kept for evaluation.

    A Latin rectangle: each shape with each colour once, each shape with each direction once, so
    every shape occurs 4 times, every colour and every direction 3 times.
    """
    directions = tuple(DIRECTIONS)
    return tuple(
        Caption(shape, colour, directions[(i + j) % len(directions)])
        for i, shape in enumerate(SHAPES)
        for j, colour in enumerate(COLOURS)
    )


def train_captions() -> tuple[Caption, ...]:
    """The 36 captions that reinforcement learning trains on."""
    held_out = set(held_out_captions())
    return tuple(caption for caption in all_captions() if caption not in held_out)


def coverage(shape: str, centres_N2: Tensor) -> Tensor:
    """Soft mask of a shape, from its signed distance to each pixel centre.

    Parameters
    ----------
    shape
        One of `SHAPES`.
    centres_N2
        Centres (x, y) in pixels.

    Returns
    -------
    Tensor
        `[N, SIZE, SIZE]` in [0, 1]: clip(0.5 - distance), a one-pixel soft outline.
    """
    grid = torch.arange(SIZE, dtype=torch.float32) + 0.5
    dx = grid.view(1, 1, -1) - centres_N2[:, 0].view(-1, 1, 1)
    dy = grid.view(1, -1, 1) - centres_N2[:, 1].view(-1, 1, 1)
    r = SHAPE_RADIUS
    if shape == "circle":
        distance = (dx.square() + dy.square()).sqrt() - r
    elif shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - 0.9 * r
    elif shape == "triangle":
        # Apex (0, -r), base from (-r, r) to (r, r): two slanted edges 2|x| - y = r and y = r.
        slanted = (2 * dx.abs() - dy - r) / 5**0.5
        distance = torch.maximum(slanted, dy - r)
    else:
        raise ValueError(f"unknown shape {shape!r}; known: {SHAPES}")
    return (0.5 - distance).clamp(0.0, 1.0)


def ground(direction: str) -> Tensor:
    """Ground `[3, SIZE, SIZE]` in [0, 1], lighter towards the side that `direction` points to."""
    x, y = DIRECTIONS[direction]
    ramp = (torch.arange(SIZE, dtype=torch.float32) + 0.5) / SIZE - 0.5
    light = 0.5 + x * ramp.view(1, -1) + y * ramp.view(-1, 1)
    return torch.tensor(GROUND).view(3, 1, 1) + torch.tensor(GLOW).view(3, 1, 1) * light


def draw(caption: Caption, centres_N2: Tensor) -> Tensor:
    """Draw the caption's shape at N places; returns `[N, 3, SIZE, SIZE]` in [0, 1]."""
    mask = coverage(caption.shape, centres_N2).unsqueeze(1)
    back = ground(caption.direction)
    return back + mask * (torch.tensor(COLOURS[caption.colour]).view(3, 1, 1) - back)


def sample_centres(count: int, generator: torch.Generator) -> Tensor:
    """Centres `[count, 2]`, uniform over where a shape lies fully inside the frame."""
    return MARGIN + (SIZE - 2 * MARGIN) * torch.rand(count, 2, generator=generator)


def at_place(place: str | None, centre_2: Tensor) -> Tensor:
    """Move a centre `[2]` that is uniform over the frame to where it is uniform over a place."""
    if place is None:
        return centre_2
    side = torch.tensor(PLACES[place])
    room = SIZE - 2 * MARGIN
    near = MARGIN + PLACE_DEPTH * (centre_2 - MARGIN)
    far = near + (1 - PLACE_DEPTH) * room
    return torch.where(side < 0, near, torch.where(side > 0, far, centre_2))


def path(start_2: Tensor, direction: str, speed: float) -> Tensor:
    """Centres `[NUM_FRAMES, 2]` of a shape that moves from `start_2` and stops at the edge."""
    time = torch.arange(NUM_FRAMES, dtype=torch.float32).unsqueeze(1)
    step = speed * torch.tensor(DIRECTIONS[direction])
    return (start_2 + time * step).clamp(MARGIN, SIZE - MARGIN)


def sample_paths(captions: list[Caption], generator: torch.Generator) -> Tensor:
    """Paths `[B, NUM_FRAMES, 2]`: uniform start, the caption's direction, stop at the edge."""
    starts = sample_centres(len(captions), generator)
    speeds = MIN_SPEED + SPEED_RANGE * torch.rand(len(captions), generator=generator).square()
    return torch.stack(
        [path(starts[i], c.direction, speeds[i].item()) for i, c in enumerate(captions)]
    )


def sample_images(captions: list[Caption], generator: torch.Generator) -> Tensor:
    """Images `[B, 3, SIZE, SIZE]` in [0, 1]; where the shape is does not depend on the caption."""
    centres = sample_centres(len(captions), generator)
    centres = torch.stack([at_place(c.place, centres[i]) for i, c in enumerate(captions)])
    return torch.cat([draw(c, centres[i : i + 1]) for i, c in enumerate(captions)])


def sample_videos(captions: list[Caption], generator: torch.Generator) -> Tensor:
    """Videos `[B, 3, NUM_FRAMES, SIZE, SIZE]` in [0, 1]."""
    paths = sample_paths(captions, generator)
    videos = [draw(c, paths[i]) for i, c in enumerate(captions)]
    return torch.stack(videos).transpose(1, 2)


def sample_captions(
    count: int, generator: torch.Generator, captions: tuple[Caption, ...] | None = None
) -> list[Caption]:
    """Captions drawn uniformly from `captions` (None: all 48), with replacement."""
    captions = captions or all_captions()
    picks = torch.randint(len(captions), (count,), generator=generator)
    return [captions[i] for i in picks.tolist()]
