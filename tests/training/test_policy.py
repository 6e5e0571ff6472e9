"""A stage's settings, its learning rate, and training in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.errors import UserError
from workflow_rl.loop.window import SDEWindow
from workflow_rl.request import DiffusionParams
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.workflow import T2I_I2V, StagePlan

MakeMethod = Callable[..., WorkflowRLMethod]
BATCH = {"prompts": PROMPTS, "seeds": [0, 1]}


@pytest.mark.parametrize(
    ("schedule", "middle", "end"),
    [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)],
)
def test_learning_rate(schedule: str, middle: float, end: float) -> None:
    settings = OptimizerSettings(
        2.0, warmup_steps=4, schedule=schedule, min_lr_ratio=0.1, total_steps=14
    )
    assert [settings.lr_at(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert settings.lr_at(4) == 2.0
    assert settings.lr_at(9) == pytest.approx(2.0 * middle)
    assert settings.lr_at(14) == settings.lr_at(99) == pytest.approx(2.0 * end)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "sine", "total_steps": 9}, "unknown learning-rate schedule 'sine'"),
        ({"schedule": "cosine"}, "needs total_steps"),
        ({"schedule": "linear"}, "needs total_steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        OptimizerSettings(1.0, **options)


def _settings(params: dict[str, Any], window: SDEWindow | None = None, **options: Any) -> None:
    StageSettings(
        stage=T2I_I2V.stages[0],
        plan=StagePlan(DiffusionParams(**params)),
        optimizer=OptimizerSettings(1.0),
        window=window or SDEWindow(),
        **options,
    )


@pytest.mark.parametrize(
    ("params", "window", "message"),
    [
        ({"sde_kind": "ode"}, None, "no log-prob to train"),
        ({"sde_noise_scale": 0.0}, None, "above 0"),
        ({"sde_kind": "cps", "sde_noise_scale": 1.5}, None, r"in \(0, 1\]"),
        ({"num_inference_steps": 1}, None, r"train on the steps \[\]"),
        ({}, SDEWindow("fixed", start=4, size=2), r"the steps \[4, 5\]"),
    ],
)
def test_a_stage_that_cannot_train_must_be_frozen(
    params: dict[str, Any], window: SDEWindow | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _settings(params, window)
    _settings(params, window, freeze=True)


def test_a_step_in_bfloat16_moves_the_weights(make_method: MakeMethod) -> None:
    method = make_method(dtype=torch.bfloat16, ema_decay=0.9)
    before = [{n: p.detach().clone() for n, p in q.parameters().items()} for q in method.policies]
    method.managed_train_step(BATCH, 0)
    for policy, old in zip(method.policies, before, strict=True):
        parameters = policy.parameters()
        assert torch.bfloat16 in {parameter.dtype for parameter in parameters.values()}
        assert any(not torch.equal(old[name], parameters[name]) for name in old)
        for name, master in policy.masters.items():
            assert master.dtype is torch.float32
            assert torch.equal(parameters[name], master.to(parameters[name].dtype))
    tensors = {name: tensor.clone() for name, tensor in method.state_tensors().items()}
    resumed = make_method(dtype=torch.bfloat16, ema_decay=0.9)
    resumed.load_state(tensors, method.state_values())
    expected = method.managed_train_step(BATCH, 1)[1]
    assert resumed.managed_train_step(BATCH, 1)[1] == expected
    ours, theirs = resumed.state_tensors(), method.state_tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_small_steps_add_up_in_bfloat16(make_method: MakeMethod) -> None:
    """Fifty steps of 1e-4 move a weight of 1 by 0.005, though each alone rounds to nothing."""
    policy = make_method(dtype=torch.bfloat16, beta=0.0, t2i_lr=1e-4).policies[0]
    name, parameter = next(
        (n, p) for n, p in policy.parameters().items() if p.dtype is torch.bfloat16
    )
    with torch.no_grad():
        parameter.fill_(1.0)
        policy.masters[name].fill_(1.0)
    assert policy.optimizer is not None
    for _ in range(50):
        parameter.grad = torch.ones_like(parameter)
        policy.raise_gradients()
        policy.optimizer.step()
        policy.drop_gradients()
        policy.lower_masters()
    assert float(parameter.flatten()[0].detach()) == pytest.approx(0.995, abs=0.002)


def test_float32_parameters_are_their_own_masters(make_method: MakeMethod) -> None:
    policy = make_method(beta=0.0).policies[0]
    assert all(policy.masters[name] is p for name, p in policy.parameters().items())
