"""Checkpoints that appear whole or not at all, without pickle.

A checkpoint is a folder ``iteration_00000010`` with

- ``model-*.safetensors``: every tensor, written and read by ``torch.distributed.checkpoint``
  through its Hugging Face storage;
- ``state.json``: what is not a tensor (counters, data cursor, versions);
- ``manifest.json``, written last: name, size and BLAKE2b digest of every other file.

It is built under a name that no reader looks at, forced to the disk and then renamed, so a
process killed at any moment leaves the old folders, or the old folders and the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.training.checkpoint_folders import FOLDER, checkpoint_folders

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
MAX_FILE_BYTES = 2 * 2**30  # the writer holds one file in memory
_TEMPORARY = ".tmp-"


class Checkpoint(NamedTuple):
    """What a checkpoint holds: the iteration it was written after, CPU tensors, and the rest."""

    iteration: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(
    root: Path,
    iteration: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint and delete the older ones that are no longer kept.

    Checkpoints of a later iteration belong to a future that the run has left (it was resumed
    from an earlier one) and are deleted too. One process writes to `root` at a time; it also
    clears away what a killed one left there.

    Parameters
    ----------
    root : Path
        Folder of all checkpoints of a run; made if missing.
    iteration : int
        Iterations finished, 0 or more.
    tensors : mapping of str to Tensor
        Any shape, dtype and device. Saved bit for bit; tensors that share memory are saved apart.
    state : mapping of str to JSON value
        Must come back from JSON equal: finite numbers, string keys, lists rather than tuples.
    keep : int
        Checkpoints to keep, this one included, 1 or more.

    Returns
    -------
    Path
        The folder of this checkpoint.

    Raises
    ------
    WorkflowRLError
        `state` does not survive JSON, or the disk refuses (then earlier checkpoints are intact).
    """
    if iteration < 0 or keep < 1:
        raise ValueError(f"iteration must be >= 0 and keep >= 1, got {iteration} and {keep}")
    state_text = _dump_state(state)
    final = root / f"iteration_{iteration:08d}"
    building = root / f"{_TEMPORARY}{final.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        building.mkdir()
        _write_tensors(building, tensors)
        (building / STATE).write_text(state_text, encoding="utf-8")
        _write_manifest(building, iteration)
        _put_in_place(building, final)
    except OSError as error:
        # What stays behind when even this fails is cleared away by the next save.
        shutil.rmtree(building, ignore_errors=True)
        raise WorkflowRLError(
            f"cannot write checkpoint {final}: {error}; earlier checkpoints are intact, "
            "make room and resume"
        ) from error
    for path in _outdated(root, final, keep):
        _remove(path)
    return final


def latest_valid(root: Path, on_skip: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint folder whose every file is as it was written.

    Reads only, so that a run in progress can be looked at.

    Parameters
    ----------
    root : Path
        Folder of all checkpoints of a run.
    on_skip : callable
        Called with one line for each damaged checkpoint that is passed over: which, and why.

    Returns
    -------
    Path or None
        None when there is no checkpoint at all.

    Raises
    ------
    UserError
        There are checkpoints and all are damaged.
    """
    folders = checkpoint_folders(root)
    for path in reversed(folders):
        fault = _fault(path)
        if fault is None:
            return path
        before = "" if path == folders[0] else "; using the one before it"
        on_skip(f"checkpoint {path} is damaged ({fault}){before}")
    if folders:
        raise UserError(
            f"all {len(folders)} checkpoints in {root} are damaged, none can be resumed from; "
            "restore one from a copy or train again in a new run directory"
        )
    return None


def check_checkpoint(path: Path) -> None:
    """Raise a UserError unless the folder is a checkpoint whose every file is as it was written."""
    fault = _fault(path)
    if fault is not None:
        raise UserError(f"checkpoint {path} is damaged ({fault}); choose another one")


def load_checkpoint(path: Path, prefix: str = "") -> Checkpoint:
    """Read a checkpoint, checking every file against its manifest.

    Parameters
    ----------
    prefix
        Only tensors whose names begin with it are read.

    Returns
    -------
    Checkpoint
        Tensors on the CPU, bit for bit as saved.

    Raises
    ------
    UserError
        The folder is not a whole checkpoint.
    """
    check_checkpoint(path)
    iteration = int(json.loads((path / MANIFEST).read_text(encoding="utf-8"))["iteration"])
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Checkpoint(iteration, _read_tensors(path, prefix), state)


def remove_leftovers(root: Path) -> None:
    """Delete what a killed process left half written or half deleted in `root`."""
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _dump_state(state: Mapping[str, Any]) -> str:
    """Return `state` as JSON; refuse what would come back different."""
    try:
        text = json.dumps(dict(state), sort_keys=True, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise WorkflowRLError(f"checkpoint state cannot be written as JSON: {error}") from error
    back = json.loads(text)
    for key, value in state.items():
        if key not in back or back[key] != value:
            raise WorkflowRLError(
                f"checkpoint state {key!r} does not come back from JSON as it was; "
                "use string keys, and lists rather than tuples"
            )
    return text


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write safetensors files through `torch.distributed.checkpoint`."""
    prepared: dict[str, Tensor] = {}
    file_of: dict[str, int] = {}
    seen: set[int] = set()
    file_index, file_bytes = 1, 0
    for name, tensor in tensors.items():
        value = tensor.detach().contiguous()
        storage = value.untyped_storage().data_ptr()
        prepared[name] = value.clone() if storage in seen else value  # safetensors shares nothing
        seen.add(storage)
        if file_bytes > 0 and file_bytes + value.nbytes > MAX_FILE_BYTES:
            file_index, file_bytes = file_index + 1, 0
        file_bytes += value.nbytes
        file_of[name] = file_index
    if not prepared:
        return
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=file_of)
    with _single_process():
        dcp.save(dict(prepared), storage_writer=writer, no_dist=True)


