"""The control's check: did any weight move under a constant reward?"""

from __future__ import annotations

import torch

from workflow_rl.ablation.check_file import WeightsCheck
from workflow_rl.config import RunConfig
from workflow_rl.errors import WorkflowRLError
from workflow_rl.training.build import build_method
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint

KINDS = ("weights", "ema")


def check_weights(config: RunConfig) -> WeightsCheck:
    """Compare the last checkpoint of a run with its models as they are loaded.

    Raises
    ------
    WorkflowRLError
        If the run has no checkpoint, or one of other tensors.
    """
    path = latest_valid(config.output_dir / "checkpoints", on_skip=lambda line: None)
    if path is None:
        raise WorkflowRLError(f"{config.output_dir} has no checkpoint to compare with its start")
    after = _trained(load_checkpoint(path).tensors)
    before = _trained(build_method(config).state_tensors())
    if set(after) != set(before):
        name = min(set(after) ^ set(before))
        raise WorkflowRLError(f"{path} has other tensors than the models, such as {name}")
    moved = [name for name in after if not _same_bits(before[name], after[name])]
    return WeightsCheck(len(after), len(moved), min(moved, default=None))


def _trained(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights and their averages, named by stage, without the optimiser's state."""
    return {name: t.cpu() for name, t in tensors.items() if name.split("/")[1] in KINDS}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors are equal in type, shape and every bit; NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat, other_flat = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(flat, other_flat)
