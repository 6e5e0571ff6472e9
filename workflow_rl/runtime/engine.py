"""Runs many requests on resident instances: in batches of slots, and interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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
    media = torch.empty(0)
    records: list[BehaviourRecord] = []
    for start in range(0, len(requests), slots):
        output = Job(instance, loop_id, requests[start : start + slots], profile, on_progress).run()
        if start == 0:
            media = _room_for(len(requests), output.media)
        if media is not output.media:
            output = replace(output, media=media[start : start + slots].copy_(output.media))
        if output.record is not None:
            records.append(output.record)
        if on_output is not None:
            on_output(start, output)
    return media, concat_records(records) if records else None


def _room_for(rows: int, first: torch.Tensor) -> torch.Tensor:
    """Return where the media of every batch are put: those of the ``first``, if there is no other.

    Batches that are joined in the end would be there twice until then.
    """
    return first if len(first) == rows else first.new_empty(rows, *first.shape[1:])


def interleave(jobs: Sequence[Job]) -> list[LoopOutput]:
    """Advance jobs in turns, one step each, until all are done; return their outputs in order.

    Equal, bit for bit, to running them one after the other: no state is shared between jobs.
    """
    active = list(jobs)
    while active:
        active = [job for job in active if job.step()]
    return [job.run() for job in jobs]