def _read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Read a folder's tensors to the CPU through `torch.distributed.checkpoint`."""
    tensors: dict[str, Any] = {}
    for name, entry in (
        HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata.items()
    ):
        if not name.startswith(prefix):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise WorkflowRLError(f"checkpoint {folder}: {name} is not a tensor")
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    if tensors:
        with _single_process():
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return tensors


@contextmanager
def _single_process() -> Iterator[None]:
    """Silence the warning that there is no process group, and unwrap what DCP wraps.

    `CheckpointException` derives from `BaseException` and hides the cause, a full disk or a
    Ctrl-C, behind the number of the rank.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise cause from error


def _write_manifest(folder: Path, iteration: int) -> None:
    """Force every file to the disk, then write the manifest that vouches for them."""
    files = {}
    for path in sorted(folder.iterdir()):
        _fsync(path)
        files[path.name] = {"bytes": path.stat().st_size, "blake2b": _digest(path)}
    manifest = {"format": FORMAT, "iteration": iteration, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _fsync(folder / MANIFEST)
    _fsync(folder)


def _put_in_place(building: Path, final: Path) -> None:
    """Give a finished folder its name; the name appears in one step, with everything in it."""
    if final.exists():
        same = _fault(final) is None and (
            (final / MANIFEST).read_bytes() == (building / MANIFEST).read_bytes()
        )
        if same:  # saved twice: the first stays, so that at no moment there is none
            shutil.rmtree(building)
            return
        _remove(final)
    building.rename(final)
    _fsync(final.parent)


def _outdated(root: Path, newest: Path, keep: int) -> list[Path]:
    """Return the folders to delete now that `newest` is in place."""
    folders = checkpoint_folders(root)
    position = folders.index(newest)
    return folders[: max(0, position + 1 - keep)] + folders[position + 1 :]


def _remove(path: Path) -> None:
    """Delete a checkpoint; its name goes first, so that half of one never looks whole."""
    doomed = path.with_name(f"{_TEMPORARY}deleted-{path.name}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _fault(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, None when all is as it was written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, expected {FORMAT}"
        expected = {name: (f["bytes"], f["blake2b"]) for name, f in manifest["files"].items()}
        number = FOLDER.fullmatch(folder.name)
        if number is not None and int(number[1]) != manifest["iteration"]:
            return f"{MANIFEST} is of iteration {manifest['iteration']}"
        return _files_fault(folder, expected)
    except OSError as error:
        return f"a file cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not a manifest"


def _files_fault(folder: Path, expected: Mapping[str, tuple[int, str]]) -> str | None:
    """Compare the files of a folder with the sizes (bytes) and digests that are expected."""
    present = {path.name: path for path in folder.iterdir()}
    for name, (size, digest) in expected.items():
        if name not in present:
            return f"{name} is missing"
        found = present[name].stat().st_size
        if found != size:
            return f"{name} has {found} bytes, expected {size}"
        if _digest(present[name]) != digest:
            return f"{name} differs from what was written"
    if STATE not in expected:
        return f"{STATE} is not in {MANIFEST}"
    stray = [name for name in present if name.endswith(".safetensors") and name not in expected]
    return f"{stray[0]} does not belong to it" if stray else None


def _digest(path: Path) -> str:
    """Return the BLAKE2b digest of a file, 32 bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _fsync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
