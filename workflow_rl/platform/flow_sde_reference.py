"""The oracle of ``FLOW_SDE_STEP``: numpy, float64, one sample at a time, no tricks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workflow_rl.errors import WorkflowRLError
from workflow_rl.platform.flow_sde_step import FlowSDEStepResult

Array = npt.NDArray[np.float64]


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
        error = (_array(sample) - mean)[keep]
        scored = (
            -float(weight_B[row]) * np.mean(error**2) - float(offset_B[row]) if error.size else 0
        )
        log_probs.append(float(scored))
    compute = torch.promote_types(torch.promote_types(x_t.dtype, velocity.dtype), torch.float32)
    return FlowSDEStepResult(
        torch.stack(samples),
        torch.tensor(log_probs, dtype=compute),
        torch.stack(means).to(compute),
    )


def _array(tensor: torch.Tensor) -> Array:
    array: Array = tensor.detach().cpu().double().numpy()
    return array
