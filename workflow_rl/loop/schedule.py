"""Schedules: the sigmas of diffusers' ``FlowMatchEulerDiscreteScheduler``, as pure functions.

The stock scheduler keeps a mutable step index and finds it by comparing timesteps; a loop that
knows its own index only needs the numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from workflow_rl.config.families import EULER
from workflow_rl.errors import UserError
from workflow_rl.models.common import ScheduleSpec

TimeShiftType = Literal["exponential", "linear"]
Sigmas = npt.NDArray[np.floating[Any]]

_UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)


def calculate_shift(
    num_tokens: int,
    base_seq_len: int = 256,
    max_seq_len: int = 4096,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
) -> float:
    """Return mu, linear in the number of latent tokens (not clamped); defaults are FLUX.1's."""
    slope = (max_shift - base_shift) / (max_seq_len - base_seq_len)
    return num_tokens * slope + (base_shift - slope * base_seq_len)


def flow_match_sigmas(
    num_steps: int,
    *,
    shift: float = 1.0,
    mu: float | None = None,
    sigmas: Sequence[float] | None = None,
    shift_terminal: float | None = None,
    time_shift_type: TimeShiftType = "exponential",
    num_train_timesteps: int = 1000,
) -> torch.Tensor:
    """Return the sigmas of a schedule, float32 [num_steps + 1], from the first to a final 0.

    Parameters
    ----------
    num_steps
        At least 1.
    shift
        Static shift s: s sigma / (1 + (s - 1) sigma). Not used with ``mu``.
    mu
        Dynamic shift: w / (w + 1 / sigma - 1) with w = e^mu (``exponential``) or mu (``linear``).
    sigmas
        Explicit sigmas before the shift, e.g. linspace(1, 1/n, n) as FLUX passes. None: evenly
        spaced from the largest to the smallest training sigma; with a static shift these two are
        shifted already, so the smallest is shifted twice, as in the stock scheduler.
    shift_terminal
        Stretches the schedule so that the last sigma before 0 equals it.

    Raises
    ------
    ValueError
        If ``num_steps`` is below 1 or ``sigmas`` has another length.
    """
    if num_steps < 1:
        raise ValueError(f"a schedule needs at least one step, got {num_steps}")
    if sigmas is None:
        spaced = _default_sigmas(num_steps, shift if mu is None else None, num_train_timesteps)
    elif len(sigmas) != num_steps:
        raise ValueError(f"{num_steps} steps need {num_steps} sigmas, got {len(sigmas)}")
    else:
        spaced = np.asarray(sigmas, dtype=np.float32)
    if mu is None:
        shifted = shift * spaced / (1 + (shift - 1) * spaced)
    else:
        weight = math.exp(mu) if time_shift_type == "exponential" else mu
        shifted = weight / (weight + (1 / spaced - 1))
    if shift_terminal:
        complement = 1 - shifted
        shifted = 1 - complement / (complement[-1] / (1 - shift_terminal))
    return torch.cat([torch.from_numpy(shifted).to(torch.float32), torch.zeros(1)])


def _default_sigmas(num_steps: int, shift: float | None, num_train_timesteps: int) -> Sigmas:
    ends = torch.tensor([num_train_timesteps, 1], dtype=torch.float32) / num_train_timesteps
    if shift is not None:
        ends = shift * ends / (1 + (shift - 1) * ends)
    largest, smallest = (end * num_train_timesteps for end in ends.tolist())
    return np.linspace(largest, smallest, num_steps) / num_train_timesteps


def sigmas_from_scheduler_config(
    config: Mapping[str, Any],
    num_steps: int,
    *,
    num_tokens: int | None = None,
    mu: float | None = None,
    sigmas: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return the Euler sigmas that a checkpoint's scheduler configuration asks for.

    Parameters
    ----------
    config
        ``scheduler_config.json`` of the checkpoint. Of a UniPC flow scheduler, ``flow_shift``
        is the static shift (an Euler sampler over the same sigmas takes its place).
    num_steps
        Denoising steps.
    num_tokens
        Latent tokens, for the dynamic shift of :func:`calculate_shift`.
    mu
        The dynamic shift itself, for families with a rule of their own; wins over ``num_tokens``.
    sigmas
        What the stock pipeline passes, e.g. linspace(1, 1/n, n); None where it passes none.

    Returns
    -------
    torch.Tensor
        float32 [num_steps + 1].

    Raises
    ------
    UserError
        If the configuration asks for another spacing (Karras, exponential, beta) or inversion.
    ValueError
        If the shift is dynamic and neither ``num_tokens`` nor ``mu`` is given.
    """
    for key in _UNSUPPORTED:
        if config.get(key):
            raise UserError(
                f"the checkpoint's scheduler has {key} set, which the Euler sampler does not "
                "support; set it to false in scheduler/scheduler_config.json"
            )
    return flow_match_sigmas(
        num_steps,
        shift=config["flow_shift"] if "flow_shift" in config else config.get("shift", 1.0),
        mu=_dynamic_mu(config, num_tokens, mu),
        sigmas=sigmas,
        shift_terminal=config.get("shift_terminal"),
        time_shift_type=config.get("time_shift_type", "exponential"),
        num_train_timesteps=config.get("num_train_timesteps", 1000),
    )


def _dynamic_mu(
    config: Mapping[str, Any], num_tokens: int | None, mu: float | None
) -> float | None:
    """Return the dynamic shift; None where the checkpoint's shift is static."""
    if not config.get("use_dynamic_shifting", False):
        return None
    if mu is not None:
        return mu
    if num_tokens is None:
        raise ValueError("a dynamic shift needs num_tokens or mu")
    return calculate_shift(
        num_tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )


def euler_sigmas(spec: ScheduleSpec, num_steps: int) -> torch.Tensor:
    """Return the Euler sigmas of a family's schedule, float32 [num_steps + 1]."""
    return sigmas_from_scheduler_config(
        spec.config, num_steps, num_tokens=spec.num_tokens, mu=spec.mu, sigmas=spec.sigmas
    )


def is_euler(scheduler: Any) -> bool:
    """Say whether a checkpoint's scheduler takes the Euler steps that rollout builds on."""
    return type(scheduler).__name__ == EULER


def checkpoint_scheduler(
    scheduler: Any, spec: ScheduleSpec, num_steps: int, device: torch.device
) -> Any:
    """Return a copy of a checkpoint's scheduler, set to its first step as its pipeline sets it.

    Raises
    ------
    UserError
        If it evaluates the model more than once per step.
    """
    own = copy.deepcopy(scheduler)
    options: dict[str, Any] = {}
    if spec.sigmas is not None:
        options["sigmas"] = list(spec.sigmas)
    mu = _dynamic_mu(spec.config, spec.num_tokens, spec.mu)
    if mu is not None:
        options["mu"] = mu
    own.set_timesteps(num_steps, device=device, **options)
    if len(own.timesteps) != num_steps:
        raise UserError(
            f"the checkpoint's {type(own).__name__} takes {len(own.timesteps)} evaluations for "
            f"{num_steps} steps, which the loop does not drive; use sampler: euler"
        )
    own.set_begin_index(0)
    return own
