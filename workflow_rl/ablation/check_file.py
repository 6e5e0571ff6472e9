"""What the control's check found, as a file in the run's directory. Needs no PyTorch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from workflow_rl.errors import UserError
from workflow_rl.whole_files import write_whole

CHECK_FILE = "weights_check.json"


@dataclass(frozen=True)
class WeightsCheck:
    """Of ``tensors`` trained weights and averages, ``moved`` are not what they began as, in a bit.

    ``first`` names one that moved.
    """

    tensors: int
    moved: int
    first: str | None


def write_check(run_dir: Path, check: WeightsCheck) -> None:
    """Write the check beside the run's figures, whole or not at all."""
    write_whole(run_dir / CHECK_FILE, json.dumps(asdict(check)) + "\n")


def read_check(run_dir: Path) -> WeightsCheck | None:
    """Return the check of a run; None where there is none.

    Raises
    ------
    UserError
        If the file is damaged.
    """
    path = run_dir / CHECK_FILE
    if not path.is_file():
        return None
    try:
        return WeightsCheck(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise UserError(
            f"{path} is damaged; delete it, and the same command checks again"
        ) from None
