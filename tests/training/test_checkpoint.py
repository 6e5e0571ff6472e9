"""Laws of checkpoints: whole or not there, bit for bit, the last good one is found."""

import json
import multiprocessing
import os
import pickle
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.training import checkpoint as module
from workflow_rl.training.checkpoint import (
    latest_valid,
    load_checkpoint,
    remove_leftovers,
    save_checkpoint,
)
from workflow_rl.training.checkpoint_folders import checkpoint_folders

WEIGHTS = "model-00001-of-00001.safetensors"


def bits(tensor: Tensor) -> list[int]:
    """Return the bytes of a tensor, so that NaN equals itself and -0 differs from 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def save(root: Path, iteration: int, keep: int = 3, value: float | None = None) -> Path:
    """Save a small checkpoint that is recognised by its iteration."""
    tensors = {"w": torch.full((7,), float(iteration if value is None else value))}
    return save_checkpoint(root, iteration, tensors, {"cursor": iteration}, keep=keep)


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """Return the latest valid folder and what was said on the way."""
    said: list[str] = []
    return latest_valid(root, said.append), said


def names(root: Path) -> list[str]:
    """Return what lies in `root`."""
    return sorted(path.name for path in root.iterdir())


def assorted_tensors() -> dict[str, Tensor]:
    """Return tensors of every kind that training has, and the awkward values."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(4, 6, generator=generator)
    return {
        "t2i/blocks.0.weight": weights,
        "transposed": weights.t(),
        "same memory": weights,
        "slice": weights[1:3],
        "float64": torch.randn(3, generator=generator, dtype=torch.float64),
        "bfloat16": torch.randn(2, 5, generator=generator).bfloat16(),
        "float16": torch.randn(5, generator=generator).half(),
        "int64": torch.tensor([2**62 + 1, -1]),
        "bool": torch.tensor([True, False]),
        "step": torch.tensor(7.0),
        "count": torch.tensor(2**40),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def test_round_trip_is_exact(tmp_path: Path) -> None:
    tensors = assorted_tensors()
    state = {"epoch": 2, "loss": 0.1 + 0.2, "versions": {"t2i": 4}, "order": [3, 1], "best": None}
    path = save_checkpoint(tmp_path / "new" / "root", 10, tensors, state, keep=1)
    assert path.name == "iteration_00000010"

    iteration, loaded, loaded_state = load_checkpoint(path)

    assert iteration == 10
    assert loaded_state == state
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert bits(loaded[name]) == bits(tensor), name


def test_no_tensors_and_no_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 0, {}, {}, keep=1)
    assert newest(tmp_path) == (path, [])
    assert load_checkpoint(path) == (0, {}, {})


def test_tensors_are_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 64)
    tensors = assorted_tensors()
    path = save_checkpoint(tmp_path, 1, tensors, {}, keep=1)
    assert len(list(path.glob("*.safetensors"))) > 3
    loaded = load_checkpoint(path).tensors
    assert {name: bits(t) for name, t in loaded.items()} == {
        name: bits(t) for name, t in tensors.items()
    }


def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)

    path = save_checkpoint(tmp_path, 1, assorted_tensors(), {"a": 1}, keep=1)
    assert newest(tmp_path)[0] == path
    assert load_checkpoint(path).state == {"a": 1}
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}


