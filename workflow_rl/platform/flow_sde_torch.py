"""The PyTorch kernels of ``FLOW_SDE_STEP``: the same two functions, eager or compiled.

Drawing and scoring are two functions on purpose: a rollout scores its sample with the very graph
that training scores it with, so a compiler cannot fuse the two differently and the log-probs agree
to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from workflow_rl.platform.flow_sde_step import FlowSDEStepResult, LogProbForm

Draw = Callable[..., torch.Tensor]
Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _mean(
    x_BN: torch.Tensor,
    velocity_BN: torch.Tensor,
    x_coef_B1: torch.Tensor,
    velocity_coef_B1: torch.Tensor,
    mask_BN: torch.Tensor | None,
) -> torch.Tensor:
    mean_BN = x_coef_B1 * x_BN + velocity_coef_B1 * velocity_BN
    return mean_BN if mask_BN is None else torch.where(mask_BN, mean_BN, x_BN)


def _draw(
    x_BN: torch.Tensor,
    velocity_BN: torch.Tensor,
    x_coef_B1: torch.Tensor,
    velocity_coef_B1: torch.Tensor,
    std_B1: torch.Tensor,
    noise_BN: torch.Tensor | None,
    mask_BN: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sample in the compute dtype."""
    mean_BN = _mean(x_BN, velocity_BN, x_coef_B1, velocity_coef_B1, mask_BN)
    if noise_BN is None:
        return mean_BN
    step_BN = std_B1 * noise_BN
    if mask_BN is not None:
        step_BN = torch.where(mask_BN, step_BN, 0.0)
    return mean_BN + step_BN


def _score(
    x_BN: torch.Tensor,
    velocity_BN: torch.Tensor,
    x_coef_B1: torch.Tensor,
    velocity_coef_B1: torch.Tensor,
    std_B1: torch.Tensor,
    sample_BN: torch.Tensor,
    log_prob_form: LogProbForm,
    mask_BN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean [B, N] and the log-prob [B] of a sample."""
    mean_BN = _mean(x_BN, velocity_BN, x_coef_B1, velocity_coef_B1, mask_BN)
    if log_prob_form == "none":
        return mean_BN, torch.zeros_like(mean_BN[:, 0])
    # Where s = 0, divide by 1 instead: a NaN there would reach the gradient through torch.where.
    has_density_B1 = std_B1 > 0
    safe_std_B1 = torch.where(has_density_B1, std_B1, 1.0)
    error_BN = sample_BN - mean_BN
    if log_prob_form == "gaussian":
        log_prob_BN = -0.5 * (error_BN / safe_std_B1) ** 2 - safe_std_B1.log() - HALF_LOG_2PI
    else:
        log_prob_BN = -(error_BN**2)
    log_prob_BN = torch.where(has_density_B1, log_prob_BN, 0.0)
    return mean_BN, masked_mean(log_prob_BN, mask_BN)


def masked_mean(values_BN: torch.Tensor, mask_BN: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over each row's True elements, [B]; 0 for a row that has none."""
    if mask_BN is None:
        return values_BN.mean(dim=1)
    return torch.where(mask_BN, values_BN, 0.0).sum(dim=1) / mask_BN.sum(dim=1).clamp(min=1)


def _kernel(draw: Draw, score: Score) -> Callable[..., FlowSDEStepResult]:
    def flow_sde_step(
        x_t: torch.Tensor,
        velocity: torch.Tensor,
        x_coef_B: torch.Tensor,
        velocity_coef_B: torch.Tensor,
        std_B: torch.Tensor,
        noise: torch.Tensor | None,
        prev_sample: torch.Tensor | None,
        log_prob_form: LogProbForm,
        mask: torch.Tensor | None,
    ) -> FlowSDEStepResult:
        dtype = torch.promote_types(torch.promote_types(x_t.dtype, velocity.dtype), torch.float32)

        def flat(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype).reshape(x_t.shape[0], -1)

        x_BN, velocity_BN = flat(x_t), flat(velocity)
        a_B1, b_B1, std_B1 = flat(x_coef_B), flat(velocity_coef_B), flat(std_B)
        mask_BN = None if mask is None else mask.reshape(x_t.shape[0], -1)
        sample = prev_sample
        if sample is None:
            noise_BN = None if noise is None else flat(noise)
            drawn_BN = draw(x_BN, velocity_BN, a_B1, b_B1, std_B1, noise_BN, mask_BN)
            sample = drawn_BN.reshape(x_t.shape).to(x_t.dtype)
        mean_BN, log_prob_B = score(
            x_BN, velocity_BN, a_B1, b_B1, std_B1, flat(sample), log_prob_form, mask_BN
        )
        return FlowSDEStepResult(sample, log_prob_B, mean_BN.reshape(x_t.shape))

    return flow_sde_step


def eager_kernel() -> Callable[..., FlowSDEStepResult]:
    """Return the eager kernel."""
    return _kernel(_draw, _score)


def compiled_kernel() -> Callable[..., FlowSDEStepResult]:
    """Return the compiled kernel; sizes are dynamic, so a new one is no rebuild."""
    return _kernel(
        torch.compile(_draw, dynamic=True, fullgraph=True),
        torch.compile(_score, dynamic=True, fullgraph=True),
    )
