"""Samples whose generation was not finite: they have failed, whatever a reward says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.rewards.composite import TreeScores
from workflow_rl.workflow import StageOutput


def finite_rows(values: torch.Tensor) -> torch.Tensor:
    """Return bool [B]: every entry of that row of ``values`` [B, ...] is finite.

    The smallest and the largest tell, without a copy of what may be gigabytes of videos.
    """
    lowest_B, highest_B = values.flatten(1).aminmax(dim=1)
    return lowest_B.isfinite() & highest_B.isfinite()


def finite_record(record: BehaviourRecord) -> torch.Tensor:
    """Return bool [B] on CPU: the mean and the sample of every recorded step are finite."""
    finite_B = torch.ones(len(record), dtype=torch.bool)
    for step in record.steps:
        finite_B &= (finite_rows(step.mean) & finite_rows(step.sample)).cpu()
    return finite_B


def finite_samples(output: StageOutput) -> torch.Tensor:
    """Return bool [N]: what a stage made, and how it made it, is finite."""
    finite_N = finite_rows(output.media)
    return finite_N if output.record is None else finite_N & finite_record(output.record)


def fail_not_finite(outputs: Sequence[StageOutput], scores: TreeScores) -> TreeScores:
    """Return the scores with every leaf failed that is not finite or descends from such a sample.

    Parameters
    ----------
    outputs
        The stages of a chain, in order; the leaves are the samples of the last one.
    """
    failed: dict[int, str] = {}
    for position, output in enumerate(outputs):
        own = f"stage {output.stage.name}: not finite"
        rows = enumerate(zip(output.parents, finite_samples(output).tolist(), strict=True))
        inherited = failed if position else {}
        failed = {
            row: inherited.get(parent, own)
            for row, (parent, finite) in rows
            if parent in inherited or not finite
        }
    if not failed:
        return scores
    leaves = list(failed)
    return replace(
        scores,
        total=_with_nan(scores.total, leaves),
        failures=dict(sorted((scores.failures | failed).items())),
        components={name: _with_nan(v, leaves) for name, v in scores.components.items()},
    )


def _with_nan(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    values = values.clone()
    values[rows] = math.nan
    return values
