"""Closed vocabularies that every layer shares."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Literal

SDEKind = Literal["flow_sde", "cps", "dance_sde", "ode"]
"""Laws of a sampler step; ``workflow_rl.loop.sde`` holds their formulas."""


Sampler = Literal["euler", "checkpoint"]
"""Who takes the steps: our Euler step, which rollout builds on, or the folder's own scheduler."""

CFGBatching = Literal["sequential", "batched"]
"""How classifier-free guidance runs its two forward passes: one by one, or as one double batch."""


class ExecutionProfile(StrEnum):
    """How the one loop is driven.

    ``SERVE``: no gradient, ODE steps. ``ROLLOUT``: serve with SDE steps inside the window, and
    capture. ``TRAIN``: recorded steps are executed again with gradient; ``DenoiseLoop.replay``
    describes them from a behaviour record, and ``recompute`` executes them.
    """

    SERVE = "serve"
    ROLLOUT = "rollout"
    TRAIN = "train"


class ConsistencyLevel(Enum):
    """What two executions of the same request are held to agree on.

    ``C0_COMPONENT``: each component's output. ``C1_LOOP``: the trajectory for a fixed seed.
    ``C2_BEHAVIOUR``: the log-prob recomputed for training equals the one captured in rollout, so
    the PPO ratio is 1 before the first update. ``C3_DISTRIBUTION``: the distribution of outputs.
    ``C4_QUALITY``: a quality score.
    """

    C0_COMPONENT = 0
    C1_LOOP = 1
    C2_BEHAVIOUR = 2
    C3_DISTRIBUTION = 3
    C4_QUALITY = 4


class GuidanceMode(StrEnum):
    """How a guidance scale enters the velocity.

    ``NONE``: not at all. ``CFG``: classifier-free, of the velocities under the prompt and under a
    negative prompt, by the family's rule. ``EMBEDDED``: the scale is an input of a
    guidance-distilled transformer.
    """

    NONE = "none"
    CFG = "cfg"
    EMBEDDED = "embedded"


class MediaKind(StrEnum):
    """What a stage produces: ``IMAGE`` [B, C, H, W] or ``VIDEO`` [B, C, T, H, W], in [0, 1]."""

    IMAGE = "image"
    VIDEO = "video"
