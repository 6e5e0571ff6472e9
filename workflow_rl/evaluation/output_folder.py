"""Where an evaluation writes, and how it appears there whole or not at all."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from workflow_rl.errors import UserError
from workflow_rl.evaluation.candidates import Candidate, RunCandidate

EVALUATIONS = "evaluations"
MARK = "comparison.json"
"""File by which the folder of an earlier evaluation, which may be replaced, is known."""
MAX_NAME = 100


def default_output(candidates: Sequence[Candidate]) -> Path:
    """Return ``evaluations/NAME`` in the first run, or in the working directory without a run.

    The name is that of the candidates: the same candidates have the same folder.
    """
    runs = [c for c in candidates if isinstance(c, RunCandidate)]
    root = runs[0].path if runs else Path()
    return root / EVALUATIONS / _name(candidates)


def _name(candidates: Sequence[Candidate]) -> str:
    parts = [
        candidate.path.resolve().name + candidate.argument.removeprefix(str(candidate.path))
        for candidate in candidates
    ]
    name = re.sub(r"[^\w@.-]+", "_", "_vs_".join(parts))
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{name[:MAX_NAME]}_{digest}"


def check_output(folder: Path) -> None:
    """Raise a UserError if the folder holds anything but an earlier evaluation."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output {folder} is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        raise UserError(
            f"--output {folder} holds files that are no evaluation's; give a new or empty folder"
        )


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, which becomes ``folder`` unless the block raises.

    An earlier evaluation in ``folder`` stays until then. What a killed process left is cleared
    away by the next one.
    """
    # Through a link, the folder that it leads to is replaced.
    folder = folder.resolve()
    made = [p for p in (folder.parent, *folder.parent.parents) if not p.exists()]
    building = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        yield building
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
            building.rename(folder)
            shutil.rmtree(old)
        else:
            building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if not folder.exists():
            for path in made:  # deepest first; one that another process uses stays
                if path.exists() and not any(path.iterdir()):
                    path.rmdir()
