"""The stochastic steps: what each kind does to a state and a velocity.

All are affine in both. From sigma to sigma' (dt = sigma' - sigma < 0) a step is Gaussian with

    mean = A x + B v,    standard deviation s

so a kind is a function that gives (A, B, s). They follow from the formulas in DESIGN section 4 with
x0 = x - sigma v and x1 = x + (1 - sigma) v. A new kind is a function and an entry in ``SDE_KINDS``.

Sources: ``flow_sde`` Flow-GRPO (arXiv:2505.05470), eq. 9; ``cps`` Flow-CPS (arXiv:2509.05952);
``dance_sde`` DanceGRPO (arXiv:2505.07818).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workflow_rl.errors import UserError

AT_ONE = 1e-6 + torch.finfo(torch.float32).eps
"""How close to 1 a sigma counts as 1; the eps lets in float32's nearest number to 1 - 1e-6."""


class AffineStep(NamedTuple):
    """A step's coefficients and standard deviation, float64 [B]."""

    x_coef: torch.Tensor
    velocity_coef: torch.Tensor
    std: torch.Tensor


class LogProb(NamedTuple):
    """log_prob = -weight <(sample - mean)^2> - offset; float64 [B]."""

    weight: torch.Tensor
    offset: torch.Tensor


Coefficients = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], AffineStep]
"""(sigma [B], sigma' [B], sigma-tilde [B], noise scale a) -> coefficients; all float64."""


@dataclass(frozen=True)
class SDE:
    """One kind of step.

    Parameters
    ----------
    coefficients
        Gives (A, B, s) for sigma' > 0.
    log_prob
        What the kind calls its log-prob, as a function of s > 0, [B].
    singular_at_one
        True if the noise diverges at sigma = 1, where sigma-tilde stands in.
    max_noise_scale
        Largest noise scale that has a meaning.
    """

    name: str
    coefficients: Coefficients
    log_prob: Callable[[torch.Tensor], LogProb]
    singular_at_one: bool = False
    max_noise_scale: float = math.inf


def _ode(
    sigma_B: torch.Tensor, next_B: torch.Tensor, tilde_B: torch.Tensor, noise_scale: float
) -> AffineStep:
    return AffineStep(torch.ones_like(sigma_B), next_B - sigma_B, torch.zeros_like(sigma_B))


def _flow_sde(
    sigma_B: torch.Tensor, next_B: torch.Tensor, tilde_B: torch.Tensor, noise_scale: float
) -> AffineStep:
    dt_B = next_B - sigma_B
    half_rate_B = noise_scale**2 / (2.0 * (1.0 - tilde_B))  # g^2 / (2 sigma)
    return AffineStep(
        1.0 + half_rate_B * dt_B,
        (1.0 + half_rate_B * (1.0 - sigma_B)) * dt_B,
        noise_scale * torch.sqrt(sigma_B / (1.0 - tilde_B) * -dt_B),
    )


def _cps(
    sigma_B: torch.Tensor, next_B: torch.Tensor, tilde_B: torch.Tensor, noise_scale: float
) -> AffineStep:
    """Replace part of the noise: an equal part in every step, however short the step.

    With many steps it therefore does not keep the marginals: data of standard deviation s0 end with
    s0 cos(a pi / 4), about 0.85 s0 at a = 0.7. It keeps them in the limit of small a.
    """
    angle = 0.5 * math.pi * noise_scale
    std_B, rest_B = next_B * math.sin(angle), next_B * math.cos(angle)  # squares add up to sigma'^2
    return AffineStep(
        (1.0 - next_B) + rest_B,
        (1.0 - sigma_B) * rest_B - sigma_B * (1.0 - next_B),
        std_B,
    )


def _dance_sde(
    sigma_B: torch.Tensor, next_B: torch.Tensor, tilde_B: torch.Tensor, noise_scale: float
) -> AffineStep:
    dt_B = next_B - sigma_B
    half_rate_B = noise_scale**2 / (2.0 * sigma_B)
    return AffineStep(
        1.0 + half_rate_B * dt_B,
        (1.0 + half_rate_B * (1.0 - sigma_B)) * dt_B,
        noise_scale * torch.sqrt(-dt_B),
    )


def _gaussian(std_B: torch.Tensor) -> LogProb:
    return LogProb(0.5 / std_B**2, std_B.log() + 0.5 * math.log(2.0 * math.pi))


