"""How every model family trains: held through ``FamilyContract``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from tests.models.case import (
    PROMPTS,
    STEPS,
    FamilyCase,
    module_weights,
    moved_components,
    roll_out,
    stage_policy,
    update,
)
from workflow_rl.card import ModelCard
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.sampler import gaussian_log_ratio
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.request import DiffusionParams, TaskType
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod, build_workflow_rl
from workflow_rl.training.rollout import recompute

SDE_KINDS = ("flow_sde", "cps", "dance_sde")


def embedded_chain(
    case: FamilyCase,
    card: ModelCard,
    *,
    lora: LoRAConfig | None = None,
    own: Mapping[str, Any] | None = None,
    partner: Mapping[str, Any] | None = None,
    **options: Any,
) -> WorkflowRLMethod:
    """Return a chain of ``card`` and the embedded model of the other task.

    ``own`` and ``partner`` are request fields of the two; ``lora`` is of both stages.
    """
    size = {"height": case.height, "width": case.width, "num_frames": case.num_frames}
    fields = DiffusionParams(**size | dict(own or {})), DiffusionParams(**partner or {})
    cards = card, build_wan_i2v_card()
    if case.task == TaskType.I2V:
        cards, fields = (build_flux_t2i_card(), card), fields[::-1]
    chosen: dict[str, Any] = {
        "reward": build_rewards([{"name": "frame_change"}]),
        "num_samples_per_prompt": 2,
        "num_videos_per_image": 2,
        "rollout_steps": 3,
        "beta": 0.01,
        "t2i_lr": 1e-4,
        "i2v_lr": 1e-4,
        "t2i_params": fields[0],
        "i2v_params": fields[1],
        "t2i_lora": lora,
        "i2v_lora": lora,
    }
    return build_workflow_rl(*cards, **chosen | options)


class TrainingContract:
    """The tests."""

    case: ClassVar[FamilyCase]

    def _log_ratios(self, instance: ModelInstance, kind: str, guidance: Mapping[str, Any]) -> float:
        """Return the largest |log-ratio| of a rollout, recomputed under the same weights."""
        record = roll_out(instance, self.case, sde_kind=kind, **guidance)
        assert len(record.steps) == STEPS - 1
        largest = 0.0
        for recorded, now in recompute(instance, record):
            ratio = gaussian_log_ratio(
                now.mean, recorded.mean, recorded.sample, recorded.std, mask=record.mask
            )
            assert ratio.isfinite().all()
            assert recorded.std.min() > 0
            largest = max(largest, float(ratio.detach().abs().max()))
        return largest

    @pytest.mark.parametrize("kind", SDE_KINDS)
    def test_c2_is_exact_in_float32(self, card: ModelCard, kind: str) -> None:
        """With gradient, as training recomputes it."""
        instance = load_card(card)
        for component in card.policies:
            instance.component(component).requires_grad_(True)
        for guidance in self.case.guidances:
            assert self._log_ratios(instance, kind, guidance) == 0.0

    def test_c2_in_bfloat16_is_what_the_index_of_families_says(self, card: ModelCard) -> None:
        """``docs/generate_families.py`` writes the case's figure there."""
        half = load_card(card, dtype=torch.bfloat16)
        for component in card.policies:
            half.component(component).requires_grad_(True)
        found = [self._log_ratios(half, kind, self.case.guidances[-1]) for kind in SDE_KINDS]
        assert max(found) == self.case.c2_bfloat16

    def test_a_training_step_moves_the_policies_alone(self, card: ModelCard) -> None:
        student = load_card(card)
        policy = stage_policy(student, self.case)
        record = roll_out(student, self.case)
        before = module_weights(student)
        assert update(policy, record).applied
        assert moved_components(before, student) == {step.component for step in record.steps}

    def test_a_chain_with_the_embedded_partner_trains(self, card: ModelCard) -> None:
        method = embedded_chain(self.case, card)
        before = [module_weights(policy.student) for policy in method.policies]
        losses, metrics = method.managed_train_step({"prompts": [PROMPTS[0]], "seeds": [0]}, 0)
        assert set(losses) >= {"t2i_pg_loss", "i2v_pg_loss"}
        assert metrics["grad_norm/t2i"] > 0
        assert metrics["grad_norm/i2v"] > 0
        for policy, weights in zip(method.policies, before, strict=True):
            moved = moved_components(weights, policy.student)
            assert moved
            assert moved <= set(policy.student.card.policies)
