"""Laws of the training method, on a chain of random tiny models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.request import DiffusionParams
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import RewardTerm, build_rewards
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod, build_workflow_rl
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.update import C2Error
from workflow_rl.workflow import StageOutput

BATCH = {"prompts": PROMPTS, "seeds": [0, 1]}
MakeMethod = Callable[..., WorkflowRLMethod]


def _weights(method: WorkflowRLMethod) -> dict[str, torch.Tensor]:
    return {
        f"{policy.name}.{component}.{name}": tensor.detach().clone()
        for policy in method.policies
        for component, module in policy.student.adapter.modules.items()
        for name, tensor in module.state_dict().items()
    }


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    """Return ``stage.component`` of everything that changed."""
    return {
        ".".join(name.split(".")[:2])
        for name in before
        if not torch.equal(before[name], after[name])
    }


class _Scripted:
    """A reward whose scores are given, call by call."""

    name = "scripted"
    media_kind = "video"

    def __init__(self, scores: list[float]) -> None:
        self.scores = torch.tensor(scores)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        failures = {i: "not finite" for i, s in enumerate(self.scores.tolist()) if math.isnan(s)}
        return RewardScores(self.scores[: len(batch)], failures)


def _scripted(scores: list[float]) -> CompositeReward:
    return CompositeReward([RewardTerm(_Scripted(scores))])


def test_one_step_trains_both_transformers_and_nothing_else(make_method: MakeMethod) -> None:
    method = make_method()
    before = _weights(method)
    losses, metrics = method.managed_train_step(BATCH, 0)
    assert _moved(before, _weights(method)) == {"t2i.transformer", "i2v.transformer"}
    assert set(losses) == {"t2i_pg_loss", "i2v_pg_loss"}
    assert all(torch.isfinite(loss) for loss in losses.values())
    for stage in ("t2i", "i2v"):
        assert metrics[f"c2_max_log_ratio/{stage}"] == 0.0
        assert metrics[f"grad_norm/{stage}"] > 0
        assert metrics[f"{stage}_weights_version"] == 1
        assert metrics[f"ratio_min/{stage}"] == metrics[f"ratio_max/{stage}"] == 1.0
        assert metrics[f"kl/{stage}"] == 0.0
    assert metrics["ppo_ratio_mean"] == 1.0
    assert 0 < metrics["reward_mean"] < 1
    _, metrics = method.managed_train_step(BATCH, 1)
    assert metrics["kl/t2i"] > 0
    assert metrics["t2i_weights_version"] == 2
    assert metrics["c2_max_log_ratio/i2v"] == 0.0


def test_targets_of_gradient_clipping(make_method: MakeMethod) -> None:
    method = make_method()
    targets = method.get_grad_clip_targets()
    assert list(targets) == ["t2i.transformer", "i2v.transformer"]
    assert targets["i2v.transformer"] is method.policies[1].student.component("transformer")
    frozen = make_method(train_t2i=False, credit="shared")
    assert list(frozen.get_grad_clip_targets()) == ["i2v.transformer"]


@pytest.mark.parametrize("credit", ["shared", "nested"])
def test_a_constant_reward_moves_not_one_bit(make_method: MakeMethod, credit: str) -> None:
    reward = build_rewards([{"name": "constant", "args": {"value": 0.1}}])
    method = make_method(reward=reward, credit=credit)
    before = _weights(method)
    for iteration in range(2):
        _, metrics = method.managed_train_step(BATCH, iteration)
    assert _moved(before, _weights(method)) == set()
    assert metrics["t2i_weights_version"] == 0
    assert metrics["c2_max_log_ratio/t2i"] == 0.0
    assert metrics["reward_std"] == 0.0


def test_a_frozen_stage_stays(make_method: MakeMethod) -> None:
    method = make_method(train_t2i=False)
    before = _weights(method)
    losses, _ = method.managed_train_step(BATCH, 0)
    assert _moved(before, _weights(method)) == {"i2v.transformer"}
    assert set(losses) == {"i2v_pg_loss"}


def test_the_same_step_twice_is_the_same_to_the_bit(make_method: MakeMethod) -> None:
    results = []
    for _ in range(2):
        method = make_method()
        results.append((method.managed_train_step(BATCH, 3)[1], _weights(method)))
    assert results[0][0] == results[1][0]
    assert _moved(results[0][1], results[1][1]) == set()


def _capture_gradients(policy: StagePolicy, captured: dict[str, torch.Tensor]) -> None:
    """Copy the stage's gradients into ``captured`` just before its optimiser step."""

    def hook(*_: object) -> None:
        for name, parameter in policy.parameters().items():
            assert parameter.grad is not None
            captured[f"{policy.name}.{name}"] = parameter.grad.clone()

    assert policy.optimizer is not None
    policy.optimizer.register_step_pre_hook(hook)


def test_the_update_does_not_depend_on_the_micro_batch(make_method: MakeMethod) -> None:
    gradients = []
    for size in (8, 4, 3, 1):
        method = make_method(micro_batch_size=size, c2_tolerance=1e-4, rollout_batch_size=8)
        captured: dict[str, torch.Tensor] = {}
        for policy in method.policies:
            _capture_gradients(policy, captured)
        method.managed_train_step(BATCH, 0)
        gradients.append(captured)
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)


