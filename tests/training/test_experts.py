"""A stage of two policies: each expert trains on the steps that it made, and on no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fake_models import ExpertsAdapter, fake_instance
from workflow_rl.loop.window import SDEWindow
from workflow_rl.request import DiffusionParams, SampleId, TaskType, make_request
from workflow_rl.training.expert_steps import untrained_experts
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.training.update import StageUpdate, TrainsNothingError, update_stage
from workflow_rl.training.weight_sync import WeightRole
from workflow_rl.workflow import StagePlan, WorkflowStage

POLICIES = ("transformer", "transformer_2")
STEPS = 4
"""Default schedule: timesteps 1000, 667, 334, 1; the boundary is 500."""


def _policy(kl_weight: float = 0.0) -> StagePolicy:
    students = [
        fake_instance(TaskType.T2I, adapter=ExpertsAdapter, policies=POLICIES) for _ in range(2)
    ]
    return StagePolicy(
        StageSettings(
            WorkflowStage("t2i", TaskType.T2I),
            StagePlan(DiffusionParams(num_inference_steps=STEPS), samples=2, slots=2),
            OptimizerSettings(lr=1e-2, weight_decay=0.1),
            window=SDEWindow(),
            kl_weight=kl_weight,
            ema_decay=0.5,
        ),
        students[0],
        students[1] if kl_weight else None,
    )


def _update(policy: StagePolicy, steps: tuple[int, ...]) -> tuple[StageUpdate, list[str]]:
    """Roll out and train once; return the update and the component of each recorded step."""
    requests = [
        make_request(
            "t2i",
            "a cat",
            sample=SampleId(0, "a cat", (i,)),
            num_inference_steps=STEPS,
            sde_kind="cps",
            sde_steps=steps,
        )
        for i in range(2)
    ]
    _, record = rollout_loop(policy.student, "denoise", requests)
    assert record is not None
    update = update_stage(
        policy,
        record,
        torch.tensor([1.0, -1.0]),
        torch.tensor([True, True]),
        iteration=0,
        num_updates=1,
        c2_tolerance=0.0,
    )
    return update, [step.component for step in record.steps]


def _weights(policy: StagePolicy, role: WeightRole) -> dict[str, torch.Tensor]:
    return {
        f"{component}.{name}": tensor.detach().clone()
        for component, tensors in policy.weights(role).items()
        for name, tensor in tensors.items()
    }


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {n.split(".")[0] for n, tensor in before.items() if not torch.equal(tensor, after[n])}


@pytest.mark.parametrize(
    ("steps", "experts"),
    [((0, 1), {"transformer"}), ((2,), {"transformer_2"}), ((1, 2), set(POLICIES))],
)
@pytest.mark.parametrize("kl_weight", [0.0, 0.1])
def test_an_expert_trains_on_its_own_steps_alone(
    steps: tuple[int, ...], experts: set[str], kl_weight: float
) -> None:
    """Weight decay is on: an expert without gradient must not even shrink."""
    policy = _policy(kl_weight)
    before = {role: _weights(policy, role) for role in (WeightRole.STUDENT, WeightRole.EMA)}
    update, components = _update(policy, steps)
    assert set(components) == experts
    assert update.applied
    assert update.metrics["grad_norm/t2i"] > 0
    for role, weights in before.items():
        assert _moved(weights, _weights(policy, role)) == experts


def test_both_experts_are_published_and_put_back() -> None:
    policy = _policy()
    _update(policy, (0,))
    student = _weights(policy, WeightRole.STUDENT)
    policy.publish(WeightRole.STUDENT)
    versions = [policy.student.version_of(component) for component in POLICIES]
    assert versions == [policy.version] * 2
    with policy.serving(WeightRole.EMA):
        assert _moved(student, _weights(policy, WeightRole.STUDENT)) == {"transformer"}
    assert _moved(student, _weights(policy, WeightRole.STUDENT)) == set()
    assert [policy.student.version_of(component) for component in POLICIES] == versions


def test_a_later_window_trains_the_other_expert() -> None:
    policy = _policy()
    _update(policy, (0, 1))
    before = _weights(policy, WeightRole.STUDENT)
    update, _ = _update(policy, (2,))
    assert update.applied
    assert _moved(before, _weights(policy, WeightRole.STUDENT)) == {"transformer_2"}


def test_an_expert_that_trains_nothing_in_its_first_update_is_named() -> None:
    """Its first update may come long after the other's."""
    policy = _policy()
    for parameter in policy.student.component("transformer_2").parameters():
        parameter.register_hook(torch.zeros_like)
    _update(policy, (0, 1))
    with pytest.raises(TrainsNothingError, match="gave transformer_2 a gradient of 0"):
        _update(policy, (2,))


def test_weights_that_act_on_no_output_are_told_before_the_backward_pass() -> None:
    """Such as the last block's text layers, which only other blocks would read."""
    policy = _policy()
    for parameter in policy.student.component("transformer").parameters():
        parameter.requires_grad_(False)
    with pytest.raises(TrainsNothingError, match=r"no weight of transformer .*train_modules"):
        _update(policy, (0,))


@pytest.mark.parametrize(
    ("window", "steps", "untrained", "words"),
    [
        (SDEWindow(), STEPS, [], ""),
        (SDEWindow("fixed", 0, 2), STEPS, ["transformer_2"], "steps 2 to 3 and the SDE window "),
        (
            SDEWindow("fixed", 0, 2),
            STEPS,
            ["transformer_2"],
            "window covers 0 to 1, so transformer_2",
        ),
        (SDEWindow("fixed", 2, 1), STEPS, ["transformer"], "transformer makes steps 0 to 1 "),
        (SDEWindow("sliding", 0, 1), STEPS, [], ""),
        (SDEWindow("sliding", 0, 1, every=9), STEPS, ["transformer_2"], "covers 0,"),
        (
            SDEWindow(),
            2,
            ["transformer_2"],
            "transformer_2 makes steps 1 and the SDE window covers 0,",
        ),
    ],
)
def test_an_expert_that_no_step_of_the_run_trains_is_named(
    window: SDEWindow, steps: int, untrained: list[str], words: str
) -> None:
    policy = _policy()
    plan = replace(policy.settings.plan, params=DiffusionParams(num_inference_steps=steps))
    policy.settings = replace(policy.settings, window=window, plan=plan)
    lines = untrained_experts(policy, iterations=9, seed=0)
    assert [line.split("so ")[1].split()[0] for line in lines] == untrained
    assert all(words in line and "\n" not in line for line in lines)


def test_an_expert_that_makes_no_step_is_named() -> None:
    policy = _policy()
    policy.student.adapter.boundary = 0.0
    (line,) = untrained_experts(policy, iterations=1, seed=0)
    assert "transformer_2 makes none of the steps" in line
