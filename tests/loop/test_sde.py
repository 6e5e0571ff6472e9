"""Laws of the SDE kinds' coefficients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_rl.errors import UserError
from workflow_rl.loop.sde import AT_ONE, SDE_KINDS, AffineStep, affine_step, sde_kind, sigma_tilde

SDES = sorted(set(SDE_KINDS) - {"ode"})
F64 = torch.float64


def linear_sigmas(num_steps: int) -> torch.Tensor:
    return torch.linspace(1.0, 0.0, num_steps + 1, dtype=F64)


def all_steps(kind: str, num_steps: int, noise_scale: float) -> AffineStep:
    sigmas = linear_sigmas(num_steps)
    second = sigmas[1].expand(num_steps)
    return affine_step(SDE_KINDS[kind], sigmas[:-1], sigmas[1:], second, noise_scale)


def end_of_chain(
    kind: str, num_steps: int, noise_scale: float, mean: float, std: float
) -> tuple[float, float]:
    """Push the mean and standard deviation through all steps, exactly.

    Data N(mean, std^2) have x_sigma ~ N((1 - sigma) mean, V), V = (1 - sigma)^2 std^2 + sigma^2,
    and the velocity field E[eps - x0 | x] = -mean + k (x - (1 - sigma) mean) with
    k = (sigma - (1 - sigma) std^2) / V. It is linear in x, so x stays Gaussian.
    """
    steps = all_steps(kind, num_steps, noise_scale)
    at_mean, at_var = 0.0, 1.0
    columns = zip(linear_sigmas(num_steps)[:-1], *steps, strict=True)
    for sigma, a, b, s in (tuple(map(float, column)) for column in columns):
        k = (sigma - (1 - sigma) * std**2) / ((1 - sigma) ** 2 * std**2 + sigma**2)
        at_mean = a * at_mean + b * (-mean + k * (at_mean - (1 - sigma) * mean))
        at_var = (a + b * k) ** 2 * at_var + s**2
    return at_mean, math.sqrt(at_var)


@pytest.mark.parametrize(("mean", "std"), [(2.0, 0.5), (-1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("noise_scale", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", ["flow_sde", "dance_sde", "ode"])
def test_the_chain_ends_in_the_data(kind: str, noise_scale: float, mean: float, std: float) -> None:
    end_mean, end_std = end_of_chain(kind, 500, noise_scale, mean, std)
    assert end_mean == pytest.approx(mean, abs=1e-6)
    assert end_std == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize(("mean", "std"), [(2.0, 0.5), (-1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("noise_scale", [0.3, 0.7, 1.0])
def test_cps_keeps_the_mean_and_narrows_the_data_by_a_known_factor(
    noise_scale: float, mean: float, std: float
) -> None:
    end_mean, end_std = end_of_chain("cps", 2000, noise_scale, mean, std)
    assert end_mean == pytest.approx(mean, abs=1e-6)
    assert end_std == pytest.approx(std * math.cos(math.pi * noise_scale / 4), rel=0.01)


@pytest.mark.parametrize(("mean", "std"), [(2.0, 0.5), (-1.0, 1.0), (0.5, 2.0)])
def test_cps_ends_in_the_data_when_its_noise_shrinks_with_the_step(mean: float, std: float) -> None:
    # a ~ sqrt(-dt): as much noise in all as the other kinds add.
    end_mean, end_std = end_of_chain("cps", 2000, 1.0 / math.sqrt(2000), mean, std)
    assert end_mean == pytest.approx(mean, abs=1e-6)
    assert end_std == pytest.approx(std, rel=0.01)


@given(
    kind=st.sampled_from(SDES),
    start=st.floats(0.01, 0.999),
    part=st.floats(0.01, 0.99),
)
@settings(max_examples=60, deadline=None)
def test_vanishing_noise_approaches_the_ode_step(kind: str, start: float, part: float) -> None:
    sigma, sigma_next = torch.tensor([start], dtype=F64), torch.tensor([start * part], dtype=F64)
    step = affine_step(SDE_KINDS[kind], sigma, sigma_next, None, 1e-7)
    assert float(step.x_coef) == pytest.approx(1.0, abs=1e-6)
    assert float(step.velocity_coef) == pytest.approx(float(sigma_next - sigma), abs=1e-6)
    assert float(step.std) == pytest.approx(0.0, abs=1e-5)
    exact = affine_step(SDE_KINDS[kind], sigma, sigma_next, None, 0.0)
    assert [float(c) for c in exact] == [1.0, float(sigma_next - sigma), 0.0]


@pytest.mark.parametrize("kind", list(SDE_KINDS))
def test_the_last_step_is_the_ode_step(kind: str) -> None:
    one = torch.ones(1, dtype=F64)
    step = affine_step(SDE_KINDS[kind], 0.3 * one, 0.0 * one, None, 0.7)
    assert [float(c) for c in step] == [1.0, -0.3, 0.0]


@pytest.mark.parametrize("kind", list(SDE_KINDS))
def test_a_schedule_of_one_step_is_the_ode_step(kind: str) -> None:
    one = torch.ones(1, dtype=F64)
    step = affine_step(SDE_KINDS[kind], one, 0.0 * one, None, 0.7)
    assert [float(c) for c in step] == [1.0, -1.0, 0.0]


@pytest.mark.parametrize("kind", list(SDE_KINDS))
def test_the_velocity_always_has_a_say(kind: str) -> None:
    for noise_scale in (0.1, 0.7, 1.0):
        assert (all_steps(kind, 50, noise_scale).velocity_coef < 0).all()


def test_the_first_flow_sde_step_stays_of_order_one() -> None:
    step = all_steps("flow_sde", 10, 0.7)
    # sigma-tilde = sigma_1 makes 1 - sigma-tilde = -dt, so that s = a and A = 1 - a^2 / 2.
    assert float(step.std[0]) == pytest.approx(0.7)
    assert float(step.x_coef[0]) == pytest.approx(1 - 0.7**2 / 2)


def test_sigma_tilde_replaces_one_and_nothing_else() -> None:
    near_one = float(torch.tensor(1 - 1e-6, dtype=torch.float32))
    sigma = torch.tensor([1.0, near_one, 1.0 - 3 * AT_ONE, 0.5], dtype=F64)
    second = torch.full((4,), 0.9, dtype=F64)
    assert sigma_tilde(sigma, second).tolist() == [0.9, 0.9, 1.0 - 3 * AT_ONE, 0.5]


def test_a_step_from_one_ends_at_the_second_sigma() -> None:
    """So that is what stands in for 1 where no second sigma is given."""
    one, half = torch.ones(1, dtype=F64), torch.full((1,), 0.5, dtype=F64)
    flow_sde = SDE_KINDS["flow_sde"]
    assert affine_step(flow_sde, one, half, None, 0.7) == affine_step(
        flow_sde, one, half, half, 0.7
    )
    with pytest.raises(ValueError, match="below 1"):
        affine_step(flow_sde, one, half, one, 0.7)


@pytest.mark.parametrize(
    ("sigma", "sigma_next"), [(0.5, 0.5), (0.4, 0.5), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.1)]
)
def test_sigmas_out_of_order_are_refused(sigma: float, sigma_next: float) -> None:
    start, end = (torch.tensor([value], dtype=F64) for value in (sigma, sigma_next))
    with pytest.raises(ValueError, match="sigma_next < sigma_t"):
        affine_step(SDE_KINDS["ode"], start, end, None, 0.0)


@pytest.mark.parametrize(
    ("kind", "noise_scale"), [("cps", 1.01), ("flow_sde", -0.1), ("dance_sde", math.nan)]
)
def test_a_noise_scale_without_meaning_is_refused(kind: str, noise_scale: float) -> None:
    one = torch.ones(1, dtype=F64)
    with pytest.raises(ValueError, match="noise_scale"):
        affine_step(SDE_KINDS[kind], 0.5 * one, 0.4 * one, None, noise_scale)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'flow_sde'"):
        sde_kind("flow_sed")
