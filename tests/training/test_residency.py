"""Stage swapping: everything moves, nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.conftest import PROMPTS
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.enums import ExecutionProfile
from workflow_rl.request import DiffusionParams, TaskType, make_request
from workflow_rl.training import residency
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.residency import StageSwap, send_to_sleep
from workflow_rl.training.rollout import rollout_loop

MakeMethod = Callable[..., WorkflowRLMethod]
BATCH = {"prompts": PROMPTS, "seeds": [0, 1]}
LORA = LoRAConfig(rank=4)
TRAINS: dict[str, dict[str, Any]] = {
    "weights in bfloat16": {"dtype": torch.bfloat16, "c2_tolerance": 1e-2},
    "LoRA": {"t2i_lora": LORA, "i2v_lora": LORA},
}


def _held(policy: StagePolicy) -> dict[str, torch.Tensor]:
    """Return every tensor of a stage that takes memory, found without `residency`."""
    held: dict[str, torch.Tensor] = {}
    for role, instance in (("student", policy.student), ("reference", policy.reference)):
        for component, module in {} if instance is None else instance.adapter.modules.items():
            held |= {f"{role}.{component}.{n}": t for n, t in module.named_parameters()}
            held |= {f"{role}.{component}.{n}": t for n, t in module.named_buffers()}
    held |= {f"master.{name}": tensor for name, tensor in policy.masters.items()}
    held |= {f"ema.{n}": t for n, t in (policy.ema.average if policy.ema else {}).items()}
    held |= {f"old.{name}": tensor for name, tensor in (policy.old_policy or {}).items()}
    for index, state in enumerate(policy.optimizer.state.values() if policy.optimizer else ()):
        held |= {f"{key}.{index}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return held


@pytest.mark.parametrize("trains", TRAINS)
def test_everything_that_a_stage_holds_moves_and_keeps_its_bits(
    make_method: MakeMethod, trains: str
) -> None:
    """Another storage with the same bits, in the same tensor objects."""
    method = make_method(ema_decay=0.9, keep_old_policy=True, **TRAINS[trains])
    method.managed_train_step(BATCH, 0)
    policy = method.policies[0]
    held = {name: tensor for name, tensor in _held(policy).items() if tensor.numel()}
    bits = {name: tensor.detach().clone() for name, tensor in held.items()}
    storages = {name: tensor.data_ptr() for name, tensor in held.items()}
    assert any(name.startswith("exp_avg") for name in held)
    send_to_sleep(policy)
    for name, tensor in _held(policy).items():
        if not tensor.numel():
            continue
        assert tensor is held[name], name
        assert torch.equal(tensor, bits[name]), name
        assert tensor.data_ptr() != storages[name], name


def test_an_output_after_waking_is_equal_to_the_bit(make_method: MakeMethod) -> None:
    method = make_method()
    request = make_request(TaskType.T2I, PROMPTS[0], params=DiffusionParams(2))

    def image() -> torch.Tensor:
        student = method.policies[0].student
        return rollout_loop(student, "denoise", request, profile=ExecutionProfile.SERVE)[0]

    before = image()
    swap = StageSwap(method.policies)
    for name in ("i2v", "t2i"):
        swap.wake(name)
        assert swap.awake == name
    assert torch.equal(image(), before)


@pytest.mark.parametrize("trains", TRAINS)
def test_training_with_swapped_stages_is_the_same_to_the_bit(
    make_method: MakeMethod, trains: str
) -> None:
    methods = [
        make_method(ema_decay=0.9, swap_stages=swap, **TRAINS[trains]) for swap in (False, True)
    ]
    for iteration in range(2):
        plain, swapped = (m.managed_train_step(BATCH, iteration)[1] for m in methods)
        assert plain == swapped
    ours, theirs = (method.state_tensors() for method in methods)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_one_stage_is_awake_at_a_time_and_only_while_it_works(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waking device of a stage has a name of its own here, so that moves can be told apart."""
    method = make_method(swap_stages=True)
    awake: set[str] = set()
    worked: list[str] = []
    move = residency._move

    def watched_move(policy: StagePolicy, device: torch.device) -> None:
        (awake.add if device.index == 0 else awake.discard)(policy.name)
        assert len(awake) <= 1
        move(policy, torch.device("cpu"))

    monkeypatch.setattr(residency, "_move", watched_move)
    for policy in method.policies:
        object.__setattr__(policy.student.platform, "device", torch.device("cpu", 0))

        def works(*_: Any, name: str = policy.name) -> None:
            assert awake == {name}
            worked.append(name)

        modules: list[nn.Module] = [*policy.student.adapter.modules.values()]
        if policy.reference is not None:
            modules.append(policy.reference.component("transformer"))
        for module in modules:
            module.register_forward_pre_hook(works)
    method.managed_train_step(BATCH, 0)
    order = [name for index, name in enumerate(worked) if index == 0 or worked[index - 1] != name]
    assert order == ["t2i", "i2v", "t2i", "i2v"], "rollout of both, then training of both"
