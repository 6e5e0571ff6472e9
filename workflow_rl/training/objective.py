"""The objective of one stochastic step: PPO-clip with a KL to the reference, weighted by step.

All functions are pure; tensors are [B], one entry per sample, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

StepWeighting = Callable[[torch.Tensor], torch.Tensor]

STEP_WEIGHTINGS: Mapping[str, StepWeighting] = {
    "gaussian": torch.ones_like,
    "cps": lambda std: 2 * std.square(),
    "guard": lambda std: std,
}
"""Weight w(s) on a step's Gaussian log-ratio, as a function of its standard deviation s.

``gaussian``: 1, the exact likelihood ratio; its gradient goes as 1/s, so low-noise steps dominate.
``cps``: 2 s^2, the squared-error log-prob of Flow-CPS (Wang & Yu 2025, eq. 14). ``guard``: s, the
step-balanced ratio of GRPO-Guard (Wang et al. 2025). The choice belongs to the objective and is
independent of the SDE that samples. A new weighting is one entry.
"""


def gaussian_kl(
    mean: torch.Tensor,
    mean_ref: torch.Tensor,
    std: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return KL(N(mean, s^2) || N(mean_ref, s^2)) = mean((mean - mean_ref)^2) / (2 s^2).

    Parameters
    ----------
    mean, mean_ref
        [B, ...] float32. The mean is taken over all non-batch dimensions, as for log-probs.
    std
        [B], positive.
    mask
        Boolean, broadcastable to ``mean``: True where the latent is sampled. The mean is over
        these.

    Returns
    -------
    Tensor
        [B], nats per dimension.
    """
    square = (mean - mean_ref).square()
    if mask is None:
        return square.flatten(1).mean(1) / (2 * std.square())
    keep = mask.expand(mean.shape)
    total_B = torch.where(keep, square, 0.0).flatten(1).sum(1)
    return total_B / keep.flatten(1).sum(1).clamp(min=1) / (2 * std.square())


def ppo_clip_loss(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the PPO-clip loss per sample, and the ratio (Schulman et al. 2017, eq. 7).

    Parameters
    ----------
    log_ratio
        [B], weighted.
    advantage
        [B].
    clip
        Half width of the trusted interval around ratio 1.

    Returns
    -------
    loss, ratio : Tensor
        [B] each; loss = -min(r A, clip(r, 1 - clip, 1 + clip) A).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantage, clipped * advantage), ratio
