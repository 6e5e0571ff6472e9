"""A resident chain, ready to serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.training.build import load_stage, stage_cards, stage_plan, workflow_of
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint
from workflow_rl.training.hardware import choose_device
from workflow_rl.training.weight_sync import WeightRole, WeightSyncPlan, publish
from workflow_rl.workflow import StagePlan, Workflow


@dataclass(frozen=True)
class ServedChain:
    """A workflow, its resident instances and how each stage is sampled, by stage name."""

    workflow: Workflow
    instances: Mapping[str, ModelInstance]
    plans: Mapping[str, StagePlan]

    def wake(self, name: str) -> None:
        """Have stage ``name`` on its device and every other in the CPU's memory."""
        for other, instance in self.instances.items():
            if other != name:
                _move(instance, torch.device("cpu"))
        _move(self.instances[name], self.instances[name].platform.device)


def load_chain(
    workflow_id: str,
    stages: Mapping[str, StageConfig],
    device: str | None = None,
    *,
    swap: bool = False,
) -> ServedChain:
    """Load the checkpoints that the stages name.

    With ``swap`` every stage sleeps in the CPU's memory until `ServedChain.wake`.
    """
    workflow = workflow_of(workflow_id, stages)
    cards = stage_cards(workflow, stages)
    instances = {}
    for name, card in cards.items():
        instances[name] = load_stage(name, stages[name], card, choose_device(device))
        if swap:
            _move(instances[name], torch.device("cpu"))
    return ServedChain(
        workflow, instances, {name: stage_plan(stage) for name, stage in stages.items()}
    )


def _move(instance: ModelInstance, device: torch.device) -> None:
    for module in instance.adapter.modules.values():
        module.to(device)


def served_role(config: RunConfig) -> WeightRole:
    """Return whose weights of a run are served and evaluated: its ``evaluation.weights``."""
    return WeightRole(config.evaluation.weights)


def publish_run(
    chain: ServedChain, run_dir: Path, role: WeightRole, on_skip: Callable[[str], None]
) -> int:
    """Publish the weights of a run's newest whole checkpoint into a chain.

    Returns
    -------
    int
        The iteration of the checkpoint.

    Raises
    ------
    UserError
        If the run has no checkpoint yet, or as :func:`publish_checkpoint`.
    """
    path = latest_valid(run_dir / "checkpoints", on_skip=on_skip)
    if path is None:
        raise UserError(f"{run_dir} has no checkpoint yet; let `workflow-rl train` go on")
    return publish_checkpoint(chain, path, role)


def publish_checkpoint(chain: ServedChain, path: Path, role: WeightRole) -> int:
    """Publish the weights of a checkpoint into a chain.

    Each tensor is cast to the dtype of the parameter it goes to: some modules stay in float32
    whatever the stage's dtype. Stages that the run kept frozen stay as they are.

    Returns
    -------
    int
        The iteration of the checkpoint.

    Raises
    ------
    UserError
        If it is damaged, keeps no weights in that role, holds none of a stage of this chain, or
        names a weight that the model lacks.
    """
    iteration, tensors, _ = load_checkpoint(path)
    folder = {WeightRole.STUDENT: "weights", WeightRole.EMA: "ema"}[role]
    published = 0
    for name, instance in chain.instances.items():
        weights = _component_weights(tensors, f"{name}/{folder}/", instance)
        if not weights and any(key.startswith(f"{name}/") for key in tensors):
            raise UserError(f"{path} keeps no {role} weights of stage {name!r}")
        if weights:
            plan = WeightSyncPlan(role, tuple(weights))
            published += publish(plan, weights, instance, version=iteration).num_tensors
    if published == 0:
        raise UserError(
            f"{path} holds no weights of the stages {list(chain.instances)}; "
            "serve the chain that the run trained"
        )
    return iteration


def _component_weights(
    tensors: Mapping[str, torch.Tensor], prefix: str, instance: ModelInstance
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors under ``prefix``, each on the device and in the dtype of its parameter."""
    slots = {
        f"{component}.{name}": slot
        for component in instance.card.policies
        for name, slot in instance.component(component).named_parameters()
    }
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if not key.startswith(prefix):
            continue
        full_name = key.removeprefix(prefix)
        if full_name not in slots:
            raise UserError(
                f"the run trained {key}, which {instance.card.model_id} lacks; "
                "serve the model that the run began with"
            )
        component, _, name = full_name.partition(".")
        weights.setdefault(component, {})[name] = tensor.to(slots[full_name])
    return weights
