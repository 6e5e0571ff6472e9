"""Laws of training LoRA adapters, on a chain of random tiny models and on the embedded pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.card import ModelCard
from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models.lora import attach_lora, lora_parameters
from workflow_rl.request import DiffusionParams, TaskType, make_request
from workflow_rl.rewards.composite import TreeScores
from workflow_rl.serving.chain import load_chain, publish_run
from workflow_rl.training.build import build_method
from workflow_rl.training.checkpoint import save_checkpoint
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod
from workflow_rl.training.rollout import recompute, rollout_loop
from workflow_rl.training.update import TrainsNothingError
from workflow_rl.training.weight_sync import WeightRole

MakeMethod = Callable[..., WorkflowRLMethod]
BATCH = {"prompts": PROMPTS, "seeds": [0, 1]}
LORA = LoRAConfig(rank=4)


@pytest.fixture
def make_lora_method(make_method: MakeMethod) -> MakeMethod:
    def make(**options: Any) -> WorkflowRLMethod:
        return make_method(**({"t2i_lora": LORA, "i2v_lora": LORA} | options))

    return make


def _weights(method: WorkflowRLMethod) -> dict[str, torch.Tensor]:
    return {
        f"{policy.name}.{component}.{name}": tensor.detach().clone()
        for policy in method.policies
        for component, module in policy.student.adapter.modules.items()
        for name, tensor in module.state_dict().items()
    }


def _image(instance: ModelInstance) -> torch.Tensor:
    request = make_request(TaskType.T2I, PROMPTS[0], params=DiffusionParams(2))
    return rollout_loop(instance, "denoise", request, profile=ExecutionProfile.SERVE)[0]


def test_a_step_moves_the_adapters_alone(make_lora_method: MakeMethod) -> None:
    """B moves in the first step; its gradient is A's only once B is not 0."""
    method = make_lora_method()
    assert [policy.reference for policy in method.policies] == [None, None]
    before = _weights(method)
    _, metrics = method.managed_train_step(BATCH, 0)
    after = _weights(method)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".lora_B." in name}
    for stage in ("t2i", "i2v"):
        assert metrics[f"c2_max_log_ratio/{stage}"] == 0.0
        assert metrics[f"kl/{stage}"] == 0.0
        assert metrics[f"grad_norm/{stage}"] > 0
        assert metrics[f"{stage}_weights_version"] == 1
    _, metrics = method.managed_train_step(BATCH, 1)
    for stage in ("t2i", "i2v"):
        assert metrics[f"c2_max_log_ratio/{stage}"] == 0.0
        assert metrics[f"kl/{stage}"] > 0
        assert metrics[f"{stage}_weights_version"] == 2
    later = _weights(method)
    moved = {name for name in before if not torch.equal(before[name], later[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert all(".lora_" in name for name in method.state_tensors())
    assert [policy.student.version_of("text_encoder") for policy in method.policies] == [0, 0]


def test_the_reference_is_the_base_model(
    make_lora_method: MakeMethod, cards: tuple[ModelCard, ModelCard]
) -> None:
    method = make_lora_method()
    method.managed_train_step(BATCH, 0)
    policy = method.policies[0]
    assert method.last is not None
    record = method.last.outputs[0].record
    assert record is not None

    def means(instance: ModelInstance) -> list[torch.Tensor]:
        with torch.no_grad():
            return [now.mean for _, now in recompute(instance, record)]

    trained = means(policy.student)
    with policy.as_reference() as reference:
        assert reference is policy.student
        off = means(reference)
    base = means(load_card(cards[0]))
    assert all(torch.equal(a, b) for a, b in zip(off, base, strict=True))
    assert not torch.equal(trained[0], base[0])
    assert all(torch.equal(a, b) for a, b in zip(means(policy.student), trained, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_equal_to_the_bit(
    make_lora_method: MakeMethod, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "ema_decay": 0.9, "c2_tolerance": 1e-2}
    method = make_lora_method(**options)
    method.managed_train_step(BATCH, 0)
    tensors = {name: tensor.clone() for name, tensor in method.state_tensors().items()}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    resumed = make_lora_method(**options, lora_seed=7)
    resumed.load_state(tensors, method.state_values())
    expected = method.managed_train_step(BATCH, 1)[1]
    assert torch.isfinite(torch.tensor(expected["reward_mean"]))
    assert resumed.managed_train_step(BATCH, 1)[1] == expected
    ours, theirs = resumed.state_tensors(), method.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(bool(tensor.isfinite().all()) for tensor in theirs.values())


def test_every_role_is_served_and_put_back(
    make_lora_method: MakeMethod, cards: tuple[ModelCard, ModelCard]
) -> None:
    method = make_lora_method(ema_decay=0.9, keep_old_policy=True)
    base = _image(load_card(cards[0]))
    method.managed_train_step(BATCH, 0)
    policy = method.policies[0]
    student, version = _image(policy.student), policy.version
    images = {}
    for role in (WeightRole.EMA, WeightRole.OLD_POLICY, WeightRole.REFERENCE):
        weights = policy.weights(role)["transformer"]
        assert weights.keys() == lora_parameters(policy.student.component("transformer")).keys()
        with policy.serving(role) as instance:
            images[role] = _image(instance)
        assert torch.equal(_image(policy.student), student)
        assert policy.version == version
    assert torch.equal(images[WeightRole.REFERENCE], base)
    assert torch.equal(images[WeightRole.OLD_POLICY], base)
    assert not torch.equal(images[WeightRole.EMA], base)
    assert not torch.equal(images[WeightRole.EMA], student)


def test_publishing_into_another_instance(
    make_lora_method: MakeMethod, cards: tuple[ModelCard, ModelCard]
) -> None:
    method = make_lora_method()
    method.managed_train_step(BATCH, 0)
    policy = method.policies[0]
    target = load_card(cards[0])
    with pytest.raises(WorkflowRLError, match="which the target lacks"):
        policy.publish(WeightRole.STUDENT, target)
    attach_lora(target, LORA, seed=7)
    publication = policy.publish(WeightRole.STUDENT, target)
    assert publication.num_tensors == len(policy.parameters())
    assert target.version_of("transformer") == 1
    assert torch.equal(_image(target), _image(policy.student))


def test_a_lora_without_effect_fails_at_the_first_update(make_lora_method: MakeMethod) -> None:
    method = make_lora_method(train_t2i=False, t2i_lora=None)
    layers: list[Any] = list(method.policies[1].student.component("transformer").modules())
    for layer in layers:
        if hasattr(layer, "scaling"):
            layer.scaling["default"] = 0.0
    with pytest.raises(TrainsNothingError, match=r"'i2v'.* transformer a gradient of 0.*lora\.tar"):
        method.managed_train_step(BATCH, 0)


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_step_that_moves_nothing_fails_at_the_first_update(
    make_method: MakeMethod, lora: LoRAConfig | None
) -> None:
    with pytest.raises(TrainsNothingError, match=r"changed no weight .*raise optimizer\.lr"):
        make_method(t2i_lora=lora, t2i_lr=1e-50).managed_train_step(BATCH, 0)


def test_an_update_too_small_to_change_the_output_fails(make_lora_method: MakeMethod) -> None:
    """B goes from 0 to 1e-30: a weight has changed, but what it adds rounds to nothing."""
    with pytest.raises(TrainsNothingError, match=r"'t2i'.* not the output .*raise optimizer\.lr"):
        make_lora_method(t2i_lr=1e-30).managed_train_step(BATCH, 0)


def test_a_constant_reward_only_delays_the_check(
    make_lora_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make_lora_method(t2i_lr=1e-50)
    score = method.reward.score_tree

    def flat(*arguments: Any) -> TreeScores:
        scores = score(*arguments)
        for values in (scores.total, *scores.components.values()):
            values.fill_(0.5)
        return scores

    monkeypatch.setattr(method.reward, "score_tree", flat)
    method.managed_train_step(BATCH, 0)
    monkeypatch.undo()
    with pytest.raises(TrainsNothingError):
        method.managed_train_step(BATCH, 1)


def _config(folder: Path, models: dict[str, Path | None], **lora: Any) -> RunConfig:
    common = {
        "samples": 2,
        "num_inference_steps": 3,
        "sde": {"kind": "cps"},
        "lora": {"rank": 4, **lora},
        "optimizer": {"lr": 1e-3},
    }
    stages = {
        name: {"task": name, "model": model, **common, **({"num_frames": 5} if model else {})}
        for name, model in models.items()
    }
    if models["t2i"] is not None:
        del stages["t2i"]["num_frames"]
    return RunConfig.model_validate(
        {
            "output_dir": folder / "run",
            "stages": stages,
            "data": {"prompts": folder / "prompts.txt"},
            "rewards": [{"name": "frame_change"}],
            "training": {"device": "cpu"},
        }
    )


def test_a_run_is_served_with_its_adapters(
    tmp_path: Path, cards: tuple[ModelCard, ModelCard]
) -> None:
    config = _config(tmp_path, {"t2i": cards[0].source, "i2v": cards[1].source})
    method = build_method(config)
    method.managed_train_step(BATCH, 0)
    assert all(policy.reference is None for policy in method.policies)
    save_checkpoint(
        tmp_path / "run" / "checkpoints", 1, method.state_tensors(), method.state_values(), keep=1
    )
    chain = load_chain(config.workflow, config.stages, "cpu")
    publish_run(chain, tmp_path / "run", WeightRole.STUDENT, on_skip=print)
    assert torch.equal(_image(chain.instances["t2i"]), _image(method.policies[0].student))


def test_a_lora_that_does_not_fit_stops_before_loading(
    tmp_path: Path, cards: tuple[ModelCard, ModelCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    from workflow_rl.config.model_folder import check_model_folder

    stage = StageConfig(task="t2i", lora=LoRAConfig(targets=("to_x",)))
    with pytest.raises(UserError, match=r"stages\.t2i\.lora\.targets: 'to_x' names no linear"):
        check_model_folder(cards[0].source, "stages.t2i.model", stage)


@pytest.mark.slow
def test_the_embedded_pair(tmp_path: Path) -> None:
    method = build_method(_config(tmp_path, {"t2i": None, "i2v": None}, targets="all-linear"))
    before = [dict(p.student.component("transformer").state_dict()) for p in method.policies]
    before = [{name: t.clone() for name, t in weights.items()} for weights in before]
    _, metrics = method.managed_train_step(BATCH, 0)
    for policy, weights in zip(method.policies, before, strict=True):
        assert metrics[f"c2_max_log_ratio/{policy.name}"] == 0.0
        for name, tensor in policy.student.component("transformer").state_dict().items():
            assert torch.equal(tensor, weights[name]) == (".lora_B." not in name), name
