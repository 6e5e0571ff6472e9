"""Sampler steps: the Euler step, the SDE step with its log-prob, and the inverse of its mean.

Flow matching: x_sigma = (1 - sigma) x0 + sigma eps, velocity v = eps - x0, sigma falls from 1 to 0.
Arithmetic is float32 or better whatever the dtype of the tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workflow_rl.loop.sde import SDE, AffineStep, affine_step, log_prob_of, sde_kind
from workflow_rl.platform import FLOW_SDE_STEP, kernels

Sigma = float | torch.Tensor
"""One sigma for the batch, or one per sample, [B]."""


class SDEStep(NamedTuple):
    """What a step gave.

    ``sample`` [B, ...] is in x_t's dtype (``prev_sample`` itself if that was given). ``log_prob``
    [B] is the mean over a sample's elements, taken after ``sample`` was rounded to its dtype.
    ``mean`` [B, ...] is not rounded; ``std`` is [B]. The last three are float32 (float64 if an
    input is).
    """

    sample: torch.Tensor
    log_prob: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor


def flow_sde_step_with_logprob(
    x_t: torch.Tensor,
    velocity: torch.Tensor,
    sigma_t: Sigma,
    sigma_next: Sigma,
    *,
    noise: torch.Tensor | None = None,
    prev_sample: torch.Tensor | None = None,
    noise_scale: float = 0.7,
    kind: str = "flow_sde",
    sigma_max: Sigma | None = None,
    mask: torch.Tensor | None = None,
    kernel: str | None = None,
) -> SDEStep:
    """Take one step, or score the sample that an earlier one gave.

    Differentiable with respect to ``velocity``; in ``log_prob`` the sample is a constant. A step
    with std 0 (the last one, ``ode``, ``noise_scale`` 0) has no density: its log-prob is 0, and so
    is the gradient.

    Parameters
    ----------
    x_t, velocity
        State and model output, [B, ...], any floating dtype.
    sigma_t, sigma_next
        Where the step starts and ends: float or [B], 0 <= sigma_next < sigma_t <= 1.
    noise
        Standard normal noise, [B, ...].
    prev_sample
        A sample to score, [B, ...]. With neither this nor ``noise`` the sample is the mean.
    noise_scale
        The a of DESIGN section 4: 0 is the ODE step; at most 1 for ``cps``.
    kind
        A key of ``SDE_KINDS``.
    sigma_max
        The schedule's second sigma, which ``flow_sde`` takes in place of sigma_t = 1. None:
        ``sigma_next``, which it is on the step from 1.
    mask
        Boolean, broadcastable to x_t: True where the latent is sampled. Given latents (False) stay
        as they are and are left out of the log-prob.
    kernel
        Name of the ``FLOW_SDE_STEP`` kernel; None is the default of x_t's device.

    Raises
    ------
    ValueError
        If shapes disagree, a sigma or ``noise_scale`` is out of range, both ``noise`` and
        ``prev_sample`` are given.
    UserError
        If ``kind`` or ``kernel`` is unknown, or the kernel cannot run on this device.
    """
    if noise is not None and prev_sample is not None:
        raise ValueError("pass noise (to draw a sample) or prev_sample (to score one), not both")
    for name, tensor in (("velocity", velocity), ("noise", noise), ("prev_sample", prev_sample)):
        if tensor is not None and tensor.shape != x_t.shape:
            raise ValueError(
                f"{name} must have x_t's shape {list(x_t.shape)}, got {list(tensor.shape)}"
            )
    sde = sde_kind(kind)
    step = _coefficients(sde, x_t, sigma_t, sigma_next, sigma_max, noise_scale)
    result = kernels.select(FLOW_SDE_STEP, x_t.device.type, kernel).function(
        x_t,
        velocity,
        *step,
        *log_prob_of(sde, step.std),
        noise,
        prev_sample,
        None if mask is None else mask.to(x_t.device).expand(x_t.shape),
    )
    return SDEStep(result.sample, result.log_prob, result.mean, step.std.to(result.log_prob.dtype))


def flow_sde_ml_velocity(
    x_t: torch.Tensor,
    sample: torch.Tensor,
    sigma_t: Sigma,
    sigma_next: Sigma,
    *,
    noise_scale: float = 0.7,
    kind: str = "flow_sde",
    sigma_max: Sigma | None = None,
) -> torch.Tensor:
    """Return the velocity under which ``sample`` is the step's mean: its log-prob is maximal there.

    v = (sample - A x_t) / B; B < 0 for every kind, so the inverse always exists.

    Parameters
    ----------
    x_t, sample
        States before and after the step, [B, ...].
    sigma_t, sigma_next, noise_scale, kind, sigma_max
        As in :func:`flow_sde_step_with_logprob`.

    Returns
    -------
    torch.Tensor
        [B, ...], float32 (float64 if an input is).
    """
    if sample.shape != x_t.shape:
        raise ValueError(
            f"sample must have x_t's shape {list(x_t.shape)}, got {list(sample.shape)}"
        )
    step = _coefficients(sde_kind(kind), x_t, sigma_t, sigma_next, sigma_max, noise_scale)
    dtype = torch.promote_types(torch.promote_types(x_t.dtype, sample.dtype), torch.float32)
    x_coef, velocity_coef = (_rows(c.to(dtype), x_t) for c in (step.x_coef, step.velocity_coef))
    return (sample.to(dtype) - x_coef * x_t.to(dtype)) / velocity_coef


def flow_match_euler_step(
    x_t: torch.Tensor, velocity: torch.Tensor, sigma_t: Sigma, sigma_next: Sigma
) -> torch.Tensor:
    """Return x_t + (sigma_next - sigma_t) velocity, [B, ...] in x_t's dtype.

    The sum is taken in float32 or better: with a bfloat16 velocity the state keeps its own dtype,
    where diffusers' scheduler would return the velocity's.
    """
    return flow_sde_step_with_logprob(x_t, velocity, sigma_t, sigma_next, kind="ode").sample


def gaussian_log_ratio(
    mean_new: torch.Tensor,
    mean_old: torch.Tensor,
    sample: torch.Tensor,
    std: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log N(sample; mean_new, std) - log N(sample; mean_old, std), mean over elements, [B].

    With z = (mean_new - mean_old) / std and eps = (sample - mean_old) / std it is mean(z eps -
    z^2 / 2): exactly 0 where the means are equal, which a difference of two log-probs need not be.

    Parameters
    ----------
    mean_new, mean_old, sample
        [B, ...]; cast to float32 or better. Differentiable with respect to ``mean_new``.
    std
        [B], the standard deviation common to both. Where it is 0 the log-ratio is 0.
    mask
        Boolean, broadcastable to ``sample``: True where the latent is sampled.
    """
    dtype = torch.promote_types(torch.promote_types(mean_new.dtype, mean_old.dtype), torch.float32)
    std_rows = _rows(std.to(dtype), sample)
    has_density = std_rows > 0
    safe_std = torch.where(has_density, std_rows, 1.0)
    z = (mean_new.to(dtype) - mean_old.to(dtype)) / safe_std
    eps = (sample.to(dtype) - mean_old.to(dtype)) / safe_std
    terms = torch.where(has_density, z * (eps - 0.5 * z), 0.0)
    if mask is None:
        return terms.flatten(1).mean(dim=1)
    keep = mask.to(sample.device).expand(sample.shape)
    total_B = torch.where(keep, terms, 0.0).flatten(1).sum(dim=1)
    return total_B / keep.flatten(1).sum(dim=1).clamp(min=1)


