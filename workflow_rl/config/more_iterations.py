"""A run that goes on to another number of iterations than it began with.

An iteration knows its own number, not how many there will be. All that looks at the total is a
learning rate that falls until the end: without one, a run of 4 iterations that goes on to 6 is a
run of 6.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from workflow_rl.config.loader import load_config
from workflow_rl.config.run import RunConfig
from workflow_rl.config.run_dir import CONFIG_FILE, ITERATIONS, RUN_FILE, load_run_config
from workflow_rl.errors import UserError
from workflow_rl.whole_files import write_whole

MADE_OF_THE_END = ("report.html", "evaluation.json", "evaluations", "export")
"""What other commands make of a run's newest weights; where the run goes on these are not."""


def load_run_to_go_on(run_dir: Path, overrides: Sequence[str], done: int) -> RunConfig:
    """Return the configuration that the run in ``run_dir`` is to go on with. Writes nothing.

    Parameters
    ----------
    overrides
        ``training.iterations=N``, or nothing.
    done
        Iterations of the run's newest checkpoint, 0 without one.

    Raises
    ------
    UserError
        As `load_run_config`; for another key; where N iterations are done already; where the
        iterations done would have had another learning rate.
    """
    for override in overrides:
        if override.partition("=")[0] != ITERATIONS:
            raise UserError(
                f"override {override!r}: of a run that has begun only {ITERATIONS} can be changed; "
                "leave it out, or train another run with it"
            )
    config = load_run_config(run_dir, overrides)
    begun = load_config(run_dir / CONFIG_FILE).training.iterations
    wanted = config.training.iterations
    if wanted == begun:
        return config
    if wanted <= done:
        raise UserError(
            f"{ITERATIONS} is {wanted}, but {run_dir} has done {done} already; give more than that"
        )
    for name, stage in config.stages.items():
        schedule = stage.optimizer.schedule
        if not stage.freeze and schedule != "constant":
            raise UserError(
                f"{run_dir} cannot go on to {wanted} iterations: stages.{name}.optimizer.schedule "
                f"is {schedule} and ends at iteration {begun}, so a run of {wanted} has other "
                f"learning rates from its start; train another run with {ITERATIONS}={wanted}, or "
                "one whose schedule is constant, which can go on"
            )
    return config


def record_iterations(config: RunConfig, done: int) -> str | None:
    """Write into the run directory how many iterations the run now goes on to.

    What other commands made of the weights after ``done`` iterations is renamed, so that it is not
    taken for the end: ``report.html`` becomes ``report_after_4.html``. A process killed in between
    leaves a run that the same command goes on with.

    Returns
    -------
    str or None
        A line for the user; None where the number is as it was, and nothing was written.
    """
    run_dir = config.output_dir
    written = load_config(run_dir / CONFIG_FILE)
    before, now = written.training.iterations, config.training.iterations
    if now == before:
        return None
    renamed = [_set_aside(run_dir / name, done) for name in MADE_OF_THE_END]
    training = written.training.model_copy(update={"iterations": now})
    written = written.model_copy(update={"training": training})
    identity = json.loads((run_dir / RUN_FILE).read_text(encoding="utf-8"))
    identity["fingerprint"] = written.fingerprint()
    write_whole(run_dir / RUN_FILE, json.dumps(identity) + "\n")
    write_whole(run_dir / CONFIG_FILE, written.dump_yaml())
    kept = ", ".join(path.name for path in renamed if path is not None)
    aside = f"; what was made of the run until now is kept as {kept}" if kept else ""
    return f"the run goes on to {now} iterations, no longer {before}{aside}"


def _set_aside(path: Path, done: int) -> Path | None:
    """Give what is at ``path`` a free name that says how far the run was; return it."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.stem}_after_{done}{path.suffix}")
    number = itertools.count(2)
    while aside.exists():
        aside = path.with_name(f"{path.stem}_after_{done}_{next(number)}{path.suffix}")
    return path.rename(aside)