def test_better_samples_become_likelier(make_method: MakeMethod) -> None:
    """After a step on video 0 good, video 1 bad, the ratio of the good one has risen."""
    method = make_method(
        reward=_scripted([1.0, 0.0] * 4), beta=0.0, updates_per_iteration=2, ppo_clip=0.5
    )
    _, metrics = method.managed_train_step(BATCH, 0)
    assert metrics["ratio_max/i2v"] > 1.0 > metrics["ratio_min/i2v"]
    assert metrics["loss/i2v"] < 0


def test_failed_samples_take_part_in_nothing(make_method: MakeMethod) -> None:
    nan = math.nan
    method = make_method(reward=_scripted([nan, nan, nan, 1.0, nan, nan, nan, nan]))
    before = _weights(method)
    _, metrics = method.managed_train_step(BATCH, 0)
    assert metrics["reward_failed"] == 7
    assert metrics["reward_mean"] == 1.0
    assert _moved(before, _weights(method)) == set()


def _poison(output: StageOutput, row: int) -> StageOutput:
    """Return an output in which everything that belongs to ``row`` is NaN."""
    assert output.record is not None

    def spoilt(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        values[row] = math.nan
        return values

    steps = tuple(
        replace(s, prev=spoilt(s.prev), sample=spoilt(s.sample), mean=spoilt(s.mean))
        for s in output.record.steps
    )
    conditioning = list(output.record.conditioning)
    conditioning[row] = {n: torch.full_like(t, math.nan) for n, t in conditioning[row].items()}
    record = replace(output.record, steps=steps, conditioning=tuple(conditioning))
    return replace(output, media=spoilt(output.media), record=record)


def test_a_sample_that_is_not_finite_fails_alone(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' gradients are those of a run in which its reward failed, to the bit."""
    scores = [0.1, 0.4, 0.3, 0.2, 0.9, 0.5, 0.7, 0.6]
    runs = []
    for poisoned in (False, True):
        failed = [] if poisoned else [2, 6, 7]
        method = make_method(
            reward=_scripted([math.nan if i in failed else s for i, s in enumerate(scores)])
        )
        gradients: dict[str, torch.Tensor] = {}
        for policy in method.policies:
            _capture_gradients(policy, gradients)
        if poisoned:
            rollout = method._rollout

            def spoilt_rollout(*args: Any, rollout: Any = rollout) -> list[StageOutput]:
                image, video = rollout(*args)
                return [_poison(image, 3), _poison(video, 2)]

            monkeypatch.setattr(method, "_rollout", spoilt_rollout)
        _, metrics = method.managed_train_step(BATCH, 0)
        runs.append((gradients, metrics))
    assert method.last is not None
    assert method.last.scores.failures == {
        2: "stage i2v: not finite",
        6: "stage t2i: not finite",
        7: "stage t2i: not finite",
    }
    (expected, expected_metrics), (found, found_metrics) = runs
    assert found_metrics["reward_failed"] == 3
    assert found_metrics["c2_max_log_ratio/i2v"] == 0.0
    assert found_metrics["loss/t2i"] == expected_metrics["loss/t2i"]
    assert found.keys() == expected.keys()
    assert any(bool(gradient.any()) for gradient in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rollout_of_nothing_finite_moves_nothing(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make_method()
    rollout = method._rollout

    def spoilt_rollout(*args: Any) -> list[StageOutput]:
        image, video = rollout(*args)
        for row in range(4):
            image = _poison(image, row)
        return [image, video]

    monkeypatch.setattr(method, "_rollout", spoilt_rollout)
    before = _weights(method)
    _, metrics = method.managed_train_step(BATCH, 0)
    assert metrics["reward_failed"] == 8
    assert _moved(before, _weights(method)) == set()


def test_every_iteration_has_the_same_metrics(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no group has credit the row says so, and the reference is not asked."""
    active = make_method().managed_train_step(BATCH, 0)[1]
    method = make_method(reward=_scripted([0.5] * 8))
    for policy in method.policies:
        assert policy.reference is not None
        monkeypatch.setattr(policy.reference.adapter, "velocity", pytest.fail)
    flat = method.managed_train_step(BATCH, 0)[1]
    assert set(flat) >= {name for name in active if "frame_change" not in name}
    for stage in ("t2i", "i2v"):
        assert [flat[f"{n}/{stage}"] for n in ("loss", "clip_fraction", "grad_norm")] == [0] * 3
        assert math.isnan(flat[f"kl/{stage}"]), "nothing measured it"
        assert [flat[f"ratio_{n}/{stage}"] for n in ("min", "mean", "max")] == [1.0] * 3


def test_another_micro_batch_is_exact_or_named(make_method: MakeMethod) -> None:
    """With c2_tolerance 0 a recomputation that is not equal to the bit stops with the mend."""
    method = make_method(micro_batch_size=1, rollout_batch_size=8, c2_tolerance=0.0)
    try:
        _, metrics = method.managed_train_step(BATCH, 0)
    except C2Error as error:
        assert "micro_batch_size: null" in str(error)  # noqa: PT017  either outcome is lawful
    else:
        assert metrics["c2_max_log_ratio/t2i"] == metrics["c2_max_log_ratio/i2v"] == 0.0


def test_non_finite_gradients_skip_the_update_and_end_the_run(make_method: MakeMethod) -> None:
    method = make_method(max_skipped_updates=2)
    for policy in method.policies:
        for parameter in policy.parameters().values():
            parameter.register_hook(lambda grad: torch.full_like(grad, math.nan))
    before = _weights(method)
    _, metrics = method.managed_train_step(BATCH, 0)
    assert metrics["skipped_updates/t2i"] == metrics["skipped_updates_total/t2i"] == 1
    assert method.state_values()["t2i"]["skipped_total"] == 1
    assert _moved(before, _weights(method)) == set()
    with pytest.raises(WorkflowRLError, match="2 updates in a row were not finite; lower"):
        method.managed_train_step(BATCH, 1)


def test_the_c2_gate_names_stage_step_and_sample(
    make_method: MakeMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that change between rollout and training are caught before any update."""
    method = make_method()
    score = method.reward.score_tree

    def score_and_disturb(*arguments: object) -> object:
        with torch.no_grad():
            for parameter in method.policies[0].parameters().values():
                parameter.add_(1e-3)
        return score(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(method.reward, "score_tree", score_and_disturb)
    with pytest.raises(C2Error, match=r"stage 't2i', step \d, sample 'a .*differs"):
        method.managed_train_step(BATCH, 0)


def test_state_round_trip_continues_to_the_bit(make_method: MakeMethod) -> None:
    method = make_method(ema_decay=0.9)
    method.managed_train_step(BATCH, 0)
    tensors = {name: tensor.clone() for name, tensor in method.state_tensors().items()}
    values = method.state_values()
    _, expected = method.managed_train_step(BATCH, 1)
    resumed = make_method(ema_decay=0.9)
    resumed.load_state(tensors, values)
    _, metrics = resumed.managed_train_step(BATCH, 1)
    assert metrics == expected
    ours, theirs = resumed.state_tensors(), method.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_constructor_alone_runs(cards: tuple[ModelCard, ModelCard]) -> None:
    """With nothing but two cards: one video per image, so credit is shared."""
    method = build_workflow_rl(*cards, num_samples_per_prompt=2, rollout_steps=2)
    assert method.settings.credit_rule == "shared"
    with pytest.raises(UserError, match="give a t2i and an i2v model"):
        build_workflow_rl(cards[0], cards[0])
    frozen = build_workflow_rl(*cards, train_t2i=False, num_samples_per_prompt=2)
    assert [policy.reference is None for policy in frozen.policies] == [True, False]
    with pytest.raises(UserError, match="needs a t2i model"):
        build_workflow_rl(cards[1], cards[0])


def test_two_folders_of_one_name(cards: tuple[ModelCard, ModelCard]) -> None:
    named = [replace(card, model_id="model") for card in cards]
    method = build_workflow_rl(*named, beta=0.0, num_samples_per_prompt=2)
    assert [policy.student.card.model_id for policy in method.policies] == ["model", "model"]


def test_parameters_of_a_stage_leave_the_sde_to_its_arguments(make_method: MakeMethod) -> None:
    given = DiffusionParams(num_inference_steps=9, sde_kind="dance_sde", height=32, width=32)
    method = make_method(t2i_params=given, rollout_steps=4, sde_noise_scale=0.5, beta=0.0)
    for policy in method.policies:
        params = policy.settings.plan.params
        found = (params.num_inference_steps, params.sde_kind, params.sde_noise_scale)
        assert found == (4, "cps", 0.5)
    assert method.policies[0].settings.plan.params.height == 32


def test_nested_credit_needs_two_videos(make_method: MakeMethod) -> None:
    with pytest.raises(UserError, match="nested"):
        make_method(credit="nested", num_videos_per_image=1)


def test_nested_credit_needs_two_images_where_the_image_model_trains(
    make_method: MakeMethod,
) -> None:
    with pytest.raises(UserError, match="stage 't2i' makes 1 sample per prompt, which nested"):
        make_method(credit="nested", num_samples_per_prompt=1)
    make_method(credit="nested", num_samples_per_prompt=1, train_t2i=False)


def test_only_the_named_modules_train(make_method: MakeMethod) -> None:
    policy = make_method(beta=0.0).policies[0]
    parts = ("context_embedder", "transformer_blocks.0.attn")
    narrowed = StagePolicy(replace(policy.settings, train_modules=parts), policy.student, None)
    prefixes = tuple(f"transformer.{part}." for part in parts)
    expected = {name for name in policy.parameters() if name.startswith(prefixes)}
    assert set(narrowed.parameters()) == expected
    assert 0 < len(expected) < len(policy.parameters())
    with pytest.raises(UserError, match=r"names 'blocks\.0', which is no part of the model"):
        StagePolicy(replace(policy.settings, train_modules=("blocks.0",)), policy.student, None)
