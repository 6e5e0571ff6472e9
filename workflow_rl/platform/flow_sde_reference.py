"""The oracle of ``FLOW_SDE_STEP``: numpy, float64, one sample at a time, no tricks."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from workflow_rl.errors import WorkflowRLError
from workflow_rl.platform.flow_sde_step import FlowSDEStepResult, LogProbForm

Array = npt.NDArray[np.float64]


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
    """See :class:`workflow_rl.platform.flow_sde_step.FlowSDEStep`; has no gradient.

    Raises
    ------
    WorkflowRLError
        If a gradient is asked for.
    """
    if torch.is_grad_enabled() and (velocity.requires_grad or x_t.requires_grad):
        raise WorkflowRLError(
            "kernel 'numpy_reference' has no gradient; train with 'torch_eager' or 'torch_compile'"
        )
    samples: list[torch.Tensor] = []
    log_probs: list[float] = []
    means: list[torch.Tensor] = []
    for row in range(x_t.shape[0]):
        x = _array(x_t[row])
        keep = np.ones(x.shape, dtype=bool) if mask is None else mask[row].cpu().numpy()
        std = float(std_B[row])
        mean = float(x_coef_B[row]) * x + float(velocity_coef_B[row]) * _array(velocity[row])
        mean = np.where(keep, mean, x)
        if prev_sample is not None:
            sample = prev_sample[row]
        else:
            drawn = mean if noise is None else mean + std * np.where(keep, _array(noise[row]), 0.0)
            sample = torch.from_numpy(drawn).to(x_t.dtype)
        samples.append(sample)
        means.append(torch.from_numpy(mean))
        log_probs.append(_log_prob((_array(sample) - mean)[keep], std, log_prob_form))
    compute = torch.promote_types(torch.promote_types(x_t.dtype, velocity.dtype), torch.float32)
    return FlowSDEStepResult(
        torch.stack(samples),
        torch.tensor(log_probs, dtype=compute),
        torch.stack(means).to(compute),
    )


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().double().numpy()
    return array


def _log_prob(error: Array, std: float, form: LogProbForm) -> float:
    if form == "none" or std == 0.0 or error.size == 0:
        return 0.0
    if form == "squared_error":
        return float(np.mean(-(error**2)))
    density = -(error**2) / (2.0 * std**2) - math.log(std) - 0.5 * math.log(2.0 * math.pi)
    return float(np.mean(density))
