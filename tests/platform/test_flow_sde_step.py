"""Every kernel of FLOW_SDE_STEP is the numpy oracle."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from workflow_rl.errors import WorkflowRLError
from workflow_rl.platform import (
    FLOW_SDE_STEP,
    FlowSDEStepResult,
    flow_sde_step,
    kernels,
)
from workflow_rl.platform.registry import Kernel

SHAPE = (3, 2, 5, 4)
TOLERANCE = {"torch_eager": 1e-6, "torch_compile": 1e-5}


@pytest.fixture(params=list(TOLERANCE))
def name(request: pytest.FixtureRequest) -> str:
    rows = {row.kernel: row for row in kernels.list() if row.device == "cpu"}
    row = rows[request.param]
    if not row.available:
        pytest.skip(f"{row.kernel}: {row.reason}")
    return row.kernel


def function(name: str) -> Callable[..., FlowSDEStepResult]:
    return kernels.select(FLOW_SDE_STEP, "cpu", name).function


def randn(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A batch with a Gaussian row, one scored by its squared error and a deterministic one."""
    return {
        "x_t": randn(0),
        "velocity": randn(1),
        "x_coef_B": torch.tensor([0.8, 0.95, 1.0], dtype=torch.float64),
        "velocity_coef_B": torch.tensor([-0.3, -0.12, -0.1], dtype=torch.float64),
        "std_B": torch.tensor([0.7, 0.05, 0.0], dtype=torch.float64),
        "weight_B": torch.tensor([0.5 / 0.7**2, 1.0, 0.0], dtype=torch.float64),
        "offset_B": torch.tensor([0.3, 0.0, 0.0], dtype=torch.float64),
        "noise": None,
        "prev_sample": None,
        "mask": None,
        **changes,
    }


def some_given() -> torch.Tensor:
    return (torch.arange(5) > 0)[:, None].expand(SHAPE)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mode", ["noise", "prev_sample", "mean"])
def test_agrees_with_the_oracle(name: str, masked: bool, mode: str) -> None:
    changes: dict[str, Any] = {"mask": some_given() if masked else None}
    if mode == "noise":
        changes["noise"] = randn(2)
    elif mode == "prev_sample":
        changes["prev_sample"] = randn(3)
    inputs = arguments(**changes)
    ours, oracle = function(name)(**inputs), function("numpy_reference")(**inputs)
    for got, expected in zip(ours, oracle, strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[name], atol=TOLERANCE[name])


def test_bfloat16_samples_are_rounded_and_scored_as_rounded(name: str) -> None:
    inputs = arguments(x_t=randn(0, torch.bfloat16), velocity=randn(1, torch.bfloat16))
    drawn = function(name)(**{**inputs, "noise": randn(2)})
    oracle = function("numpy_reference")(**{**inputs, "prev_sample": drawn.sample})
    assert drawn.sample.dtype is torch.bfloat16
    assert drawn.log_prob.dtype is drawn.mean.dtype is torch.float32
    torch.testing.assert_close(drawn.log_prob, oracle.log_prob, rtol=1e-5, atol=1e-5)


def test_scoring_a_drawn_sample_is_exact_with_and_without_gradient(name: str) -> None:
    with torch.no_grad():
        drawn = function(name)(**arguments(noise=randn(2)))
    velocity = randn(1).requires_grad_()
    scored = function(name)(**arguments(prev_sample=drawn.sample, velocity=velocity))
    assert torch.equal(scored.log_prob, drawn.log_prob)
    assert torch.equal(scored.mean, drawn.mean)


def test_gradients_are_the_eager_ones_and_finite(name: str) -> None:
    gradients = []
    for kernel in (name, "torch_eager"):
        velocity = randn(1).requires_grad_()
        result = function(kernel)(**arguments(velocity=velocity, prev_sample=randn(2)))
        (result.log_prob.sum() + result.mean.square().sum()).backward()
        assert velocity.grad is not None
        gradients.append(velocity.grad)
    assert torch.isfinite(gradients[0]).all()
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_a_drawn_sample_is_a_constant_in_its_log_prob(name: str) -> None:
    velocity = randn(1).requires_grad_()
    drawn = function(name)(**arguments(velocity=velocity, noise=randn(2)))
    scored = function(name)(**arguments(velocity=velocity, prev_sample=drawn.sample.detach()))
    left, right = (
        torch.autograd.grad(step.log_prob.sum(), velocity)[0] for step in (drawn, scored)
    )
    assert torch.equal(left, right)
    assert left[0].abs().max() > 0


def test_a_sample_with_nothing_to_sample_counts_for_nothing(name: str) -> None:
    inputs = arguments(noise=randn(2), mask=torch.zeros(SHAPE, dtype=torch.bool))
    result = function(name)(**inputs)
    assert torch.equal(result.sample, inputs["x_t"])
    assert result.log_prob.tolist() == [0.0, 0.0, 0.0]


def test_the_oracle_refuses_to_be_trained_through() -> None:
    with pytest.raises(WorkflowRLError, match="has no gradient"):
        function("numpy_reference")(**arguments(velocity=randn(1).requires_grad_()))


def compiled() -> Kernel:
    return next(
        kernel
        for kernel in kernels._kernels[FLOW_SDE_STEP].values()
        if kernel.name == "torch_compile"
    )


def test_without_a_compiler_torch_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_sde_step.shutil, "which", lambda _: None)
    available = compiled().available_on("cpu")
    assert not available.ok
    assert "C++ compiler" in available.reason
