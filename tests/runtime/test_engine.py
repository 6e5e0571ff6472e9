"""Many requests: in batches of slots, in order, and joined."""

from __future__ import annotations

import pytest
import torch

from tests.fake_models import FakeAdapter, fake_instance
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.request import SampleId, TaskType, make_request
from workflow_rl.runtime.driver import Job
from workflow_rl.runtime.engine import interleave, run_requests

REQUESTS = [
    make_request(
        "t2i", "a cat", sample=SampleId(0, "a cat", (i,)), num_inference_steps=3, sde_steps=(0, 1)
    )
    for i in range(5)
]


@pytest.mark.parametrize(("slots", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (9, [5])])
def test_batches_of_slots_give_the_same_in_the_same_order(slots: int, sizes: list[int]) -> None:
    instance = fake_instance(TaskType.T2I)
    rollout = ExecutionProfile.ROLLOUT
    media, record = run_requests(instance, "denoise", REQUESTS, slots=slots, profile=rollout)
    whole, _ = run_requests(
        fake_instance(TaskType.T2I), "denoise", REQUESTS, slots=5, profile=rollout
    )
    assert torch.equal(media, whole)
    adapter = instance.adapter
    assert isinstance(adapter, FakeAdapter)
    assert [len(batch) for batch in adapter.batches] == sizes
    assert record is not None
    assert record.samples == tuple(request.sample for request in REQUESTS)
    assert [len(step.sample) for step in record.steps] == [5, 5]


@pytest.mark.parametrize("slots", [2, 5])
def test_media_are_there_once(slots: int) -> None:
    """What is handed over as it is made is a part of what is returned, not a second copy."""
    handed: dict[int, torch.Tensor] = {}
    media, _ = run_requests(
        fake_instance(TaskType.T2I),
        "denoise",
        REQUESTS,
        slots=slots,
        profile=ExecutionProfile.SERVE,
        on_output=lambda start, output: handed.update({start: output.media}),
    )
    assert list(handed) == list(range(0, 5, slots))
    for start, rows in handed.items():
        assert rows.data_ptr() == media[start].data_ptr()
        assert torch.equal(rows, media[start : start + slots])


def test_serving_leaves_no_record() -> None:
    _, record = run_requests(
        fake_instance(TaskType.T2I), "denoise", REQUESTS, slots=2, profile=ExecutionProfile.SERVE
    )
    assert record is None


def test_what_cannot_be_run_is_refused() -> None:
    instance, serve = fake_instance(TaskType.T2I), ExecutionProfile.SERVE
    with pytest.raises(UserError, match="no request to run"):
        run_requests(instance, "denoise", [], slots=1, profile=serve)
    with pytest.raises(UserError, match="slots is 0"):
        run_requests(instance, "denoise", REQUESTS, slots=0, profile=serve)


def test_interleaved_jobs_keep_their_order() -> None:
    instance = fake_instance(TaskType.T2I)
    jobs = [Job(instance, "denoise", [request], ExecutionProfile.SERVE) for request in REQUESTS]
    outputs = interleave(jobs)
    assert [output.requests[0].sample for output in outputs] == [r.sample for r in REQUESTS]