@pytest.mark.parametrize(
    "state", [{"a": float("nan")}, {"a": (1, 2)}, {"a": {1: 2}}, {"a": torch.ones(1)}]
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(WorkflowRLError, match="state"):
        save_checkpoint(tmp_path, 1, {}, state, keep=1)
    assert names(tmp_path) == []


def test_the_last_n_are_kept(tmp_path: Path) -> None:
    for iteration in (5, 10, 15, 20):
        save(tmp_path, iteration, keep=2)
    assert names(tmp_path) == ["iteration_00000015", "iteration_00000020"]
    assert newest(tmp_path) == (tmp_path / "iteration_00000020", [])


def test_order_is_by_number(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    expected = ["iteration_99999999", "iteration_100000000"]
    assert [path.name for path in checkpoint_folders(tmp_path)] == expected
    assert newest(tmp_path)[0] == tmp_path / expected[1]


def test_checkpoints_of_an_abandoned_future_go(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    save(tmp_path, 15, keep=1)
    assert names(tmp_path) == ["iteration_00000015"]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, value=1.0)
    save(tmp_path, 10, value=1.0)
    assert load_checkpoint(save(tmp_path, 10, value=2.0)).tensors["w"].tolist() == [2.0] * 7
    assert names(tmp_path) == ["iteration_00000010"]


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / WEIGHTS).write_bytes(b"")
    save(tmp_path, 10)
    assert newest(tmp_path) == (path, [])


def truncate(path: Path) -> None:
    """Cut the second half of a file off."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change the last byte."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", [WEIGHTS, "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str, damage: Any) -> None:
    good = save(tmp_path, 10)
    bad = save(tmp_path, 20)
    damage(bad / name)

    found, said = newest(tmp_path)

    assert found == good
    [line] = said
    assert str(bad) in line
    assert name in line
    assert "using the one before it" in line
    assert "\n" not in line
    with pytest.raises(UserError, match=name):
        load_checkpoint(bad)


def test_a_foreign_tensor_file_or_folder_name_is_damage(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    renamed = save(tmp_path, 20)
    renamed.rename(tmp_path / "iteration_00000030")
    mixed = save(tmp_path, 25)
    (mixed / "extra.safetensors").write_bytes(b"")
    save(tmp_path / "elsewhere", 1).parent.joinpath("iteration_00000001").rename(
        tmp_path / "iteration_00000040"
    )
    found, said = newest(tmp_path)
    assert found == good
    assert len(said) == 2  # 30 went when 25 was saved
    assert "iteration 1" in said[0]
    assert "extra.safetensors" in said[1]


def test_none_whole_is_an_error_and_none_at_all_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing") == (None, [])
    assert newest(tmp_path) == (None, [])
    truncate(save(tmp_path, 10) / WEIGHTS)
    said: list[str] = []
    with pytest.raises(UserError, match="all 1 checkpoints"):
        latest_valid(tmp_path, said.append)
    assert len(said) == 1
    assert "before" not in said[0]


def test_leftovers_of_a_killed_run(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    half = tmp_path / ".tmp-iteration_00000020"
    half.mkdir()
    (half / "state.json").write_text("{")
    assert newest(tmp_path) == (good, [])
    assert half.exists()  # looking changes nothing: the run may still be writing it
    save(tmp_path, 20)
    assert names(tmp_path) == ["iteration_00000010", "iteration_00000020"]
    half.mkdir()
    remove_leftovers(tmp_path)
    assert not half.exists()


def test_a_kill_while_deleting_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)

    def killed(path: Path, **_kwargs: object) -> NoReturn:
        next(path.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 20, keep=1)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["iteration_00000020"]
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["iteration_00000030"]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write past `size` bytes of a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 100, 20_000])
def test_a_full_disk_leaves_the_earlier_ones(tmp_path: Path, room: int) -> None:
    good = save(tmp_path, 10, keep=1)
    before = {p.name: p.read_bytes() for p in good.iterdir()}
    tensors = {"w": torch.zeros(10_000)}
    with largest_file(room), pytest.raises(WorkflowRLError, match="cannot write checkpoint"):
        save_checkpoint(tmp_path, 20, tensors, {"a": 1}, keep=1)
    assert names(tmp_path) == [good.name]
    assert {p.name: p.read_bytes() for p in good.iterdir()} == before
    assert newest(tmp_path) == (good, [])


@pytest.mark.parametrize("call", range(6))
def test_a_disk_that_fails_at_any_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    good = save(tmp_path, 10, keep=1)
    calls = iter(range(100))
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(WorkflowRLError, match="No space left"):
        save(tmp_path, 20, keep=1)
    assert next(calls) > call
    assert names(tmp_path) == [good.name]


def test_ctrl_c_while_writing_is_a_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object) -> NoReturn:
        raise KeyboardInterrupt

    good = save(tmp_path, 10)
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem, "_write_item", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 20)
    assert newest(tmp_path) == (good, [])


def save_forever(root: Path, first: int, announce: Connection) -> None:
    """Save one checkpoint after the other, each recognised by its number."""
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent
    for iteration in range(first, first + 10_000):
        tensors = {f"w{i}": torch.full((50_000,), float(iteration)) for i in range(4)}
        save_checkpoint(root, iteration, tensors, {"iteration": iteration}, keep=2)
        announce.send(iteration)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # others would import torch for every kill
    random = Random(0)
    last = 0
    for _ in range(8):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=save_forever, args=(tmp_path, last + 1, sender))
        process.start()
        sender.close()
        saved = receiver.recv()
        time.sleep(random.uniform(0.0, 0.15))
        process.kill()
        process.join()
        while True:
            try:
                saved = receiver.recv()
            except EOFError:
                break

        found, said = newest(tmp_path)

        assert said == []
        assert found is not None
        iteration, tensors, state = load_checkpoint(found)
        assert iteration >= saved > last
        assert state == {"iteration": iteration}
        assert all(
            torch.equal(t, torch.full((50_000,), float(iteration))) for t in tensors.values()
        )
        assert len(tensors) == 4
        last = iteration
    save(tmp_path, last + 1, keep=1)
    assert names(tmp_path) == [f"iteration_{last + 1:08d}"]


def test_the_manifest_lists_every_other_file(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    manifest = json.loads((path / "manifest.json").read_text())
    assert sorted([*manifest["files"], "manifest.json"]) == names(path)
    assert checkpoint_folders(tmp_path) == [path]
