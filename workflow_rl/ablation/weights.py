"""The control's check: did any weight move under a constant reward?"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from workflow_rl.config import RunConfig
from workflow_rl.errors import WorkflowRLError
from workflow_rl.training.build import build_method
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint

CHECK_FILE = "weights_check.json"
KINDS = ("weights", "ema")


@dataclass(frozen=True)
class WeightsCheck:
    """Of ``tensors`` trained weights and averages, ``moved`` are not what they began as, in a bit.

    ``first`` names one that moved.
    """

    tensors: int
    moved: int
    first: str | None


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


def write_check(run_dir: Path, check: WeightsCheck) -> None:
    """Write the check beside the run's figures, whole or not at all."""
    path = run_dir / CHECK_FILE
    temporary = path.with_name(f".{CHECK_FILE}.part")
    temporary.write_text(json.dumps(asdict(check)) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_check(run_dir: Path) -> WeightsCheck | None:
    """Return the check of a run; None where there is none."""
    path = run_dir / CHECK_FILE
    if not path.is_file():
        return None
    return WeightsCheck(**json.loads(path.read_text(encoding="utf-8")))
