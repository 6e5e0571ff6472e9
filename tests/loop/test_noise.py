"""Noise belongs to the sample, not to the batch."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_rl.loop.noise import INIT_STEP, NoiseKey, draw_noise, generator_for
from workflow_rl.request import SampleId

SAMPLE = SampleId(run_seed=3, prompt="a red circle moving left", path=(1, 2), draw=4)
KEY = NoiseKey(SAMPLE, "i2v", 0)
SEED = 4483189322557003318


@given(order=st.permutations(range(6)), size=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_a_sample_draws_the_same_in_any_batch(order: list[int], size: int) -> None:
    keys = [NoiseKey(SAMPLE.child(index), "t2i", 2) for index in range(6)]
    together = draw_noise((2, 3), keys)
    batch = order[:size]
    assert torch.equal(draw_noise((2, 3), [keys[index] for index in batch]), together[batch])


@pytest.mark.parametrize(
    "other",
    [
        replace(KEY, sample=replace(SAMPLE, run_seed=4)),
        replace(KEY, sample=replace(SAMPLE, prompt="a red circle moving right")),
        replace(KEY, sample=replace(SAMPLE, path=(2, 1))),
        replace(KEY, sample=replace(SAMPLE, path=(12,))),
        replace(KEY, sample=replace(SAMPLE, path=(1,))),
        replace(KEY, sample=replace(SAMPLE, draw=5)),
        replace(KEY, stage="t2i"),
        replace(KEY, step=1),
        replace(KEY, step=INIT_STEP),
    ],
)
def test_every_field_of_the_identity_counts(other: NoiseKey) -> None:
    noise = draw_noise((64,), [KEY, other])
    assert not torch.isclose(noise[0], noise[1]).any()


def test_neighbouring_steps_are_independent_standard_normals() -> None:
    noise = draw_noise((200,), [replace(KEY, step=step) for step in range(200)])
    assert abs(float(noise.mean())) < 4 / 200
    assert float(noise.std()) == pytest.approx(1.0, abs=4 / (2**0.5 * 200))
    correlations = torch.corrcoef(noise) - torch.eye(200)
    assert float(correlations.abs().max()) < 6 / 200**0.5


def test_the_dtype_only_rounds() -> None:
    assert torch.equal(
        draw_noise((5,), [KEY], torch.bfloat16), draw_noise((5,), [KEY]).to(torch.bfloat16)
    )


def test_the_seed_is_stable_across_processes_and_versions() -> None:
    source = (
        "from workflow_rl.loop.noise import *; from workflow_rl.request import SampleId; "
        "print(NoiseKey(SampleId(3, 'a red circle moving left', (1, 2), 4), 'i2v', 0).seed())"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True
    )
    assert int(elsewhere.stdout) == KEY.seed() == SEED
    assert 0 <= KEY.seed() < 2**63


def test_a_generator_starts_afresh_and_any_prompt_has_one() -> None:
    key = replace(KEY, sample=replace(SAMPLE, prompt='円 "→" \n\ud800'))
    left, right = (torch.randn(3, generator=generator_for(key)) for _ in range(2))
    assert torch.equal(left, right)
