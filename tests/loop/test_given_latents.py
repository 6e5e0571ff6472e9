"""Latents that are given, not sampled: no noise, no change, no part in log-prob and KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from tests.fake_models import GivenAdapter, fake_instance
from workflow_rl.enums import ExecutionProfile
from workflow_rl.loop.record import BehaviourRecord, concat_records
from workflow_rl.loop.sampler import flow_sde_step_with_logprob, gaussian_log_ratio
from workflow_rl.request import Request, SampleId, TaskType, make_request
from workflow_rl.training.objective import gaussian_kl
from workflow_rl.training.rollout import recompute, rollout_loop

KINDS = ("flow_sde", "cps", "dance_sde")


def _requests(**fields: Any) -> list[Request]:
    options: dict[str, Any] = {"num_inference_steps": 4, "sde_steps": (0, 2)} | fields
    return [
        make_request("t2i", "a cat", sample=SampleId(0, "a cat", (i,)), **options) for i in range(3)
    ]


def _rollout(disturbance: float = 0.0, **fields: Any) -> tuple[torch.Tensor, BehaviourRecord]:
    instance = fake_instance(TaskType.T2I, adapter=GivenAdapter)
    instance.adapter.disturbance = disturbance
    media, record = rollout_loop(instance, "denoise", _requests(**fields), slots=2)
    assert record is not None
    return media, record


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("disturbance", [100.0, math.nan])
def test_the_velocity_of_a_given_element_changes_nothing(kind: str, disturbance: float) -> None:
    plain_media, plain = _rollout(sde_kind=kind)
    media, record = _rollout(disturbance, sde_kind=kind)
    assert torch.equal(media, plain_media)
    for ours, theirs in zip(record.steps, plain.steps, strict=True):
        assert torch.equal(ours.sample, theirs.sample)
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.sde_logprob, theirs.sde_logprob)


@pytest.mark.parametrize("kind", KINDS)
def test_given_latents_stay_through_ode_and_sde_steps(kind: str) -> None:
    media, record = _rollout(sde_kind=kind)
    assert (media[:, :, 0] == 0.5).all()
    assert (media[:, :, 1:] != 0.5).all()
    for step in record.steps:
        assert (step.prev[:, :, 0] == 0.5).all()
        assert (step.sample[:, :, 0] == 0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_prob_is_that_of_the_sampled_part_alone(kind: str) -> None:
    _, record = _rollout(sde_kind=kind)
    for step in record.steps:
        part = step.prev[:, :, 1:]
        alone = flow_sde_step_with_logprob(
            part,
            -part,
            step.sigma_t,
            step.sigma_next,
            prev_sample=step.sample[:, :, 1:],
            kind=kind,
            sigma_max=step.sigma_second,
        )
        torch.testing.assert_close(step.sde_logprob, alone.log_prob)


def test_log_ratio_and_kl_are_means_over_the_sampled_part() -> None:
    _, record = _rollout()
    assert record.mask is not None
    step = record.steps[0]
    moved = step.mean + torch.randn(step.mean.shape, generator=torch.Generator().manual_seed(0))
    part = slice(1, None)
    torch.testing.assert_close(
        gaussian_log_ratio(moved, step.mean, step.sample, step.std, mask=record.mask),
        gaussian_log_ratio(
            moved[:, :, part], step.mean[:, :, part], step.sample[:, :, part], step.std
        ),
    )
    torch.testing.assert_close(
        gaussian_kl(moved, step.mean, step.std, record.mask),
        gaussian_kl(moved[:, :, part], step.mean[:, :, part], step.std),
    )


def test_the_mask_is_kept_for_training() -> None:
    _, record = _rollout()
    assert record.mask is not None
    for part in (record.rows(1, 3), concat_records([record, record]), record.to("cpu")):
        assert part.mask is not None
        assert torch.equal(part.mask, record.mask)
    instance = fake_instance(TaskType.T2I, adapter=GivenAdapter)
    instance.adapter.disturbance = 100.0
    for recorded, now in recompute(instance, record):
        assert torch.equal(recorded.sde_logprob, now.log_prob)


def test_given_latents_stay_under_the_checkpoints_own_scheduler() -> None:
    instance = fake_instance(TaskType.T2I, adapter=GivenAdapter)
    instance.adapter.scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True
    )
    served, _ = rollout_loop(
        instance,
        "denoise",
        _requests(sampler="checkpoint"),
        profile=ExecutionProfile.SERVE,
    )
    assert (served[:, :, 0] == 0.5).all()
    assert (served[:, :, 1:] != 0.5).all()
