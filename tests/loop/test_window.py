"""SDE windows: pure, inside the schedule, and moving as named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow_rl.errors import UserError
from workflow_rl.loop.window import SDEWindow


@given(
    mode=st.sampled_from(["all", "fixed", "random", "sliding"]),
    num_steps=st.integers(2, 12),
    size=st.integers(1, 12),
    iteration=st.integers(0, 1000),
)
def test_never_the_last_step(mode: str, num_steps: int, size: int, iteration: int) -> None:
    window = SDEWindow(mode, size=None if mode == "all" else size)
    steps = window.steps(num_steps, iteration, seed=0)
    assert steps == window.steps(num_steps, iteration, seed=0)
    assert len(steps) == (num_steps - 1 if mode == "all" else min(size, num_steps - 1))
    assert min(steps) >= 0
    assert max(steps) < num_steps - 1


def test_fixed_stays_and_sliding_moves_and_wraps() -> None:
    fixed = SDEWindow("fixed", start=1, size=2)
    assert {fixed.steps(6, i, 0) for i in range(9)} == {(1, 2)}
    sliding = SDEWindow("sliding", size=2, stride=1, every=2)
    starts = [sliding.steps(6, i, 0)[0] for i in range(10)]
    assert starts == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]


@pytest.mark.parametrize("seed", [0, 1])
def test_random_visits_every_position(seed: int) -> None:
    window = SDEWindow("random", size=2)
    assert {window.steps(6, i, seed)[0] for i in range(100)} == {0, 1, 2, 3}


def test_an_unknown_mode_is_refused_when_named() -> None:
    with pytest.raises(UserError, match="mode is 'slide'; use one of all, fixed, random, sliding"):
        SDEWindow("slide", size=2)
