"""Wan 2.2 I2V-A14B: two experts, each a policy of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline

from tests.models.contract import FamilyCase, FamilyContract
from tests.models.lora_contract import LoRAContract
from tests.models.test_wan import FRAMES, stock_wan
from tests.tiny_models.wan import save_wan, uni_pc
from workflow_rl.card import ModelCard
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.schedule import flow_match_sigmas
from workflow_rl.loop.window import SDEWindow
from workflow_rl.models import build_card, build_flux_t2i_card
from workflow_rl.models.memory import checkpoint_gradients
from workflow_rl.request import DiffusionParams, TaskType
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training import residency
from workflow_rl.training.checkpoint import load_checkpoint, save_checkpoint
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod, build_workflow_rl
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.weight_sync import WeightRole

EXPERTS = ("transformer", "transformer_2")


class TestWanA14B(FamilyContract, LoRAContract):
    """Euler steps at 1000, 857, 602 and 9 of 1000, UniPC's at 999, 900, 750 and 500."""

    case = FamilyCase(
        name="wan-2.2-a14b",
        task="i2v",
        save=partial(save_wan, image_encoder=False, scheduler=uni_pc(), boundary_ratio=0.9),
        pipeline_class=WanImageToVideoPipeline,
        stock=stock_wan,
        num_frames=FRAMES,
        guidances=(
            {},
            {"guidance_scale": 3.0},
            {"guidance_scale": 2.0, "guidance_scale_2": 3.5, "negative_prompt": "a cat"},
        ),
        euler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    lora_layers = 20

    def test_both_experts_are_policies(self, card: ModelCard) -> None:
        assert card.policies == EXPERTS

    @pytest.mark.parametrize(
        ("timestep", "expert"), [(1000.0, 0), (900.0, 0), (899.9, 1), (0.0, 1)]
    )
    def test_the_first_expert_works_down_to_the_boundary(
        self, instance: ModelInstance, timestep: float, expert: int
    ) -> None:
        assert instance.adapter.policy_at(timestep, DiffusionParams()) == EXPERTS[expert]

    @pytest.mark.parametrize(
        ("shift", "steps", "uni_pc_steps", "euler_steps"),
        [(3.0, 10, 3, 3), (3.0, 40, 11, 10), (5.0, 10, 4, 4), (5.0, 40, 15, 14)],
    )
    def test_the_first_experts_share_of_the_published_schedules(
        self,
        instance: ModelInstance,
        shift: float,
        steps: int,
        uni_pc_steps: int,
        euler_steps: int,
    ) -> None:
        scheduler = uni_pc(shift)
        scheduler.set_timesteps(steps)
        euler = flow_match_sigmas(steps, shift=shift)[:-1] * 1000
        for timesteps, expected in ((scheduler.timesteps, uni_pc_steps), (euler, euler_steps)):
            experts = [instance.adapter.policy_at(t, DiffusionParams()) for t in timesteps.tolist()]
            assert experts.count(EXPERTS[0]) == expected
            assert experts[:expected] == [EXPERTS[0]] * expected


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("experts") / "wan"
    save_wan(folder, image_encoder=False, boundary_ratio=0.9)
    return build_card(folder, TaskType.I2V)


def _method(card: ModelCard, *, swap_stages: bool = False) -> WorkflowRLMethod:
    """Of three steps at 1000, 751 and 9, iteration 0 trains on the first, 1 on the second."""
    return build_workflow_rl(
        build_flux_t2i_card(),
        card,
        reward=build_rewards([{"name": "frame_change"}]),
        num_samples_per_prompt=1,
        num_videos_per_image=3,
        credit="shared",
        normalisation="batch",
        rollout_steps=3,
        sde_window=SDEWindow("sliding", size=1),
        i2v_lr=1e-3,
        beta=0.0,
        ema_decay=0.5,
        train_t2i=False,
        swap_stages=swap_stages,
        i2v_params=DiffusionParams(num_frames=FRAMES),
    )


def _train(method: WorkflowRLMethod, iteration: int) -> set[str]:
    """Train for one iteration; return the experts whose weights moved."""
    before = {name: tensor.clone() for name, tensor in method.state_tensors().items()}
    method.managed_train_step({"prompts": ["a red circle"], "seeds": [0]}, iteration)
    return {
        expert
        for expert in EXPERTS
        if any(
            not torch.equal(tensor, method.state_tensors()[name])
            for name, tensor in before.items()
            if name.startswith(f"i2v/weights/{expert}.")
        )
    }


def test_a_checkpoint_between_the_experts_resumes_to_the_bit(
    card: ModelCard, tmp_path: Path
) -> None:
    """One expert has been stepped when it is written, the other has not."""
    method = _method(card)
    assert _train(method, 0) == {"transformer"}
    path = save_checkpoint(tmp_path, 0, method.state_tensors(), method.state_values(), keep=1)
    assert _train(method, 1) == {"transformer_2"}
    _, tensors, values = load_checkpoint(path)
    again = _method(card)
    again.load_state(tensors, values)
    assert _train(again, 1) == {"transformer_2"}
    assert again.state_values() == method.state_values()
    ours, theirs = again.state_tensors(), method.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for expert in EXPERTS:
        for kind in ("weights", "ema", "optim"):
            assert any(name.startswith(f"i2v/{kind}/{expert}.") for name in ours)


def test_a_publication_carries_both_experts(card: ModelCard) -> None:
    method = _method(card)
    for iteration in range(2):
        _train(method, iteration)
    policy = method.policies[1]
    target = load_card(card)
    publication = policy.publish(WeightRole.STUDENT, target)
    assert publication.components == EXPERTS
    for expert in EXPERTS:
        assert target.version_of(expert) == publication.version
        assert policy.student.version_of(expert) == policy.version
        sent = policy.student.component(expert).state_dict()
        received = target.component(expert).state_dict()
        assert all(torch.equal(tensor, received[name]) for name, tensor in sent.items())


def test_swapped_experts_resume_to_the_bits_of_a_run_that_never_slept(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpointed gradients; both experts and their masters move whenever a stage does."""
    moved: list[tuple[str, set[str]]] = []
    move = residency._move

    def watched_move(policy: StagePolicy, device: torch.device) -> None:
        held = [*policy.student.adapter.modules.items()]
        before = {n: next(m.parameters()).data_ptr() for n, m in held}
        move(policy, device)
        after = {n: next(m.parameters()).data_ptr() for n, m in held}
        moved.append((policy.name, {n for n in before if before[n] != after[n]}))

    monkeypatch.setattr(residency, "_move", watched_move)
    method, swapped = (_method(card, swap_stages=swaps) for swaps in (False, True))
    for each in (method, swapped):
        checkpoint_gradients(each.policies[1].student)
        assert _train(each, 0) == {"transformer"}
    values = swapped.state_values()
    path = save_checkpoint(tmp_path, 0, swapped.state_tensors(), values, keep=1)
    _, tensors, values = load_checkpoint(path)
    again = _method(card, swap_stages=True)
    checkpoint_gradients(again.policies[1].student)
    again.load_state(tensors, values)
    for each in (method, again):
        assert _train(each, 1) == {"transformer_2"}
    ours, theirs = again.state_tensors(), method.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [name for name, _ in moved].count("i2v") == 4, "two runs, each to sleep and awake"
    assert all(parts >= set(EXPERTS) for name, parts in moved if name == "i2v")