def _coefficients(
    sde: SDE,
    x_t: torch.Tensor,
    sigma_t: Sigma,
    sigma_next: Sigma,
    sigma_max: Sigma | None,
    noise_scale: float,
) -> AffineStep:
    """Return float64 coefficients, [B], on x_t's device; computed on the CPU, where sigmas live."""
    batch = x_t.shape[0]
    second_B = None if sigma_max is None else _per_sample("sigma_max", sigma_max, batch)
    step = affine_step(
        sde,
        _per_sample("sigma_t", sigma_t, batch),
        _per_sample("sigma_next", sigma_next, batch),
        second_B,
        noise_scale,
    )
    return AffineStep(*(coefficient.to(x_t.device) for coefficient in step))


def _per_sample(name: str, sigma: Sigma, batch: int) -> torch.Tensor:
    """Return sigma as float64 [B] on the CPU."""
    sigma_B = torch.as_tensor(sigma, dtype=torch.float64, device="cpu").detach()
    if sigma_B.shape not in ((), (1,), (batch,)):
        raise ValueError(f"{name} must be a number or [{batch}], got {list(sigma_B.shape)}")
    return sigma_B.expand(batch)


def _rows(values_B: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return [B] as [B, 1, ...], to multiply [B, ...]."""
    return values_B.reshape(-1, *([1] * (like.ndim - 1)))
