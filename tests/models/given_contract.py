"""What a family with given latents is held to, beside ``FamilyContract``: they never count."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch

from tests.models.case import TRAINED, FamilyCase, roll_out, stage_policy
from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import recompute
from workflow_rl.training.update import LargestLogRatio, StepStatistics, accumulate_gradients

KL_WEIGHT = 0.1


def _disturb(instance: ModelInstance, amount: float) -> None:
    """Add ``amount`` to the velocity that is predicted for given latents."""
    adapter: Any = instance.adapter
    predicted = adapter.velocity

    def velocity(component: str, latents: torch.Tensor, *rest: Any) -> torch.Tensor:
        result: torch.Tensor = predicted(component, latents, *rest)
        given = ~adapter.sampled_mask(rest[-1]).expand(result.shape)
        return torch.where(given, result + amount, result)

    adapter.velocity = velocity


def _moved(instance: ModelInstance) -> ModelInstance:
    """Move the weights a little: ratios are not 1, nor is the KL 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for component in instance.card.policies:
            for parameter in instance.component(component).parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    return instance


def _losses(
    policy: StagePolicy, record: BehaviourRecord
) -> tuple[StepStatistics, LargestLogRatio, list[torch.Tensor]]:
    """Return sums of loss, KL and ratio, the largest log-ratio, and the gradients."""
    gate, both = LargestLogRatio(), torch.tensor([True, True])
    advantages = torch.tensor([1.0, -1.0])
    sums = accumulate_gradients(policy, record, advantages, both, both, gate)
    gradients = [p.grad for p in policy.parameters().values() if p.grad is not None]
    assert gradients
    return sums, gate, gradients


class GivenLatentsContract:
    """The tests."""

    case: ClassVar[FamilyCase]

    def test_one_frame_would_be_the_given_image(self, instance: ModelInstance) -> None:
        """Nothing would be sampled, and a run would train on nothing."""
        fewest = instance.adapter.grid.frames + 1
        with pytest.raises(UserError, match=rf"cannot make 1 frame, .* give {fewest} or more"):
            instance.adapter.resolve(self.case.requests(num_frames=1)[0])
        assert instance.adapter.resolve(self.case.requests(num_frames=fewest)[0])

    @pytest.mark.parametrize("amount", [100.0, math.inf])
    def test_what_is_predicted_for_given_latents_changes_no_record(
        self, card: ModelCard, instance: ModelInstance, amount: float
    ) -> None:
        other = load_card(card)
        _disturb(other, amount)
        for recorded, disturbed in zip(
            roll_out(instance, self.case).steps, roll_out(other, self.case).steps, strict=True
        ):
            assert torch.equal(disturbed.sample, recorded.sample)
            assert torch.equal(disturbed.mean, recorded.mean)
            assert torch.equal(disturbed.sde_logprob, recorded.sde_logprob)

    def test_what_is_predicted_for_given_latents_changes_no_loss(
        self, card: ModelCard, instance: ModelInstance
    ) -> None:
        """Loss, KL, ratio and gradient, off-policy and with a reference."""
        record = roll_out(instance, self.case)
        found = []
        for amount in (0.0, 100.0):
            student, reference = _moved(load_card(card)), load_card(card)
            for model in (student, reference):
                _disturb(model, amount)
            policy = stage_policy(student, self.case, reference=reference, kl_weight=KL_WEIGHT)
            found.append(_losses(policy, record))
        (plain, gate, gradients), (sums, other_gate, others) = found
        assert plain.kl > 0
        assert gate.value > 0
        assert sums == plain
        assert other_gate == gate
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))

    def test_log_prob_and_kl_are_means_over_the_sampled_latents(
        self, card: ModelCard, instance: ModelInstance
    ) -> None:
        record = roll_out(instance, self.case, **TRAINED)
        assert record.mask is not None
        student = _moved(load_card(card))
        policy = stage_policy(student, self.case, reference=instance, kl_weight=KL_WEIGHT)
        expected = largest = 0.0
        with torch.no_grad():
            for recorded, now in recompute(student, record):
                sampled = record.mask.expand(now.mean.shape)
                for row in range(len(record)):
                    keep = sampled[row]
                    assert 0 < int(keep.sum()) < keep.numel()
                    error = (recorded.sample[row] - recorded.mean[row])[keep]
                    # CPS: minus the squared error, without constants.
                    torch.testing.assert_close(recorded.sde_logprob[row], -error.square().mean())
                    z = (now.mean[row] - recorded.mean[row])[keep] / recorded.std[row]
                    expected += float(z.square().mean() / 2)
                    ratio = (z * error / recorded.std[row] - z.square() / 2).mean()
                    largest = max(largest, abs(float(ratio)))
        sums, gate, _ = _losses(policy, record)
        assert gate.value == pytest.approx(largest, rel=1e-4)
        assert sums.kl == pytest.approx(expected, rel=1e-4)
