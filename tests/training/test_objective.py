"""Laws of the objective."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workflow_rl.training.objective import STEP_WEIGHTINGS, gaussian_kl, ppo_clip_loss


def test_at_ratio_one_the_gradient_is_the_policy_gradient() -> None:
    log_ratio = torch.zeros(4, requires_grad=True)
    advantage = torch.tensor([1.0, -2.0, 0.5, 0.0])
    loss, ratio = ppo_clip_loss(log_ratio, advantage, clip=1e-3)
    loss.sum().backward()
    assert torch.equal(ratio.detach(), torch.ones(4))
    assert torch.equal(loss.detach(), -advantage)
    assert log_ratio.grad is not None
    assert torch.equal(log_ratio.grad, -advantage)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"),
    [(0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)],
)
def test_clipping_stops_only_steps_that_go_on_outwards(
    log_ratio: float, advantage: float, moves: bool
) -> None:
    value = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = ppo_clip_loss(value, torch.tensor([advantage]), clip=0.2)
    loss.sum().backward()
    assert value.grad is not None
    assert bool(value.grad.abs().item() > 0) is moves


@given(st.floats(0.01, 2.0), st.integers(0, 2**31))
def test_kl_is_that_of_two_gaussians(std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mean, reference = torch.randn(2, 3, 5, generator=generator)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, std), torch.distributions.Normal(reference, std)
    ).mean(1)
    torch.testing.assert_close(gaussian_kl(mean, reference, torch.full((3,), std)), expected)
    assert torch.equal(gaussian_kl(mean, mean, torch.full((3,), std)), torch.zeros(3))


def test_weightings_make_the_named_log_probs() -> None:
    """``cps`` turns the Gaussian log-ratio into the difference of squared errors."""
    generator = torch.Generator().manual_seed(0)
    old, new, sample = torch.randn(3, 2, 6, generator=generator)
    std = torch.tensor([0.1, 0.9])
    rows = std[:, None]
    delta, eps = new - old, (sample - old) / rows
    gaussian = (delta * eps / rows - delta.square() / (2 * rows.square())).mean(1)
    squared_errors = (sample - old).square().mean(1) - (sample - new).square().mean(1)
    torch.testing.assert_close(STEP_WEIGHTINGS["cps"](std) * gaussian, squared_errors)
    assert torch.equal(STEP_WEIGHTINGS["gaussian"](std), torch.ones(2))
    assert torch.equal(STEP_WEIGHTINGS["guard"](std), std)
    assert math.isclose(float(STEP_WEIGHTINGS["guard"](std)[1]), 0.9, rel_tol=1e-6)
