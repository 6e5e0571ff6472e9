"""A real ablation of the embedded pair, killed in the middle; and the control's check."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from workflow_rl.ablation.check_file import CHECK_FILE, read_check
from workflow_rl.config.run_dir import is_locked

OUT = Path("runs/x-ablation")
CALL = ("ablate", "config.yaml", "training.device=cpu", "--seeds", "1", "--only", "nested,constant")


def _wait(until: Callable[[], bool], what: str, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_the_control_holds(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nested, constant = OUT / "nested" / "seed0", OUT / "constant" / "seed0"

    ablation = subprocess.Popen([sys.executable, "-m", "workflow_rl", *CALL])
    first_checkpoint = nested / "checkpoints" / "iteration_00000001"
    _wait(lambda: first_checkpoint.exists() or ablation.poll() is not None, "a checkpoint")
    os.kill(ablation.pid, signal.SIGKILL)
    assert ablation.wait() == -signal.SIGKILL
    _wait(lambda: not is_locked(nested), "the end of the run whose ablation is gone")
    written = (nested / "metrics.jsonl").read_bytes()
    done = written.count(b"\n")
    assert 1 <= done < 6
    assert not constant.exists()

    again = invoke(*CALL)
    assert again.exit_code == 0, again.stdout + again.stderr
    assert f"to go on after {done}" in again.stdout
    metrics = (nested / "metrics.jsonl").read_bytes()
    assert metrics.startswith(written)
    assert metrics.count(b"\n") == 6
    assert "made 24 videos for training, in 72 denoising steps" in again.stdout
    check = read_check(constant)
    assert check is not None
    assert check.tensors > 100
    assert (check.moved, check.first) == (0, None)
    assert f"none of the {check.tensors} trained tensors of 1 runs moved in a bit" in again.stdout

    name = _flip_a_bit(constant)
    moved = invoke(*CALL)
    assert moved.exit_code == 1
    assert (
        f"weights moved under a constant reward in constant/seed0 (such as {name})" in moved.stdout
    )


def _flip_a_bit(run_dir: Path) -> str:
    """Change a weight of the last checkpoint in its last bit; return the tensor's name."""
    import torch

    from workflow_rl.training.checkpoint import latest_valid, load_checkpoint, save_checkpoint

    (run_dir / CHECK_FILE).unlink()
    path = latest_valid(run_dir / "checkpoints", on_skip=pytest.fail)
    assert path is not None
    checkpoint = load_checkpoint(path)
    name = next(name for name in sorted(checkpoint.tensors) if name.split("/")[1] == "weights")
    checkpoint.tensors[name].flatten()[:1].view(torch.int32)[0] ^= 1
    shutil.rmtree(path)
    save_checkpoint(path.parent, checkpoint.iteration, checkpoint.tensors, checkpoint.state, keep=2)
    return name
