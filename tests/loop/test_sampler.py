"""Laws of the sampler steps, and agreement with the public implementations' figures."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_rl.errors import UserError
from workflow_rl.loop.sampler import (
    SDEStep,
    flow_match_euler_step,
    flow_sde_ml_velocity,
    flow_sde_step_with_logprob,
    gaussian_log_ratio,
)
from workflow_rl.loop.sde import SDE_KINDS

KINDS = list(SDE_KINDS)
SDES = [kind for kind in KINDS if kind != "ode"]
DTYPES = [torch.float32, torch.bfloat16]
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sde_steps.json").read_text())["cases"]

sigma_pairs = st.tuples(st.floats(0.02, 1.0), st.floats(0.05, 0.95)).map(
    lambda drawn: (drawn[0], drawn[0] * drawn[1])
)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case_id(case: dict[str, Any]) -> str:
    mode = "draw" if case["prev_sample_in"] is None else "score"
    return f"{case['kind']}-a{case['noise_scale']}-shift{case['shift']}-{case['step_index']}-{mode}"


@pytest.mark.parametrize("kernel", ["torch_eager", "numpy_reference"])
@pytest.mark.parametrize("case", GOLDEN, ids=case_id)
def test_golden_figures(case: dict[str, Any], kernel: str) -> None:
    given_tensors = {
        name: None if case[key] is None else torch.tensor(case[key])
        for name, key in (("noise", "noise"), ("prev_sample", "prev_sample_in"))
    }
    sigmas, index = case["sigmas"], case["step_index"]
    step = flow_sde_step_with_logprob(
        torch.tensor(case["x"]),
        torch.tensor(case["velocity"]),
        sigmas[index],
        sigmas[index + 1],
        noise=given_tensors["noise"],
        prev_sample=given_tensors["prev_sample"],
        noise_scale=case["noise_scale"],
        kind=case["kind"],
        sigma_max=sigmas[1],
        kernel=kernel,
    )
    expect = {name: torch.tensor(value) for name, value in case["expect"].items()}
    torch.testing.assert_close(step.sample, expect["prev_sample"], rtol=0, atol=1e-5)
    torch.testing.assert_close(step.log_prob, expect["log_prob"], rtol=0, atol=1e-5)
    torch.testing.assert_close(step.mean, expect["mean"], rtol=0, atol=1e-5)
    torch.testing.assert_close(step.std, expect["std"].expand(2), rtol=0, atol=1e-5)


@given(sigmas=sigma_pairs, kind=st.sampled_from(KINDS))
@settings(max_examples=40, deadline=None)
def test_zero_noise_is_the_euler_step(sigmas: tuple[float, float], kind: str) -> None:
    x, velocity, noise = (randn(2, 3, 4, seed=seed) for seed in range(3))
    step = flow_sde_step_with_logprob(x, velocity, *sigmas, noise=noise, noise_scale=0.0, kind=kind)
    assert torch.equal(step.sample, flow_match_euler_step(x, velocity, *sigmas))
    assert step.log_prob.tolist() == [0.0, 0.0]
    assert step.std.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_euler_step_is_diffusers_step(dtype: torch.dtype) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    x = randn(2, 3, 4, dtype=dtype)
    for index, timestep in enumerate(scheduler.timesteps):
        velocity = randn(2, 3, 4, seed=index + 1, dtype=dtype)
        stock = scheduler.step(velocity, timestep, x).prev_sample
        ours = flow_match_euler_step(x, velocity, *scheduler.sigmas[index : index + 2])
        if dtype is torch.float32:
            assert torch.equal(ours, stock)
        else:  # The stock step rounds dt * velocity to bfloat16 before it adds; ours does not.
            torch.testing.assert_close(ours, stock, rtol=2**-7, atol=2**-8)
        x = stock


def test_the_euler_step_keeps_the_states_dtype() -> None:
    x, velocity = randn(1, 4), randn(1, 4, seed=1, dtype=torch.bfloat16)
    assert flow_match_euler_step(x, velocity, 0.5, 0.4).dtype is torch.float32


@given(sigmas=sigma_pairs, kind=st.sampled_from(KINDS), noise_scale=st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_mean_under_the_ml_velocity_is_the_sample(
    sigmas: tuple[float, float], kind: str, noise_scale: float
) -> None:
    x, sample = randn(2, 3, 4).double(), randn(2, 3, 4, seed=1).double()
    how: dict[str, Any] = {"kind": kind, "noise_scale": noise_scale, "sigma_max": 0.96}
    velocity = flow_sde_ml_velocity(x, sample, *sigmas, **how)
    mean = flow_sde_step_with_logprob(x, velocity, *sigmas, **how).mean
    torch.testing.assert_close(mean, sample, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", SDES)
@pytest.mark.parametrize("sigmas", [(1.0, 0.9), (0.6, 0.4), (0.2, 0.05)])
def test_the_gradient_points_to_the_ml_velocity(kind: str, sigmas: tuple[float, float]) -> None:
    x, sample = randn(2, 3, 4).double(), randn(2, 3, 4, seed=2).double()
    velocity = randn(2, 3, 4, seed=1).double().requires_grad_()
    how: dict[str, Any] = {"kind": kind, "sigma_max": 0.9}
    step = flow_sde_step_with_logprob(x, velocity, *sigmas, prev_sample=sample, **how)
    (gradient,) = torch.autograd.grad(step.log_prob.sum(), velocity)
    # log_prob = mean_N(-w (x' - A x - B v)^2) with w = 1/(2 s^2), or 1 for cps; B from two means.
    unit = flow_sde_step_with_logprob(x, torch.ones_like(x), *sigmas, **how).mean
    zero = flow_sde_step_with_logprob(x, torch.zeros_like(x), *sigmas, **how).mean
    b = unit - zero
    weight = 1.0 if kind == "cps" else float(0.5 / step.std[0] ** 2)
    ml_velocity = flow_sde_ml_velocity(x, sample, *sigmas, **how)
    factor = 2.0 * weight * b**2 / x[0].numel()
    torch.testing.assert_close(gradient, factor * (ml_velocity - velocity), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde"])
def test_log_prob_is_the_density(kind: str) -> None:
    x, velocity, sample = (randn(2, 3, 4, seed=seed) for seed in range(3))
    step = flow_sde_step_with_logprob(x, velocity, 0.6, 0.4, prev_sample=sample, kind=kind)
    density = torch.distributions.Normal(step.mean, step.std[:, None, None]).log_prob(sample)
    torch.testing.assert_close(step.log_prob, density.mean(dim=(1, 2)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "ode"])
def test_sampled_chains_end_in_the_data(kind: str) -> None:
    """The drawn noise too has the right law: 40,000 chains of Gaussian data (see test_sde)."""
    mean, std, num_steps = 2.0, 0.5, 200
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 40_000, generator=generator)
    sigmas = torch.linspace(1, 0, num_steps + 1).tolist()
    for sigma, sigma_next in itertools.pairwise(sigmas):
        k = (sigma - (1 - sigma) * std**2) / ((1 - sigma) ** 2 * std**2 + sigma**2)
        velocity = -mean + k * (x - (1 - sigma) * mean)
        noise = torch.randn(x.shape, generator=generator)
        x = flow_sde_step_with_logprob(
            x, velocity, sigma, sigma_next, noise=noise, kind=kind, sigma_max=sigmas[1]
        ).sample
    # Four standard errors of 40,000 samples, and 1% for the 200 steps.
    assert float(x.mean()) == pytest.approx(mean, abs=4 * std / math.sqrt(40_000))
    assert float(x.std()) == pytest.approx(std, rel=4 / math.sqrt(80_000) + 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_non_finite_at_either_end(kind: str, dtype: torch.dtype) -> None:
    x, noise = randn(2, 16, dtype=dtype), randn(2, 16, seed=1)
    velocity = randn(2, 16, seed=2, dtype=dtype).requires_grad_()
    for sigma, sigma_next in ((1.0, 0.95), (1.0, 0.0), (0.01, 1e-4), (0.01, 0.0)):
        step = flow_sde_step_with_logprob(
            x, velocity, sigma, sigma_next, noise=noise, kind=kind, sigma_max=0.95
        )
        (gradient,) = torch.autograd.grad(step.log_prob.sum() + step.mean.sum(), velocity)
        ml_velocity = flow_sde_ml_velocity(
            x, step.sample, sigma, sigma_next, kind=kind, sigma_max=0.95
        )
        for tensor in (*step, gradient, ml_velocity):
            assert torch.isfinite(tensor).all()
        assert step.mean.abs().max() < 20
        assert step.sample.dtype is dtype
        assert step.log_prob.dtype is step.mean.dtype is step.std.dtype is torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_scoring_a_drawn_sample_gives_the_same_log_prob_to_the_bit(
    kind: str, dtype: torch.dtype
) -> None:
    x, velocity = randn(3, 4, 5, dtype=dtype), randn(3, 4, 5, seed=1, dtype=dtype)
    how: dict[str, Any] = {"kind": kind, "sigma_max": 0.9}
    drawn = flow_sde_step_with_logprob(x, velocity, 0.7, 0.5, noise=randn(3, 4, 5, seed=2), **how)
    scored = flow_sde_step_with_logprob(x, velocity, 0.7, 0.5, prev_sample=drawn.sample, **how)
    for left, right in zip(drawn, scored, strict=True):
        assert torch.equal(left, right)


def test_the_log_prob_is_that_of_the_rounded_sample() -> None:
    x, velocity, noise = (randn(1, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    step = flow_sde_step_with_logprob(x, velocity, 0.6, 0.5, noise=noise, kind="cps")
    rounded = -((step.sample.float() - step.mean) ** 2).mean(dim=1)
    unrounded = -((step.std[:, None] * noise.float()) ** 2).mean(dim=1)
    torch.testing.assert_close(step.log_prob, rounded, rtol=1e-6, atol=0)
    assert abs(float(step.log_prob - unrounded)) > 1e-5


def test_without_noise_or_sample_the_mean_is_the_sample() -> None:
    step = flow_sde_step_with_logprob(randn(2, 5), randn(2, 5, seed=1), 0.6, 0.5)
    assert torch.equal(step.sample, step.mean)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sigma_per_sample_is_a_call_per_sample(kind: str) -> None:
    x, velocity, noise = (randn(4, 3, 2, seed=seed) for seed in range(3))
    sigma, sigma_next = torch.tensor([1.0, 0.7, 0.3, 0.1]), torch.tensor([0.9, 0.5, 0.2, 0.0])
    batch = flow_sde_step_with_logprob(
        x, velocity, sigma, sigma_next, noise=noise, kind=kind, sigma_max=0.9
    )
    rows = [
        flow_sde_step_with_logprob(
            x[row : row + 1],
            velocity[row : row + 1],
            float(sigma[row]),
            float(sigma_next[row]),
            noise=noise[row : row + 1],
            kind=kind,
            sigma_max=0.9,
        )
        for row in range(4)
    ]
    for name in SDEStep._fields:
        expected = torch.cat([getattr(row, name) for row in rows])
        torch.testing.assert_close(getattr(batch, name), expected, rtol=1e-6, atol=1e-6)


def test_given_latents_stay_and_do_not_count() -> None:
    x, noise = randn(2, 3, 4), randn(2, 3, 4, seed=2)
    velocity = randn(2, 3, 4, seed=1).requires_grad_()
    mask = torch.tensor([False, True, True])[:, None]
    for kind in SDES:
        step = flow_sde_step_with_logprob(x, velocity, 0.7, 0.5, noise=noise, kind=kind, mask=mask)
        alone = flow_sde_step_with_logprob(
            x[:, 1:], velocity[:, 1:], 0.7, 0.5, noise=noise[:, 1:], kind=kind
        )
        assert torch.equal(step.sample[:, 0], x[:, 0])
        assert torch.equal(step.sample[:, 1:], alone.sample)
        torch.testing.assert_close(step.log_prob, alone.log_prob, rtol=1e-6, atol=1e-6)
        (gradient,) = torch.autograd.grad(step.log_prob.sum(), velocity)
        assert gradient[:, 0].abs().max() == 0
        assert gradient[:, 1:].abs().min() > 0


def test_a_deterministic_row_has_zero_log_prob_and_gradient() -> None:
    x, noise = randn(2, 8), randn(2, 8, seed=2)
    velocity = randn(2, 8, seed=1).requires_grad_()
    step = flow_sde_step_with_logprob(
        x, velocity, torch.tensor([0.5, 0.1]), torch.tensor([0.4, 0.0]), noise=noise
    )
    (gradient,) = torch.autograd.grad(step.log_prob.sum(), velocity)
    assert step.log_prob[1] == 0
    assert step.std[1] == 0
    assert gradient[1].abs().max() == 0
    assert gradient[0].abs().min() > 0


def test_log_ratio_is_the_difference_of_log_probs() -> None:
    x, sample = randn(2, 3, 4).double(), randn(2, 3, 4, seed=1).double()
    old, new = (
        flow_sde_step_with_logprob(
            x, randn(2, 3, 4, seed=seed).double(), 0.6, 0.5, prev_sample=sample
        )
        for seed in (2, 3)
    )
    ratio = gaussian_log_ratio(new.mean, old.mean, sample, old.std)
    torch.testing.assert_close(ratio, new.log_prob - old.log_prob, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_ratio_of_equal_means_is_exactly_zero(dtype: torch.dtype) -> None:
    mean, sample = randn(2, 8, dtype=dtype), randn(2, 8, seed=1, dtype=dtype)
    ratio = gaussian_log_ratio(mean, mean.clone(), sample, torch.tensor([1e-4, 0.7]))
    assert ratio.dtype is torch.float32
    assert ratio.tolist() == [0.0, 0.0]


def test_log_ratio_leaves_out_given_latents_and_deterministic_rows() -> None:
    old, sample = randn(2, 3, 4), randn(2, 3, 4, seed=1)
    new = randn(2, 3, 4, seed=2).requires_grad_()
    mask = torch.tensor([False, True, True])[:, None]
    std = torch.tensor([0.5, 0.0])
    ratio = gaussian_log_ratio(new, old, sample, std, mask=mask)
    alone = gaussian_log_ratio(new[:, 1:], old[:, 1:], sample[:, 1:], std)
    torch.testing.assert_close(ratio, alone)
    (gradient,) = torch.autograd.grad(ratio.sum(), new)
    assert ratio[1] == 0
    assert torch.isfinite(gradient).all()
    assert gradient[1].abs().max() == 0
    assert gradient[0, 0].abs().max() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": torch.zeros(2, 3), "prev_sample": torch.zeros(2, 3)}, "not both"),
        ({"noise": torch.zeros(2, 4)}, "noise must have x_t's shape"),
        ({"sigma_max": torch.zeros(3)}, "sigma_max must be a number"),
        ({"noise_scale": -1.0}, "noise_scale"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flow_sde_step_with_logprob(torch.zeros(2, 3), torch.zeros(2, 3), 0.5, 0.4, **change)


def test_unknown_names_are_refused() -> None:
    x = torch.zeros(1, 2)
    with pytest.raises(UserError, match="did you mean 'cps'"):
        flow_sde_step_with_logprob(x, x, 0.5, 0.4, kind="cpss")
    with pytest.raises(UserError, match="did you mean 'torch_eager'"):
        flow_sde_step_with_logprob(x, x, 0.5, 0.4, kernel="torch_eagre")
