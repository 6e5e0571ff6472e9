"""What a run trained in one stage, read from its checkpoint, and where it goes in the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config import RunConfig
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.lora_file import lora_layouts
from workflow_rl.errors import UserError
from workflow_rl.export.options import Weights
from workflow_rl.models.lora import ADAPTER_NAME, alpha_of, start_of
from workflow_rl.training.build import stage_card
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint
from workflow_rl.training.checkpoint_folders import checkpoint_folders


def cast(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return ``tensor`` in ``dtype``; raise a UserError where float16 cannot hold its values."""
    result = tensor.to(dtype)
    if dtype is torch.float16 and not bool(result.isfinite().all()):
        raise UserError(f"{name} has values beyond float16; use --dtype bfloat16 or float32")
    return result


@dataclass(frozen=True)
class LowRank:
    """The update (alpha / rank) B A of one linear layer: A [rank, in], B [out, rank]."""

    a: torch.Tensor
    b: torch.Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.a)

    def delta(self) -> torch.Tensor:
        """Return the update of the weight [out, in], float32."""
        return self.alpha / self.rank * (self.b.float() @ self.a.float())


@dataclass(frozen=True)
class TrainedStage:
    """A stage's base model, and what a run trained in it.

    Parameters
    ----------
    card
        The base model.
    iteration
        Of the checkpoint.
    weights
        Whose weights.
    full
        Component to trained parameters, by their name in the component.
    adapters
        Component to layer name to its update, where a LoRA was trained.
    """

    card: ModelCard
    iteration: int
    weights: Weights
    full: Mapping[str, Mapping[str, torch.Tensor]]
    adapters: Mapping[str, Mapping[str, LowRank]]

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the components that may have been trained."""
        return self.card.policies


def find_checkpoint(
    run_dir: Path, iteration: int | None, on_message: Callable[[str], None]
) -> Path:
    """Return the folder of a run's checkpoint: of ``iteration``, or the newest whole one.

    Raises
    ------
    UserError
        If there is none, or none of that iteration.
    """
    root = run_dir / "checkpoints"
    folders = checkpoint_folders(root)
    if not folders:
        raise UserError(f"{run_dir} has no checkpoint yet; let `workflow-rl train` go on")
    if iteration is None:
        newest = latest_valid(root, on_skip=on_message)
        assert newest is not None
        return newest
    by_number = {int(path.name.rpartition("_")[2]): path for path in folders}
    if iteration not in by_number:
        kept = ", ".join(str(number) for number in by_number)
        raise UserError(f"{run_dir} has no checkpoint of iteration {iteration}; it has {kept}")
    return by_number[iteration]


def read_stage(
    config: RunConfig,
    stage_name: str,
    weights: Weights,
    iteration: int | None,
    on_message: Callable[[str], None],
) -> TrainedStage:
    """Read what the run of ``config`` trained in a stage.

    Raises
    ------
    UserError
        If there is no such checkpoint, or it holds nothing of the stage.
    """
    stage = config.stages[stage_name]
    path = find_checkpoint(config.output_dir, iteration, on_message)
    prefix = f"{stage_name}/{'ema' if weights == 'ema' else 'weights'}/"
    number, tensors, _ = load_checkpoint(path, prefix)
    if not tensors:
        raise UserError(
            f"{path} holds no {weights} weights of stage {stage_name!r}; use another checkpoint"
        )
    if number < config.training.iterations:
        on_message(f"the run has done {number} of its {config.training.iterations} iterations")
    card = stage_card(stage_name, stage)
    full: dict[str, dict[str, torch.Tensor]] = {component: {} for component in card.policies}
    for key, tensor in tensors.items():
        component, _, name = key.removeprefix(prefix).partition(".")
        if component not in full:
            raise UserError(
                f"the run trained {key}, which {card.model_id} lacks; put back the model that the "
                "run began with"
            )
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{path}: {key} is not finite; use an earlier checkpoint")
        full[component][name] = tensor
    if stage.lora is None:
        return TrainedStage(card, number, weights, full, {})
    index = read_model_index(card.source)
    where = f"stages.{stage_name}.lora"
    layouts = lora_layouts(
        card.source, index, FAMILIES[index["_class_name"]].lora_targets, stage.lora, where
    )
    adapters = {
        component: _low_rank(full[component], alpha_of(layout, start_of(layout), where))
        for component, layout in layouts.items()
    }
    return TrainedStage(card, number, weights, {}, adapters)


def _low_rank(tensors: Mapping[str, torch.Tensor], alpha: float) -> dict[str, LowRank]:
    """Pair the A and B of each layer."""
    part = {letter: f".lora_{letter}.{ADAPTER_NAME}.weight" for letter in "AB"}
    layers = sorted(name.removesuffix(part["A"]) for name in tensors if name.endswith(part["A"]))
    return {
        layer: LowRank(tensors[layer + part["A"]], tensors[layer + part["B"]], alpha)
        for layer in layers
    }
