"""Laws of the distance between samples, and of the diversity of a prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workflow_rl.evaluation.diversity import distances, prompt_diversity, signature


def _diversity(samples: list[torch.Tensor], prompts: list[str], valid: list[bool]) -> list[float]:
    blocks = distances([signature(sample) for sample in samples], prompts)
    values: list[float] = prompt_diversity(blocks, prompts, np.array(valid)).tolist()
    return values


def test_equal_samples_have_none_and_black_to_white_is_one() -> None:
    black, white = torch.zeros(3, 5, 8, 8), torch.ones(3, 5, 8, 8)
    assert _diversity([black, black], ["a", "a"], [True, True]) == [0.0]
    assert _diversity([black, white], ["a", "a"], [True, True]) == [1.0]


def test_only_samples_of_one_prompt_are_compared() -> None:
    black, white = torch.zeros(3, 4, 8, 8), torch.ones(3, 4, 8, 8)
    samples, prompts = [black, white, black, white], ["a", "b", "a", "b"]
    assert _diversity(samples, prompts, [True] * 4) == [0.0, 0.0]


def test_size_length_and_enlargement_change_nothing() -> None:
    """A file that was enlarged for the eye is as far from others as what it shows."""
    small = [torch.rand(3, 8, 32, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1)]
    large = [s.repeat_interleave(4, -1).repeat_interleave(4, -2) for s in small]
    slow = [s.repeat_interleave(3, 1) for s in small]
    expected = _diversity(small, ["a", "a"], [True, True])
    assert _diversity(large, ["a", "a"], [True, True]) == pytest.approx(expected, rel=1e-5)
    assert _diversity(slow, ["a", "a"], [True, True]) == pytest.approx(expected, rel=0.2)
    assert len(signature(small[0])) == len(signature(large[0])) == len(signature(slow[0]))


def test_what_failed_leaves_the_pairs_it_is_in() -> None:
    black, white = torch.zeros(3, 8, 8), torch.ones(3, 8, 8)
    samples, prompts = [black, black, white], ["a", "a", "a"]
    assert _diversity(samples, prompts, [True, True, True]) == pytest.approx([2 / 3])
    assert _diversity(samples, prompts, [True, True, False]) == [0.0]
    (alone,) = _diversity(samples, prompts, [False, True, False])
    assert math.isnan(alone)
    broken = [black, torch.full((3, 8, 8), math.nan), white]
    assert _diversity(broken, prompts, [True, True, True]) == [1.0]
