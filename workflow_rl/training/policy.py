"""One stage under training: its weights in every role, its optimiser, its settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.window import SDEWindow
from workflow_rl.training.ema import ExponentialMovingAverage
from workflow_rl.training.objective import STEP_WEIGHTINGS
from workflow_rl.training.weight_sync import Publication, WeightRole, WeightSyncPlan, publish
from workflow_rl.workflow import StagePlan, WorkflowStage

LR_SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
"""Learning-rate factor as a function of progress in [0, 1]."""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its schedule. ``total_steps`` is where the schedule ends; None: constant."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    min_lr_ratio: float = 0.0
    total_steps: int | None = None

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
    freeze: bool = False

    def __post_init__(self) -> None:
        if self.step_weighting not in STEP_WEIGHTINGS:
            raise UserError(
                f"unknown step weighting {self.step_weighting!r}; "
                f"choose one of {', '.join(STEP_WEIGHTINGS)}"
            )


class StagePolicy:
    """A stage's student and its weights in other roles.

    The student instance is the one that serves: training is in place, and a publication bumps its
    version. ``reference`` may be None where the KL weight is 0.
    """

    def __init__(
        self, settings: StageSettings, student: ModelInstance, reference: ModelInstance | None
    ) -> None:
        if settings.kl_weight > 0 and reference is None and not settings.freeze:
            raise UserError(
                f"stage {settings.stage.name!r} has kl_weight {settings.kl_weight} but no "
                "reference; give one or set kl_weight: 0"
            )
        self.settings = settings
        self.student = student
        self.reference = reference
        self.components = student.card.policies
        self.ema: ExponentialMovingAverage | None = None
        self.old_policy: dict[str, torch.Tensor] | None = None
        self.skipped_in_a_row = 0
        self.optimizer: torch.optim.Optimizer | None = None
        if not settings.freeze:
            self._start_training()

    def _start_training(self) -> None:
        parameters = self.parameters()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        options = self.settings.optimizer
        self.optimizer = torch.optim.AdamW(
            list(parameters.values()),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        if self.settings.ema_decay is not None:
            self.ema = ExponentialMovingAverage(parameters, self.settings.ema_decay)

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.settings.stage.name

    @property
    def version(self) -> int:
        """Weights version of the student's policy components."""
        return max(self.student.version_of(component) for component in self.components)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what training moves, as ``component.parameter`` names."""
        return {
            f"{component}.{name}": parameter
            for component in self.components
            for name, parameter in self.student.adapter.trainable(component).items()
        }

    def grad_clip_targets(self) -> dict[str, nn.Module]:
        """Return the modules whose gradients are clipped, as ``stage.component``."""
        return {f"{self.name}.{c}": self.student.component(c) for c in self.components}

    def profile(self) -> ExecutionProfile:
        """Return how the stage is driven in a rollout."""
        return ExecutionProfile.SERVE if self.settings.freeze else ExecutionProfile.ROLLOUT

    def keep_old_policy(self) -> None:
        """Copy the weights that the coming rollout is made with."""
        self.old_policy = {n: p.detach().clone() for n, p in self.parameters().items()}

    def weights(self, role: WeightRole) -> dict[str, dict[str, torch.Tensor]]:
        """Return the weights of ``role`` as component to named tensors.

        Raises
        ------
        UserError
            If the role is not kept.
        """
        match role:
            case WeightRole.STUDENT:
                flat: Mapping[str, torch.Tensor] = self.parameters()
            case WeightRole.EMA if self.ema is not None:
                student = self.parameters()
                flat = {n: a.to(student[n].dtype) for n, a in self.ema.average.items()}
            case WeightRole.OLD_POLICY if self.old_policy is not None:
                flat = self.old_policy
            case WeightRole.REFERENCE if self.reference is not None:
                flat = {
                    f"{c}.{n}": p
                    for c in self.components
                    for n, p in self.reference.adapter.trainable(c).items()
                }
            case _:
                raise UserError(f"stage {self.name!r} keeps no {role} weights")
        nested: dict[str, dict[str, torch.Tensor]] = {c: {} for c in self.components}
        for key, tensor in flat.items():
            component, _, name = key.partition(".")
            nested[component][name] = tensor
        return nested

    def publish(self, role: WeightRole, target: ModelInstance | None = None) -> Publication:
        """Publish ``role`` into ``target``; None: in place, into the student that serves."""
        plan = WeightSyncPlan(role, self.components)
        return publish(plan, self.weights(role), target or self.student)

    @contextmanager
    def serving(self, role: WeightRole) -> Iterator[ModelInstance]:
        """Serve ``role`` from the student instance for a while, then put the student back.

        Afterwards every weight is bit-identical and the version is what it was.
        """
        if role is WeightRole.STUDENT:
            yield self.student
            return
        kept = {n: p.detach().clone() for n, p in self.parameters().items()}
        versions = {c: self.student.version_of(c) for c in self.components}
        self.publish(role)
        try:
            yield self.student
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    parameter.copy_(kept[name])
            for component, version in versions.items():
                self.student.set_weights_version(component, version)
