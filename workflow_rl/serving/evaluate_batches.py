"""A candidate's samples and scores, batch by batch and together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from workflow_rl.evaluation.candidates import RunCandidate
from workflow_rl.evaluation.comparison import ScoredCandidate
from workflow_rl.evaluation.diversity import distances, signature
from workflow_rl.evaluation.job import EvaluationJob

T = TypeVar("T")


def in_batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items, ``size`` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


@dataclass(frozen=True)
class ScoredBatch:
    """Some rows of a candidate, made or read, and scored.

    Attributes
    ----------
    media : sequence of Tensor
        ``[3, H, W]`` or ``[3, T, H, W]`` in [0, 1], each of its own size.
    fps : sequence of float or None
        Of each video.
    made : sequence of bool
        Which are finite.
    total, components, failures
        As of :class:`workflow_rl.rewards.composite.TreeScores`.
    """

    media: Sequence[torch.Tensor]
    fps: Sequence[float | None]
    made: Sequence[bool]
    total: torch.Tensor
    components: Mapping[str, torch.Tensor]
    failures: Mapping[int, str]


class Collected:
    """The scores of one candidate as its batches come."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._done = 0
        self._total = torch.full((rows,), math.nan)
        self._measures: dict[str, torch.Tensor] = {}
        self._failures: dict[int, str] = {}
        self._made = np.zeros(rows, dtype=bool)
        self._signatures: list[torch.Tensor] = []
        self._shapes: set[tuple[int, ...]] = set()

    def add(self, batch: ScoredBatch) -> None:
        """Take the next rows."""
        rows = slice(self._done, self._done + len(batch.media))
        self._total[rows] = batch.total
        for name, values in batch.components.items():
            empty_N = torch.full((self._rows,), math.nan)
            self._measures.setdefault(name, empty_N)[rows] = values
        self._failures |= {self._done + row: why for row, why in batch.failures.items()}
        self._made[rows] = batch.made
        self._signatures += [signature(media) for media in batch.media]
        self._shapes |= {tuple(media.shape[1:]) for media in batch.media}
        self._done = rows.stop

    def candidate(
        self, label: str, description: Mapping[str, Any], job: EvaluationJob, index: int
    ) -> ScoredCandidate:
        """Return the whole."""
        candidate = job.candidates[index]
        trained_on: tuple[str, ...] | None = None
        if isinstance(candidate, RunCandidate):
            at_work = [r for r in candidate.config.rewards if r.weight]
            names = dict.fromkeys(str(r.name or r.callable) for r in at_work)
            trained_on = () if candidate.iteration == 0 else tuple(names)
        return ScoredCandidate(
            label,
            {**description, "shapes": sorted(map(list, self._shapes))},
            trained_on,
            self._total,
            self._measures,
            self._failures,
            self._made,
            distances(self._signatures, job.prompts),
        )
