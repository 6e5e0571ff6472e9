"""Publications: whole, versioned, and nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.training.methods.base import new_instance
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod
from workflow_rl.training.weight_sync import (
    WeightRole,
    WeightSyncPlan,
    publish,
    weights_checksum,
)

MakeMethod = Callable[..., WorkflowRLMethod]
PLAN = WeightSyncPlan(WeightRole.STUDENT, ("transformer",))


def test_into_a_second_instance(make_method: MakeMethod) -> None:
    method = make_method(beta=0.0)
    method.managed_train_step({"prompts": PROMPTS, "seeds": [0, 0]}, 0)
    policy = method.policies[0]
    server = new_instance(policy.student.card)
    text_version = server.version_of("text_encoder")
    publication = policy.publish(WeightRole.STUDENT, server)
    ours = dict(policy.student.component("transformer").named_parameters())
    theirs = dict(server.component("transformer").named_parameters())
    assert publication.num_tensors == len(ours) == len(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(ours[name].data_ptr() != theirs[name].data_ptr() for name in ours)
    assert server.version_of("transformer") == publication.version == 1
    assert server.version_of("text_encoder") == text_version
    prefixed = {f"transformer.{name}": tensor for name, tensor in theirs.items()}
    assert weights_checksum(prefixed) == publication.checksum


def test_each_publication_is_a_new_version(make_method: MakeMethod) -> None:
    policy = make_method(beta=0.0).policies[0]
    assert [policy.publish(WeightRole.STUDENT).version for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "bound no tensor"),
        ({"transformer": {}}, "bound no tensor of 'transformer'"),
        ({"transformer": {"absent.weight": torch.zeros(1)}}, "which the target lacks"),
        ({"transformer": {"proj_out.bias": torch.zeros(1)}}, "the target holds"),
        ({"transformer": {"proj_out.bias": torch.zeros(16).double()}}, "float64"),
    ],
)
def test_what_does_not_fit_is_refused(
    make_method: MakeMethod, weights: dict[str, dict[str, torch.Tensor]], message: str
) -> None:
    server = make_method(beta=0.0).policies[0].student
    with pytest.raises(WorkflowRLError, match=message):
        publish(PLAN, weights, server)
    assert server.version_of("transformer") == 0


def test_a_damaged_transfer_is_refused(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_method(beta=0.0).policies[0]
    server = new_instance(policy.student.card)
    copy = torch.Tensor.copy_

    def flip_a_bit(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy(target, source)
        target.view(-1)[0] += 1e-3
        return target

    slots = dict(server.component("transformer").named_parameters())
    before = {name: slot.detach().clone() for name, slot in slots.items()}
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.add_(1.0)
    monkeypatch.setattr(torch.nn.Parameter, "copy_", flip_a_bit, raising=False)
    with pytest.raises(WorkflowRLError, match="checksum of what arrived differs"):
        policy.publish(WeightRole.STUDENT, server)
    assert server.version_of("transformer") == 0
    assert all(torch.equal(before[name], slot) for name, slot in slots.items())


def test_every_component_of_the_plan_must_have_weights(make_method: MakeMethod) -> None:
    student = make_method(beta=0.0).policies[0].student
    source = {"transformer": dict(student.component("transformer").named_parameters())}
    plan = WeightSyncPlan(WeightRole.STUDENT, ("transformer", "vae"))
    with pytest.raises(WorkflowRLError, match="bound no tensor of 'vae'"):
        publish(plan, source, student)
    assert student.version_of("transformer") == 0


def test_a_refused_publication_leaves_the_student(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_method(beta=0.0, ema_decay=0.5).policies[0]
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}

    def half_done(*_: object) -> None:
        with torch.no_grad():
            next(iter(policy.parameters().values())).zero_()
        raise WorkflowRLError("refused")

    monkeypatch.setattr("workflow_rl.training.policy.publish", half_done)
    with pytest.raises(WorkflowRLError, match="refused"), policy.serving(WeightRole.EMA):
        pytest.fail("served what was refused")
    assert all(torch.equal(before[name], p) for name, p in policy.parameters().items())
    assert policy.version == 0


def test_no_version_is_given_to_two_sets_of_weights(make_method: MakeMethod) -> None:
    method = make_method(beta=0.0, ema_decay=0.5)
    policy = method.policies[0]
    assert policy.publish(WeightRole.STUDENT).version == 1
    with policy.serving(WeightRole.EMA) as instance:
        served = instance.version_of("transformer")
    assert (served, policy.version) == (2, 1)
    resumed = make_method(beta=0.0, ema_decay=0.5)
    resumed.load_state(method.state_tensors(), method.state_values())
    for other in (policy, resumed.policies[0]):
        assert other.publish(WeightRole.STUDENT).version == 3


def test_checksum_sees_every_bit_name_and_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    base = weights_checksum({"a": tensor})
    swapped = tensor.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    others = [
        {"b": tensor},
        {"a": swapped},
        {"a": tensor.double()},
        {"a": tensor.reshape(2, 3)},
        {"a": torch.nextafter(tensor, torch.tensor(9.0))},
    ]
    assert len({base, *map(weights_checksum, others)}) == 6
    assert weights_checksum({"a": tensor.clone()}) == base
    assert weights_checksum({"a": tensor.bfloat16()}) != base


def test_serving_another_role_puts_the_student_back(make_method: MakeMethod) -> None:
    method = make_method(ema_decay=0.5, keep_old_policy=True)
    method.managed_train_step({"prompts": PROMPTS, "seeds": [0, 0]}, 0)
    policy = method.policies[1]
    before = {name: p.detach().clone() for name, p in policy.parameters().items()}
    seen = {}
    for role in WeightRole:
        with policy.serving(role) as instance:
            seen[role] = {
                f"transformer.{n}": p.detach().clone()
                for n, p in instance.component("transformer").named_parameters()
            }
        assert policy.version == 1
        assert all(torch.equal(before[n], p) for n, p in policy.parameters().items())

    def distance(role: WeightRole, other: WeightRole) -> float:
        return max(float((seen[role][n] - seen[other][n]).abs().max()) for n in seen[role])

    assert distance(WeightRole.STUDENT, WeightRole.REFERENCE) > 0
    assert distance(WeightRole.OLD_POLICY, WeightRole.REFERENCE) == 0
    assert distance(WeightRole.EMA, WeightRole.REFERENCE) > 0
    assert distance(WeightRole.EMA, WeightRole.STUDENT) > 0


def test_a_role_that_is_not_kept_is_refused(make_method: MakeMethod) -> None:
    policy = make_method(beta=0.0).policies[0]
    for role in (WeightRole.EMA, WeightRole.OLD_POLICY, WeightRole.REFERENCE):
        with pytest.raises(UserError, match=f"keeps no {role} weights"):
            policy.publish(role)
