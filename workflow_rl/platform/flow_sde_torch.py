"""The PyTorch kernels of ``FLOW_SDE_STEP``: the same two functions, eager or compiled.

Drawing and scoring are two functions on purpose: a rollout scores its sample with the very graph
that training scores it with, so a compiler cannot fuse the two differently and the log-probs agree
to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from workflow_rl.platform.flow_sde_step import FlowSDEStep, FlowSDEStepResult

Draw = Callable[..., torch.Tensor]
Score = Callable[..., tuple[torch.Tensor, torch.Tensor]]


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
    weight_B1: torch.Tensor,
    offset_B1: torch.Tensor,
    sample_BN: torch.Tensor,
    mask_BN: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean [B, N] and the log-prob [B] of a sample."""
    mean_BN = _mean(x_BN, velocity_BN, x_coef_B1, velocity_coef_B1, mask_BN)
    square_BN = (sample_BN - mean_BN) ** 2
    if mask_BN is None:
        return mean_BN, (-weight_B1 * square_BN.mean(dim=1, keepdim=True) - offset_B1)[:, 0]
    count_B1 = mask_BN.sum(dim=1, keepdim=True)
    total_B1 = torch.where(mask_BN, square_BN, 0.0).sum(dim=1, keepdim=True)
    log_prob_B1 = -weight_B1 * total_B1 / count_B1.clamp(min=1) - offset_B1
    return mean_BN, torch.where(count_B1 > 0, log_prob_B1, 0.0)[:, 0]


def _kernel(draw: Draw, score: Score) -> FlowSDEStep:
    def flow_sde_step(
        x_t: torch.Tensor,
        velocity: torch.Tensor,
        x_coef_B: torch.Tensor,
        velocity_coef_B: torch.Tensor,
        std_B: torch.Tensor,
        weight_B: torch.Tensor,
        offset_B: torch.Tensor,
        noise: torch.Tensor | None,
        prev_sample: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> FlowSDEStepResult:
        dtype = torch.promote_types(torch.promote_types(x_t.dtype, velocity.dtype), torch.float32)

        def flat(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype).reshape(x_t.shape[0], -1)

        x_BN, velocity_BN = flat(x_t), flat(velocity)
        a_B1, b_B1 = flat(x_coef_B), flat(velocity_coef_B)
        mask_BN = None if mask is None else mask.reshape(x_t.shape[0], -1)
        if prev_sample is not None:
            sample = scored = prev_sample
        else:
            noise_BN = None if noise is None else flat(noise)
            drawn_BN = draw(x_BN, velocity_BN, a_B1, b_B1, flat(std_B), noise_BN, mask_BN)
            sample = drawn_BN.reshape(x_t.shape).to(x_t.dtype)
            scored = sample.detach()  # Else the mean's gradient would cancel against the sample's.
        mean_BN, log_prob_B = score(
            x_BN,
            velocity_BN,
            a_B1,
            b_B1,
            flat(weight_B),
            flat(offset_B),
            flat(scored),
            mask_BN,
        )
        return FlowSDEStepResult(sample, log_prob_B, mean_BN.reshape(x_t.shape))

    return flow_sde_step


def eager_kernel() -> FlowSDEStep:
    """Return the eager kernel."""
    return _kernel(_draw, _score)


def compiled_kernel() -> FlowSDEStep:
    """Return the compiled kernel; sizes are dynamic, so a new one is no rebuild."""
    return _kernel(
        torch.compile(_draw, dynamic=True, fullgraph=True),
        torch.compile(_score, dynamic=True, fullgraph=True),
    )
