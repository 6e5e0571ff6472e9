"""Behaviour records: what a rollout did, kept so that training can do exactly the same again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from workflow_rl.models.common import Conditioning
from workflow_rl.request import DiffusionParams, SampleId


@dataclass(frozen=True)
class StepRecord:
    """One stochastic step of a batch.

    ``prev`` and ``sample`` [B, ...] are the states before and after, in the dtype they were stored
    in; ``mean`` [B, ...] float32 is the Gaussian's mean, ``std`` [B] its standard deviation and
    ``sde_logprob`` [B] the log-prob of ``sample``. ``sigma_second`` is the schedule's second sigma,
    which stands in for sigma = 1 (DESIGN: sigma-tilde). ``component`` names the transformer that
    made the velocity and ``timestep`` what it was given.
    """

    index: int
    component: str
    timestep: float
    sigma_t: float
    sigma_next: float
    sigma_second: float
    prev: torch.Tensor
    sample: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    sde_logprob: torch.Tensor


@dataclass(frozen=True)
class BehaviourRecord:
    """All stochastic steps of a batch of B samples, with what is needed to recompute them.

    Tensors of consecutive steps share storage (one step's ``sample`` is the next one's ``prev``),
    and samples of a group share conditioning, so a record costs about one trajectory.
    ``guidance`` names the rule of guidance. ``mask``, broadcastable to one sample's latents, is
    True where they were sampled and not given; None: all were.
    """

    samples: tuple[SampleId, ...]
    params: DiffusionParams
    steps: tuple[StepRecord, ...]
    conditioning: tuple[Conditioning, ...]
    kernel: str
    dtype: str
    guidance: str
    weights_version: dict[str, int]
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Run seed of each sample."""
        return tuple(sample.run_seed for sample in self.samples)

    def rows(self, start: int, stop: int) -> BehaviourRecord:
        """Return samples ``start`` to ``stop`` (views, no copy)."""
        part = slice(start, stop)
        return replace(
            self,
            samples=self.samples[part],
            conditioning=self.conditioning[part],
            steps=tuple(
                replace(
                    step,
                    prev=step.prev[part],
                    sample=step.sample[part],
                    mean=step.mean[part],
                    std=step.std[part],
                    sde_logprob=step.sde_logprob[part],
                )
                for step in self.steps
            ),
        )

    def to(self, device: torch.device | str) -> BehaviourRecord:
        """Return the record on ``device``; tensors that were shared stay shared."""
        moved: dict[int, torch.Tensor] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device)
            return moved[id(tensor)]

        return replace(
            self,
            mask=None if self.mask is None else move(self.mask),
            conditioning=tuple(
                {name: move(tensor) for name, tensor in row.items()} for row in self.conditioning
            ),
            steps=tuple(
                replace(
                    step,
                    prev=move(step.prev),
                    sample=move(step.sample),
                    mean=move(step.mean),
                    std=move(step.std),
                    sde_logprob=move(step.sde_logprob),
                )
                for step in self.steps
            ),
        )


def concat_records(records: Sequence[BehaviourRecord]) -> BehaviourRecord:
    """Join the records of batches that were rolled out alike.

    Raises
    ------
    ValueError
        If there is none, or if they differ in parameters, kernel, dtype, guidance or weights.
    """
    if not records:
        raise ValueError("there is no record to join")
    first = records[0]
    if len(records) == 1:
        return first
    for other in records[1:]:
        for name in ("params", "kernel", "dtype", "guidance", "weights_version"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(
                    f"records differ in {name}: {getattr(first, name)} and {getattr(other, name)}"
                )
    joined: dict[tuple[int, ...], torch.Tensor] = {}

    def cat(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        key = tuple(map(id, parts))
        if key not in joined:
            joined[key] = torch.cat(parts)
        return joined[key]

    steps = tuple(
        replace(
            column[0],
            prev=cat(tuple(step.prev for step in column)),
            sample=cat(tuple(step.sample for step in column)),
            mean=cat(tuple(step.mean for step in column)),
            std=cat(tuple(step.std for step in column)),
            sde_logprob=cat(tuple(step.sde_logprob for step in column)),
        )
        for column in zip(*(record.steps for record in records), strict=True)
    )
    return replace(
        first,
        samples=tuple(sample for record in records for sample in record.samples),
        conditioning=tuple(row for record in records for row in record.conditioning),
        steps=steps,
    )
