"""Stands in for the process of a run: ends at once, with made-up figures or a fault.

The environment variable ``FAULT_<variant>`` asks for a fault: ``error`` or ``kill``, or
``end`` for one after all iterations.
"""

import os
import signal
import sys
from pathlib import Path

from tests.ablation.made_up import TENSORS, train
from workflow_rl.ablation.check_file import WeightsCheck, write_check
from workflow_rl.config.run_dir import load_run_config

SEEN_FILE = "seen.txt"


def main() -> None:
    run_dir = Path(sys.argv[1])
    variant = run_dir.parent.name
    with (run_dir / SEEN_FILE).open("a") as file:
        file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "") + "\n")
    fault = os.environ.get(f"FAULT_{variant}")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "error":
        sys.exit("Traceback of many lines\nerror: the disk is full; make room")
    train(run_dir, variant, load_run_config(run_dir))
    if variant == "constant":
        write_check(run_dir, WeightsCheck(TENSORS, 0, None))
    if fault == "end":
        sys.exit("error: the service hung up; see whether it is there")


if __name__ == "__main__":
    main()
