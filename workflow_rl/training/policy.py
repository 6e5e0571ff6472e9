"""One stage under training: its weights in every role and its optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from workflow_rl.config.train_modules import check_parts, has_part
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.models.lora import adapters_off, base_as_lora, has_lora
from workflow_rl.training.ema import ExponentialMovingAverage
from workflow_rl.training.settings import StageSettings
from workflow_rl.training.weight_sync import Publication, WeightRole, WeightSyncPlan, publish


class StagePolicy:
    """A stage's student and its weights in other roles.

    The student instance is the one that serves: training is in place, and a publication bumps its
    version. ``reference`` may be None where the KL weight is 0, and where the student has LoRA
    adapters: then the reference is the student with its adapters off.

    Optimiser and EMA work on ``masters``. A master is the parameter itself, or, where that is in a
    16-bit dtype in which a step of 1e-5 rounds to nothing, a float32 copy that the parameter is
    rounded from after each step (Micikevicius et al. 2018, sec. 3.1).
    """

    def __init__(
        self, settings: StageSettings, student: ModelInstance, reference: ModelInstance | None
    ) -> None:
        self.has_lora = all(has_lora(student.component(c)) for c in student.card.policies)
        needs_reference = settings.kl_weight > 0 and not (settings.freeze or self.has_lora)
        if needs_reference and reference is None:
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
        self.skipped_total = 0
        self.updated_components: set[str] = set()  # in this run
        self.versions_issued = self.version
        self._parameters: dict[str, nn.Parameter] | None = None
        self.masters: dict[str, torch.Tensor] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        if not settings.freeze:
            self._start_training()

    def _start_training(self) -> None:
        parameters = self.parameters()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self.masters = {
            name: parameter if parameter.dtype.itemsize >= 4 else parameter.detach().float()
            for name, parameter in parameters.items()
        }
        options = self.settings.optimizer
        self.optimizer = torch.optim.AdamW(
            list(self.masters.values()),
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        if self.settings.ema_decay is not None:
            self.ema = ExponentialMovingAverage(self.masters, self.settings.ema_decay)

    @property
    def name(self) -> str:
        """Name of the stage."""
        return self.settings.stage.name

    @property
    def version(self) -> int:
        """Weights version of the student's policy components."""
        return max(self.student.version_of(component) for component in self.components)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what training moves, as ``component.parameter`` names.

        Looked up once: the objects stay, whatever is written to them or where they move.

        Raises
        ------
        UserError
            If a name in ``train_modules`` is no part of any parameter's name.
        """
        if self._parameters is None:
            self._parameters = self._find_parameters()
        return self._parameters

    def _find_parameters(self) -> dict[str, nn.Parameter]:
        parts = self.settings.train_modules
        every = {
            f"{component}.{name}": parameter
            for component in self.components
            for name, parameter in self.student.adapter.trainable(component).items()
        }
        check_parts(every, parts, f"stage {self.name!r}: train_modules")
        if not parts:
            return every
        return {n: p for n, p in every.items() if any(has_part(n, part) for part in parts)}

    def masters_by_component(self) -> dict[str, list[torch.Tensor]]:
        """Return the masters of each component, in the order of its parameters."""
        grouped: dict[str, list[torch.Tensor]] = {c: [] for c in self.components}
        for key, master in self.masters.items():
            grouped[key.partition(".")[0]].append(master)
        return grouped

    def raise_gradients(self) -> None:
        """Give each float32 copy its parameter's gradient."""
        for key, parameter in self.parameters().items():
            master = self.masters[key]
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()

    @torch.no_grad()
    def lower_masters(self) -> None:
        """Round each float32 copy into its parameter."""
        for key, parameter in self.parameters().items():
            if self.masters[key] is not parameter:
                parameter.copy_(self.masters[key])

    def drop_gradients(self) -> None:
        """Free the gradients of masters and parameters."""
        for tensor in (*self.parameters().values(), *self.masters.values()):
            tensor.grad = None

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
            case WeightRole.REFERENCE if self.has_lora:
                flat = {
                    f"{c}.{n}": tensor
                    for c in self.components
                    for n, tensor in base_as_lora(self.student.component(c)).items()
                }
            case _:
                raise UserError(f"stage {self.name!r} keeps no {role} weights")
        nested: dict[str, dict[str, torch.Tensor]] = {c: {} for c in self.components}
        for key, tensor in flat.items():
            component, _, name = key.partition(".")
            nested[component][name] = tensor
        return nested

    @contextmanager
    def as_reference(self) -> Iterator[ModelInstance]:
        """Give the instance whose step means the KL is taken to, for a while.

        With LoRA adapters it is the student with them off; they are on again afterwards.
        """
        if self.reference is not None:
            yield self.reference
            return
        with adapters_off([self.student.component(c) for c in self.components]):
            yield self.student

    def publish(self, role: WeightRole, target: ModelInstance | None = None) -> Publication:
        """Publish ``role`` into ``target``; None: in place, into the student that serves.

        The student's versions are never issued twice; another target counts its own.
        """
        plan = WeightSyncPlan(role, self.components)
        if target is not None and target is not self.student:
            return publish(plan, self.weights(role), target)
        version = max(self.versions_issued, self.version) + 1
        publication = publish(plan, self.weights(role), self.student, version)
        self.versions_issued = version
        return publication

    @contextmanager
    def serving(self, role: WeightRole) -> Iterator[ModelInstance]:
        """Serve ``role`` from the student instance for a while, then put the student back.

        Afterwards, or where the publication is refused, every weight is bit-identical and the
        version is what it was.
        """
        if role is WeightRole.STUDENT:
            yield self.student
            return
        kept = {n: p.detach().clone() for n, p in self.parameters().items()}
        versions = {c: self.student.version_of(c) for c in self.components}
        try:
            self.publish(role)
            yield self.student
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters().items():
                    parameter.copy_(kept[name])
            for component, version in versions.items():
                self.student.set_weights_version(component, version)
