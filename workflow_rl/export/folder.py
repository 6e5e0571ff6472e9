"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from workflow_rl.errors import UserError, WorkflowRLError

WEIGHTS_SUFFIX = ".safetensors"
OTHER_WEIGHTS = (".bin", ".msgpack", ".h5", ".ckpt", ".pt", ".pth", ".onnx", ".onnx_data", ".gguf")
"""Suffixes of weights that are not read here, and so are not copied."""


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to write into, and rename it to ``target`` at the end.

    Whatever is raised before, nothing stays behind. What a killed process left is cleared away.

    Raises
    ------
    UserError
        If ``target`` is there at the end.
    WorkflowRLError
        If the disk refuses.
    """
    made = [path for path in target.parents if not path.exists()]
    building = target.with_name(f".tmp-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        yield building
        if target.exists():
            raise UserError(f"{target} exists already; give another folder with --output")
        building.rename(target)
    except BaseException as error:
        shutil.rmtree(building, ignore_errors=True)
        with suppress(OSError):
            for path in made:
                path.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise WorkflowRLError(
                f"cannot write {target}: {error}; nothing was left there, make room and try again"
            ) from error
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file that is never changed a second name; copy it where the disk does not allow it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def copy_small_files(source: Path, target: Path) -> None:
    """Copy what is in a component's folder but weights: configuration, vocabulary, index."""
    for path in sorted(source.rglob("*")):
        is_weights = path.suffix in (WEIGHTS_SUFFIX, *OTHER_WEIGHTS) or ".index." in path.name
        if path.is_file() and not is_weights:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
