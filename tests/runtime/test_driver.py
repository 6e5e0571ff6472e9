"""A driver executes what any loop describes, and knows nothing of its state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.fake_models import fake_instance
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.contracts import DecodeStep, LoopOutput, Step, StepResult
from workflow_rl.request import DiffusionParams, Request, TaskType, make_request
from workflow_rl.runtime import driver
from workflow_rl.runtime.driver import Job, ProgressEvent

SERVE = ExecutionProfile.SERVE


class DecodeLoop:
    """The least that the protocol asks for: its state is a list of results."""

    loop_id = "decode"

    def init(
        self, instance: ModelInstance, requests: Sequence[Request], profile: ExecutionProfile
    ) -> list[torch.Tensor]:
        return []

    def next(self, state: list[torch.Tensor]) -> Step | None:
        return None if state else DecodeStep(torch.ones(1, 3, 4, 4), DiffusionParams())

    def advance(self, state: list[torch.Tensor], result: StepResult) -> None:
        assert isinstance(result, torch.Tensor)
        state.append(result)

    def finalize(self, state: list[torch.Tensor]) -> LoopOutput:
        return LoopOutput((), state[0], None)


def _request(steps: int = 3) -> Request:
    return make_request("t2i", "a cat", num_inference_steps=steps)


def test_any_loop_that_keeps_the_protocol_is_driven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(driver.LOOPS, "decode", DecodeLoop())
    instance = fake_instance(TaskType.T2I)
    with pytest.raises(UserError, match="fake has no loop 'decode'"):
        Job(instance, "decode", [_request()], SERVE)
    object.__setattr__(instance.card, "loops", ("decode",))
    job = Job(instance, "decode", [_request()], SERVE)
    assert torch.equal(job.run().media, torch.ones(1, 3, 4, 4))


def test_a_job_goes_on_step_by_step_and_then_stays_done() -> None:
    job = Job(fake_instance(TaskType.T2I), "denoise", [_request()], SERVE)
    steps = 0
    while job.step():
        steps += 1
        assert job.output is None
    assert steps == 5  # encode, three denoising steps, decode
    assert not job.step()
    assert job.run() is job.output


def test_progress_is_told_of_denoising_steps_alone() -> None:
    events: list[ProgressEvent] = []
    instance = fake_instance(TaskType.T2I, "painter")
    Job(instance, "denoise", [_request(), _request()], SERVE, events.append).run()
    assert events == [ProgressEvent("painter", step, 3, 2) for step in (1, 2, 3)]


def test_nothing_that_a_job_makes_holds_a_graph() -> None:
    with torch.enable_grad():
        output = Job(fake_instance(TaskType.T2I), "denoise", [_request()], SERVE).run()
    assert not output.media.requires_grad