def _squared_error(std_B: torch.Tensor) -> LogProb:
    return LogProb(torch.ones_like(std_B), torch.zeros_like(std_B))


SDE_KINDS: dict[str, SDE] = {
    sde.name: sde
    for sde in (
        SDE("flow_sde", _flow_sde, _gaussian, singular_at_one=True),
        SDE("cps", _cps, _squared_error, max_noise_scale=1.0),
        SDE("dance_sde", _dance_sde, _gaussian),
        SDE("ode", _ode, _squared_error),
    )
}


def sde_kind(name: str) -> SDE:
    """Return the kind of that name.

    Raises
    ------
    UserError
        If there is none; the message names the nearest.
    """
    if name not in SDE_KINDS:
        near = difflib.get_close_matches(name, SDE_KINDS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"unknown SDE kind {name!r}, known are {', '.join(SDE_KINDS)}; did you mean {near!r}?"
        )
    return SDE_KINDS[name]


def sigma_tilde(sigma_B: torch.Tensor, sigma_max_B: torch.Tensor) -> torch.Tensor:
    """Return sigma, with the schedule's second sigma in place of 1.

    Parameters
    ----------
    sigma_B
        [B] in (0, 1].
    sigma_max_B
        The schedule's second sigma (Flow-GRPO's name for it), [B] in [0, 1).

    Raises
    ------
    ValueError
        If a sigma is 1 and so is ``sigma_max_B``.
    """
    at_one_B = sigma_B >= 1.0 - AT_ONE
    if not bool(at_one_B.any()):
        return sigma_B
    if bool((at_one_B & (sigma_max_B >= 1.0 - AT_ONE)).any()):
        raise ValueError(f"sigma_max must be below 1, got {sigma_max_B.max().item()}")
    return torch.where(at_one_B, sigma_max_B, sigma_B)


def affine_step(
    sde: SDE,
    sigma_B: torch.Tensor,
    sigma_next_B: torch.Tensor,
    sigma_max_B: torch.Tensor | None,
    noise_scale: float,
) -> AffineStep:
    """Return the coefficients of a step.

    Without noise, and on the last step (sigma' = 0), every kind is the ODE step.

    Parameters
    ----------
    sigma_B, sigma_next_B
        float64 [B], 0 <= sigma' < sigma <= 1.
    sigma_max_B
        float64 [B], see :func:`sigma_tilde`; None: ``sigma_next_B`` where ``sigma_B`` is 1.
    noise_scale
        a >= 0; ``cps`` at most 1, where all of the old noise is replaced.

    Raises
    ------
    ValueError
        If an argument is out of its range.
    """
    if not 0.0 <= noise_scale <= sde.max_noise_scale:
        raise ValueError(
            f"noise_scale of {sde.name} must be in [0, {sde.max_noise_scale}], got {noise_scale}"
        )
    ordered_B = (sigma_next_B >= 0) & (sigma_next_B < sigma_B) & (sigma_B <= 1)
    if not bool(ordered_B.all()):
        raise ValueError(
            "sigmas must satisfy 0 <= sigma_next < sigma_t <= 1, got "
            f"sigma_t {sigma_B.tolist()}, sigma_next {sigma_next_B.tolist()}"
        )
    ode = _ode(sigma_B, sigma_next_B, sigma_B, 0.0)
    if noise_scale == 0.0:
        return ode
    is_last_B = sigma_next_B == 0
    tilde_B = sigma_B
    if sde.singular_at_one:
        # A step from sigma = 1 is the schedule's first, so its end is the second sigma.
        second_B = sigma_next_B if sigma_max_B is None else sigma_max_B
        tilde_B = sigma_tilde(torch.where(is_last_B, 0.0, sigma_B), second_B)
    noisy = sde.coefficients(sigma_B, sigma_next_B, tilde_B, noise_scale)
    return AffineStep(*(torch.where(is_last_B, o, n) for o, n in zip(ode, noisy, strict=True)))


def log_prob_of(sde: SDE, std_B: torch.Tensor) -> LogProb:
    """Return what turns a squared error into the kind's log-prob.

    A step with std 0 has no density: its log-prob is 0, and so is the gradient.
    """
    has_density_B = std_B > 0
    log_prob = sde.log_prob(torch.where(has_density_B, std_B, 1.0))
    return LogProb(*(torch.where(has_density_B, part, 0.0) for part in log_prob))
