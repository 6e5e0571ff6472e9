"""How one stage samples and trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from workflow_rl.errors import UserError
from workflow_rl.loop.denoise import ODE
from workflow_rl.loop.sde import SDE, sde_kind
from workflow_rl.loop.window import SDEWindow
from workflow_rl.training.objective import STEP_WEIGHTINGS
from workflow_rl.workflow import StagePlan, WorkflowStage

LR_SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Learning-rate factor as a function of progress in [0, 1]."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. ``total_steps`` is where a linear or cosine schedule ends."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in LR_SCHEDULES:
            raise UserError(
                f"unknown learning-rate schedule {self.schedule!r}; "
                f"choose one of {', '.join(LR_SCHEDULES)}"
            )
        if self.schedule != "constant" and self.total_steps is None:
            raise UserError(
                f"the schedule {self.schedule!r} needs total_steps, where it ends; "
                "set it or use schedule: constant"
            )

    def lr_at(self, step: int) -> float:
        """Return the learning rate of iteration ``step`` (0-based): a pure function."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        factor = LR_SCHEDULES[self.schedule](progress)
        return self.lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * factor)


@dataclass(frozen=True)
class StageSettings:
    """How one stage samples and trains.

    Parameters
    ----------
    stage
        Its place in the workflow.
    plan
        Sampling parameters, branching and batch size of the rollout.
    optimizer
        Learning rate and schedule.
    window
        Which steps are stochastic.
    ppo_clip
        Half width of the PPO interval, in units of the weighted ratio.
    kl_weight
        Weight beta of the KL to the reference; the KL of a step is weighted like its ratio.
    step_weighting
        A name in ``STEP_WEIGHTINGS``.
    max_grad_norm
        Gradients are scaled down to this norm.
    micro_batch_size
        Samples per forward and backward pass; None: the rollout's ``slots``, with which recomputed
        log-probs are equal to the bit.
    ema_decay
        Decay of the moving average; None: no average is kept.
    train_modules
        Parts of the policy's modules that are trained, such as ``time_text_embed``: a parameter
        trains if its name has one of them as a dotted part. Empty: the whole module, or its LoRA.
    freeze
        Sample without noise in the steps, and never train.
    """

    stage: WorkflowStage
    plan: StagePlan
    optimizer: OptimizerSettings
    window: SDEWindow = field(default_factory=SDEWindow)
    ppo_clip: float = 1e-3
    kl_weight: float = 0.01
    step_weighting: str = "cps"
    max_grad_norm: float = 1.0
    micro_batch_size: int | None = None
    ema_decay: float | None = None
    train_modules: tuple[str, ...] = ()
    freeze: bool = False

    def __post_init__(self) -> None:
        if self.step_weighting not in STEP_WEIGHTINGS:
            raise UserError(
                f"unknown step weighting {self.step_weighting!r}; "
                f"choose one of {', '.join(STEP_WEIGHTINGS)}"
            )
        if not self.freeze:
            self._check_noise(sde_kind(self.plan.params.sde_kind))
            self._check_window()

    def _check_noise(self, sde: SDE) -> None:
        scale, largest = self.plan.params.sde_noise_scale, sde.max_noise_scale
        if sde.name == ODE:
            raise UserError(
                f"stage {self.stage.name!r} samples with 'ode', which has no log-prob to train; "
                "choose another SDE kind or freeze the stage"
            )
        if not 0 < scale <= largest:
            limit = "above 0" if math.isinf(largest) else f"in (0, {largest:g}]"
            raise UserError(
                f"stage {self.stage.name!r} has noise scale {scale:g}, but to train with "
                f"{sde.name!r} it must be {limit}"
            )

    def _check_window(self) -> None:
        candidates = self.plan.params.num_inference_steps - 1
        steps = self.window.steps(candidates + 1, iteration=0, seed=0)
        if not steps or steps[-1] >= candidates:
            raise UserError(
                f"stage {self.stage.name!r} would train on the steps {list(steps)}, but of "
                f"{candidates + 1} steps those that can be stochastic are "
                f"{list(range(candidates))}; change the SDE window or the number of steps"
            )
