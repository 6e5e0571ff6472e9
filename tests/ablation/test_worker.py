"""The process of a run ends with the ablation that began it, and cleanly before that."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ablation.made_up import TENSORS, finish, make_config
from workflow_rl.ablation.check_file import CHECK_FILE, WeightsCheck, read_check
from workflow_rl.ablation.jobs import make_jobs
from workflow_rl.ablation.variants import build_variants
from workflow_rl.cli import ablate_worker
from workflow_rl.errors import WorkflowRLError

WATCH = (
    "import sys, time\n"
    "from workflow_rl.cli.ablate_worker import stop_when_orphaned\n"
    "stop_when_orphaned()\n"
    "print('watching', flush=True)\n"
    "time.sleep(float(sys.argv[1]))\n"
)


@pytest.mark.parametrize(("orphaned", "code"), [(False, 0), (True, -signal.SIGTERM)])
def test_it_is_asked_to_stop_when_its_standard_input_ends(orphaned: bool, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH, "60" if orphaned else "0.2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        assert process.stdout.readline() == b"watching\n"
        if orphaned:
            process.stdin.close()
        assert process.wait(60) == code
        assert process.stderr.read() == b""


@pytest.mark.parametrize("done", [3, 4])
def test_a_fault_after_the_last_iteration_comes_after_the_weights_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise WorkflowRLError("a guard stops the run")

    monkeypatch.setattr(ablate_worker, "check_inputs", lambda config: None)
    monkeypatch.setattr("workflow_rl.training.trainer.train", fails)
    monkeypatch.setattr(
        "workflow_rl.ablation.weights.check_weights", lambda config: WeightsCheck(TENSORS, 0, None)
    )
    *_, job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)
    finish(job)
    (job.run_dir / CHECK_FILE).unlink()
    last = job.run_dir / "checkpoints" / "iteration_00000004"
    last.rename(last.with_name(f"iteration_{done:08d}"))
    with pytest.raises(WorkflowRLError, match="a guard stops the run"):
        ablate_worker.work(job.run_dir)
    assert (read_check(job.run_dir) is not None) == (done == 4)
