"""The process of a run ends with the ablation that began it, and cleanly before that."""

import signal
import subprocess
import sys

import pytest

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
