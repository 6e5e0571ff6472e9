"""Laws of the one loop: interleaving, identity, capture, and behavioural identity (C2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_models import save_flux, save_wan
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.contracts import DenoiseStep
from workflow_rl.loop.denoise import DenoiseLoop
from workflow_rl.loop.sampler import gaussian_log_ratio
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.request import Request, SampleId, make_request
from workflow_rl.runtime.driver import Job
from workflow_rl.runtime.engine import interleave
from workflow_rl.training.rollout import recompute, rollout_loop

SDE_KINDS = ("flow_sde", "cps", "dance_sde")
PROMPTS = ("a red circle moving left", "a blue square moving up", "a green triangle moving down")


@pytest.fixture(scope="module", params=["flux", "wan"])
def instance(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ModelInstance:
    folder = tmp_path_factory.mktemp("models") / str(request.param)
    if request.param == "flux":
        save_flux(folder, guidance_embeds=True, dynamic_shift=True)
        return load_card(build_flux_t2i_card(folder))
    save_wan(folder, image_encoder=True)
    return load_card(build_wan_i2v_card(folder))


def _requests(instance: ModelInstance, count: int = 3, **options: Any) -> list[Request]:
    fields: dict[str, Any] = {"num_inference_steps": 4, "sde_steps": (0, 1, 2)} | options
    task = instance.card.task
    image = None
    if task == "i2v":
        fields["num_frames"] = 5
        image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(5))
    return [
        make_request(task, PROMPTS[i], sample=SampleId(7, PROMPTS[i], (i,)), image=image, **fields)
        for i in range(count)
    ]


def test_interleaved_equals_one_after_the_other(instance: ModelInstance) -> None:
    def jobs() -> list[Job]:
        lengths = (4, 2, 3)
        return [
            Job(
                instance,
                "denoise",
                [replace(r, params=replace(r.params, num_inference_steps=n, sde_steps=(0,)))],
                ExecutionProfile.ROLLOUT,
            )
            for r, n in zip(_requests(instance), lengths, strict=True)
        ]

    in_turns = interleave(jobs())
    for turned, alone in zip(in_turns, [job.run() for job in jobs()], strict=True):
        assert torch.equal(turned.media, alone.media)
        assert turned.record is not None
        assert alone.record is not None
        assert torch.equal(turned.record.steps[0].sde_logprob, alone.record.steps[0].sde_logprob)


def test_rollout_without_stochastic_steps_is_serving(instance: ModelInstance) -> None:
    requests = _requests(instance, sde_steps=())
    served, nothing = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    rolled, record = rollout_loop(instance, "denoise", requests)
    assert torch.equal(served, rolled)
    assert nothing is None
    assert record is not None
    assert record.steps == ()


def test_serving_ignores_the_stochastic_steps(instance: ModelInstance) -> None:
    serve = ExecutionProfile.SERVE
    plain, _ = rollout_loop(instance, "denoise", _requests(instance, sde_steps=()), profile=serve)
    asked, _ = rollout_loop(instance, "denoise", _requests(instance), profile=serve)
    assert torch.equal(plain, asked)


def test_a_sample_is_the_same_in_any_batch(instance: ModelInstance) -> None:
    requests = _requests(instance)
    together, record = rollout_loop(instance, "denoise", requests, slots=3)
    alone, single = rollout_loop(instance, "denoise", [requests[2]], slots=1)
    reordered, _ = rollout_loop(instance, "denoise", requests[::-1], slots=2)
    torch.testing.assert_close(alone[0], together[2], atol=1e-5, rtol=0)
    torch.testing.assert_close(reordered.flip(0), together, atol=1e-5, rtol=0)
    assert record is not None
    assert single is not None
    assert torch.equal(record.steps[0].prev[2], single.steps[0].prev[0])


def test_two_identities_are_two_samples(instance: ModelInstance) -> None:
    (request,) = _requests(instance, count=1)
    other = replace(request, sample=request.sample.child(1))
    media, _ = rollout_loop(instance, "denoise", [request, other])
    assert (media[0] - media[1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", SDE_KINDS)
def test_c2_recomputed_log_prob_is_the_captured_one(instance: ModelInstance, kind: str) -> None:
    requests = _requests(instance, sde_kind=kind)
    _, record = rollout_loop(instance, "denoise", requests)
    assert record is not None
    assert [step.index for step in record.steps] == [0, 1, 2]
    for parameter in instance.component("transformer").parameters():
        parameter.requires_grad_(True)
    for recorded, now in recompute(instance, record):
        assert torch.equal(recorded.sde_logprob, now.log_prob)
        ratio = gaussian_log_ratio(now.mean, recorded.mean, recorded.sample, recorded.std)
        assert float(ratio.detach().abs().max()) == 0.0
        assert now.log_prob.requires_grad
        assert recorded.std.min() > 0


def test_c2_fails_when_the_weights_moved(instance: ModelInstance) -> None:
    _, record = rollout_loop(instance, "denoise", _requests(instance))
    assert record is not None
    weight = next(p for p in instance.component("transformer").parameters() if p.ndim > 1)
    with torch.no_grad():
        weight.add_(0.01)
        ratios = [
            gaussian_log_ratio(now.mean, r.mean, r.sample, r.std)
            for r, now in recompute(instance, record)
        ]
        weight.sub_(0.01)
    assert max(float(ratio.abs().max()) for ratio in ratios) > 0


def test_record_says_what_was_done(instance: ModelInstance) -> None:
    requests = _requests(instance)
    instance.set_weights_version("transformer", 4)
    _, record = rollout_loop(instance, "denoise", requests, slots=2)
    assert record is not None
    assert record.samples == tuple(request.sample for request in requests)
    assert record.seeds == (7, 7, 7)
    assert record.kernel == "torch_eager"
    assert record.dtype == "torch.float32"
    assert record.weights_version["transformer"] == 4
    assert record.steps[1].prev is record.steps[0].sample
    instance.set_weights_version("transformer", 0)


def test_another_kernel_in_training_is_refused(instance: ModelInstance) -> None:
    _, record = rollout_loop(instance, "denoise", _requests(instance, count=1))
    assert record is not None
    with pytest.raises(UserError, match="the rollout used kernel 'torch_eager'"):
        list(recompute(instance, record, kernel="numpy_reference"))


def test_rows_of_a_record_recompute_alike(instance: ModelInstance) -> None:
    _, record = rollout_loop(instance, "denoise", _requests(instance))
    assert record is not None
    with torch.no_grad():
        whole = [now.log_prob for _, now in recompute(instance, record)]
        part = [now.log_prob for _, now in recompute(instance, record.rows(1, 3))]
    for all_rows, some in zip(whole, part, strict=True):
        torch.testing.assert_close(all_rows[1:], some, atol=1e-5, rtol=0)


def test_text_encoder_runs_once_per_prompt(instance: ModelInstance) -> None:
    instance.set_weights_version("text_encoder", 100)
    before = instance.caches.misses
    request = _requests(instance, count=1)[0]
    group = [replace(request, sample=request.sample.child(i)) for i in range(4)]
    rollout_loop(instance, "denoise", group, slots=2)
    rollout_loop(instance, "denoise", group, slots=4)
    assert instance.caches.misses - before == 1


def test_a_transformer_sync_leaves_the_text_cache_alone(instance: ModelInstance) -> None:
    (request,) = _requests(instance, count=1)
    rollout_loop(instance, "denoise", [request])
    entries, version = len(instance.caches), instance.version_of("text_encoder")
    instance.set_weights_version("transformer", 9)
    assert (len(instance.caches), instance.version_of("text_encoder")) == (entries, version)
    assert instance.version_of("transformer") == 9
    instance.set_weights_version("text_encoder", version + 1)
    assert len(instance.caches) < entries


def test_train_makes_no_samples(instance: ModelInstance) -> None:
    with pytest.raises(UserError, match=r"use workflow_rl\.training\.rollout\.recompute"):
        Job(instance, "denoise", _requests(instance, count=1), ExecutionProfile.TRAIN)


def test_a_step_names_its_kernel(instance: ModelInstance) -> None:
    requests = _requests(instance, count=1, kernel="numpy_reference")
    loop = DenoiseLoop()
    state = loop.init(instance, requests, ExecutionProfile.ROLLOUT)
    loop.advance(state, instance.adapter.encode(instance, state.requests))
    step = loop.next(state)
    assert isinstance(step, DenoiseStep)
    assert step.kernel == "numpy_reference"
    _, record = rollout_loop(instance, "denoise", requests)
    assert record is not None
    replayed = DenoiseLoop.replay(record, instance.platform.device)
    assert {step.kernel for step in replayed} == {"numpy_reference"}


def test_requests_of_one_batch_are_alike(instance: ModelInstance) -> None:
    first, second = _requests(instance, count=2)
    other = replace(second, params=replace(second.params, num_inference_steps=5))
    with pytest.raises(UserError, match="must have the same parameters"):
        rollout_loop(instance, "denoise", [first, other])


def test_one_bfloat16_pass_is_finite(instance: ModelInstance) -> None:
    half = load_card(instance.card, dtype=torch.bfloat16)
    served, _ = rollout_loop(
        half, "denoise", _requests(half, count=2), profile=ExecutionProfile.SERVE
    )
    assert served.dtype == torch.float32
    assert served.isfinite().all()
    exact, _ = rollout_loop(
        instance, "denoise", _requests(instance, count=2), profile=ExecutionProfile.SERVE
    )
    assert (served - exact).abs().mean() < 0.1
