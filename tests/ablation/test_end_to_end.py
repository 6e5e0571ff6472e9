"""Real ablations of the embedded pair: killed in the middle, the control, and with a reward."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tests.cli.conftest import Invoke
from workflow_rl.ablation.check_file import WeightsCheck, read_check, write_check
from workflow_rl.ablation.weights import check_weights
from workflow_rl.config.run_dir import is_locked, load_run_config
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint, save_checkpoint

RUN = Path("runs/x-ablation/constant/seed0")
CALL = ("ablate", "config.yaml", "training.device=cpu", "--seeds", "1", "--only", "constant")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Leave PyTorch its threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _wait(until: Callable[[], bool], what: str, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)  # four processes that import PyTorch, on a machine that may be busy
def test_killed_in_the_middle_it_goes_on_and_the_control_holds(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    ablation = subprocess.Popen([sys.executable, "-m", "workflow_rl", *CALL])
    first_checkpoint = RUN / "checkpoints" / "iteration_00000001"
    _wait(lambda: first_checkpoint.exists() or ablation.poll() is not None, "a checkpoint")
    os.kill(ablation.pid, signal.SIGKILL)
    assert ablation.wait() == -signal.SIGKILL
    _wait(lambda: not is_locked(RUN), "the end of the run whose ablation is gone")
    written = (RUN / "metrics.jsonl").read_bytes()
    done = written.count(b"\n")
    assert 1 <= done < 6
    assert read_check(RUN) is None

    again = invoke(*CALL)
    assert again.exit_code == 0, again.stdout + again.stderr
    assert f"to go on after {done}" in again.stdout
    metrics = (RUN / "metrics.jsonl").read_bytes()
    assert metrics.startswith(written)
    assert metrics.count(b"\n") == 6
    assert "made 24 videos for training, in 72 denoising steps" in again.stdout
    check = read_check(RUN)
    assert check is not None
    assert check.tensors > 100
    assert (check.moved, check.first) == (0, None)
    assert f"none of the {check.tensors} trained tensors of 1 runs moved in a bit" in again.stdout

    name = _flip_a_bit(RUN)
    moved = check_weights(load_run_config(RUN))
    assert moved == WeightsCheck(check.tensors, 1, name)
    write_check(RUN, moved)
    told = invoke(*CALL)
    assert told.exit_code == 1
    assert (
        f"weights moved under a constant reward in constant/seed0 (such as {name})" in told.stdout
    )


def _flip_a_bit(run_dir: Path) -> str:
    """Change a weight of the last checkpoint in its last bit; return the tensor's name."""
    path = latest_valid(run_dir / "checkpoints", on_skip=pytest.fail)
    assert path is not None
    checkpoint = load_checkpoint(path)
    name = next(name for name in sorted(checkpoint.tensors) if name.split("/")[1] == "weights")
    checkpoint.tensors[name].flatten()[:1].view(torch.int32)[0] ^= 1
    shutil.rmtree(path)
    save_checkpoint(path.parent, checkpoint.iteration, checkpoint.tensors, checkpoint.state, keep=2)
    return name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_a_reward_the_runs_are_those_of_train_and_the_table_is_of_their_evaluations(
    invoke: Invoke, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    short = ("training.device=cpu", "training.iterations=2", "evaluation.seeds_per_prompt=2")
    call = ("ablate", "config.yaml", *short, "--seeds", "3,", "--jobs", "2")
    ablated = invoke(*call, "--only", "nested,only_i2v")
    assert ablated.exit_code == 0, ablated.stdout + ablated.stderr
    out = Path("runs/x-ablation")
    alone = invoke("train", "config.yaml", *short, "seed=3", "credit.rule=nested")
    assert alone.exit_code == 0, alone.stderr
    nested = [_lines(run / "metrics.jsonl") for run in (out / "nested/seed3", Path("runs/x"))]
    assert nested[0] == nested[1]
    assert all(line["reward/directed_motion"] is not None for line in nested[0])

    moved = {}
    result = json.loads((out / "ablation.json").read_text())
    assert list(result["variants"]) == ["nested", "only_i2v"]
    for variant in result["variants"]:
        run = out / variant / "seed3"
        start, *_, end = [line["scores"] for line in _lines(run / "evaluations.jsonl")]
        change = result["variants"][variant]["change"]
        assert change["before"] == pytest.approx(fmean(start))
        assert change["after"] == pytest.approx(fmean(end))
        assert change["difference"]["mean"] != 0
        last = _lines(run / "metrics.jsonl")[-1]
        moved[variant] = [last[f"{stage}_weights_version"] for stage in ("t2i", "i2v")]
    assert moved == {"nested": [2, 2], "only_i2v": [0, 2]}
    assert {run["videos"] for run in result["runs"]} == {8}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file without their times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
