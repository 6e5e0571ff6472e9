"""Runs many requests on resident instances: in batches of slots, and interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.contracts import LoopOutput
from workflow_rl.loop.record import BehaviourRecord, concat_records
from workflow_rl.request import Request
from workflow_rl.runtime.driver import Job, OnProgress


def run_requests(
    instance: ModelInstance,
    loop_id: str,
    requests: Sequence[Request],
    *,
    slots: int,
    profile: ExecutionProfile,
    on_progress: OnProgress | None = None,
    on_output: Callable[[int, LoopOutput], None] | None = None,
) -> tuple[torch.Tensor, BehaviourRecord | None]:
    """Drive the loop over requests, ``slots`` at a time, and join what comes out.

    ``on_output`` is given each batch's first row and output as soon as there is one.

    Returns
    -------
    media : Tensor
        [N, ...] in [0, 1] on CPU, in the order of the requests.
    record : BehaviourRecord or None
        On CPU; None outside ``ROLLOUT``.

    Raises
    ------
    UserError
        If there is no request or ``slots`` is below 1.
    """
    if not requests:
        raise UserError("there is no request to run; give at least one")
    if slots < 1:
        raise UserError(f"slots is {slots}; at least one request must fit a batch")
    outputs: list[LoopOutput] = []
    for start in range(0, len(requests), slots):
        job = Job(instance, loop_id, requests[start : start + slots], profile, on_progress)
        outputs.append(job.run())
        if on_output is not None:
            on_output(start, outputs[-1])
    media = torch.cat([output.media for output in outputs])
    records = [output.record for output in outputs if output.record is not None]
    return media, concat_records(records) if records else None


def interleave(jobs: Sequence[Job]) -> list[LoopOutput]:
    """Advance jobs in turns, one step each, until all are done; return their outputs in order.

    Equal, bit for bit, to running them one after the other: no state is shared between jobs.
    """
    active = list(jobs)
    while active:
        active = [job for job in active if job.step()]
    return [job.run() for job in jobs]
