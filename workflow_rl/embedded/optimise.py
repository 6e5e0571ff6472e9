"""The optimisation loop that every stage of the pre-training shares."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Log = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """How long and how fast one stage learns.

    Attributes
    ----------
    steps
        Optimiser steps.
    batch_size
        Samples per step.
    learning_rate
        Peak of a linear warm-up (5% of the steps) followed by a cosine to zero.
    ema_decay
        Upper bound of the decay of the averaged weights, which are the ones kept.
    """

    steps: int
    batch_size: int
    learning_rate: float
    ema_decay: float = 0.998


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up and cosine in [0, 1] at `step` of `steps`."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def optimise(
    model: nn.Module,
    loss_of_batch: Callable[[int], Tensor],
    recipe: Recipe,
    name: str,
    log: Log,
    snapshot: Callable[[], None] | None = None,
    snapshot_every: int = 500,
) -> float:
    """Train `model` in place and leave the averaged (EMA) weights in it.

    Parameters
    ----------
    loss_of_batch
        Takes the step's index and returns the scalar loss.
    snapshot
        Called every `snapshot_every` steps while the model holds its averaged weights.

    Returns
    -------
    float
        Mean loss over the last twentieth of the steps.
    """
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    average = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.AdamW(parameters, recipe.learning_rate, (0.9, 0.99), weight_decay=1e-4)
    start, losses = time.monotonic(), []
    for step in range(recipe.steps):
        for group in optimiser.param_groups:
            group["lr"] = recipe.learning_rate * learning_rate_factor(step, recipe.steps)
        loss = loss_of_batch(step)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        losses.append(loss.item())
        decay = min(recipe.ema_decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        if (step + 1) % 50 == 0:
            recent = sum(losses[-50:]) / len(losses[-50:])
            seconds = time.monotonic() - start
            log(f"{name}: step {step + 1}/{recipe.steps} loss {recent:.5f} ({seconds:.0f} s)")
        if snapshot is not None and (step + 1) % snapshot_every == 0:
            live = [p.detach().clone() for p in parameters]
            _assign(parameters, average)
            snapshot()
            _assign(parameters, live)
    _assign(parameters, average)
    model.eval()
    tail = losses[-max(1, recipe.steps // 20) :]
    return sum(tail) / len(tail)


def _assign(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
