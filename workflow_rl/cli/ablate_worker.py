"""One run of ``workflow-rl ablate``, in a process of its own: ``python -m ... RUN``.

Goes on with the run in the directory from wherever it is, then compares the weights of a run with
a constant reward with what they began as. Its standard input is a pipe from the ablation: when
that ends, the ablation is gone, and this process stops after its iteration, with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import typer

from workflow_rl.ablation.check_file import write_check
from workflow_rl.ablation.jobs import is_trained
from workflow_rl.cli.preflight import check_inputs
from workflow_rl.cli.progress import showing
from workflow_rl.cli.train import STOPPED_EXIT_CODE
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.errors import WorkflowRLError

STANDARD_INPUT = 0


def work(run_dir: Path) -> int:
    """Train to the end; return the exit code.

    Raises
    ------
    WorkflowRLError
        As `train`. Where all iterations were done, as when a guard stops the run after the last
        one, it comes after the weights were compared.
    """
    config = load_run_config(run_dir)
    check_inputs(config)
    from workflow_rl.ablation.weights import check_weights
    from workflow_rl.training.trainer import train

    fault = None
    with showing(run_dir) as listener:
        try:
            if train(config, resume=True, listener=listener) is not None:
                return STOPPED_EXIT_CODE
        except WorkflowRLError as error:
            if not is_trained(config):
                raise
            fault = error
        if all(reward.name == "constant" for reward in config.rewards):
            check = check_weights(config)
            write_check(run_dir, check)
            listener.message(f"{check.moved} of {check.tensors} trained tensors moved")
    if fault is not None:
        raise fault
    return 0


def stop_when_orphaned() -> None:
    """Ask this process to stop, as SIGTERM does, when the standard input ends."""

    def watch() -> None:
        # Past sys.stdin, whose lock a thread that still reads would hold when the process ends.
        while os.read(STANDARD_INPUT, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Train the run that is named on the command line."""
    stop_when_orphaned()
    try:
        code = work(Path(sys.argv[1]))
    except WorkflowRLError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
