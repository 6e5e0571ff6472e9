"""The run directory: who may write into it, and which configuration it belongs to.

A run directory holds ``config.yaml`` (the whole configuration, overrides applied), ``run.json``
(its fingerprint and the versions it ran with) and, while a process trains in it, a lock that ends
with that process.
"""

import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from workflow_rl.config.loader import load_config
from workflow_rl.config.run import RunConfig
from workflow_rl.errors import UserError

CONFIG_FILE = "config.yaml"
RUN_FILE = "run.json"
LOCK_FILE = ".lock"
LOG_FILE = "train.log"
ITERATIONS = "training.iterations"
RECORDED_PACKAGES = ("workflow-rl", "torch", "diffusers", "transformers", "numpy")


def check_new_run_dir(config: RunConfig, *, overwrite: bool = False) -> None:
    """Check that a new run may use ``config.output_dir``. Writes nothing.

    Parameters
    ----------
    config
        The new run's configuration.
    overwrite
        Allow a directory that holds an earlier run which no process is training.

    Raises
    ------
    UserError
        If the directory is in use, holds an earlier run, holds anything else, or lies below what
        is no directory that this user may write to.
    """
    run_dir = config.output_dir
    _check_can_be_made(run_dir)
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return
    if not (run_dir / RUN_FILE).is_file():
        raise UserError(
            f"output_dir {run_dir} has files that are no run's; give a new or empty directory"
        )
    if is_locked(run_dir):
        raise UserError(
            f"output_dir {run_dir} is in use by a run that is still going; stop that run, or give "
            "another with output_dir=PATH"
        )
    if overwrite:
        return
    if read_fingerprint(run_dir) not in config.fingerprints():
        _check_other_length(config)
        raise UserError(
            f"output_dir {run_dir} was left by another configuration; give another with "
            "output_dir=PATH, or replace that run with --overwrite"
        )
    raise UserError(
        f"output_dir {run_dir} already holds this run; go on with `workflow-rl resume {run_dir}`, "
        "or start it anew with --overwrite"
    )


def _check_other_length(config: RunConfig) -> None:
    """Raise a UserError if the earlier run differs in its number of iterations alone."""
    run_dir, wanted = config.output_dir, config.training.iterations
    try:
        begun = load_config(run_dir / CONFIG_FILE).training.iterations
    except UserError:  # a file that is gone, damaged or of another version: no run of this one
        return
    training = config.training.model_copy(update={"iterations": begun})
    if read_fingerprint(run_dir) in config.model_copy(update={"training": training}).fingerprints():
        mend = "go on to" if wanted > begun else "end it sooner, at"
        raise UserError(
            f"output_dir {run_dir} already holds this run with {begun} iterations; {mend} {wanted} "
            f"with `workflow-rl resume {run_dir} {ITERATIONS}={wanted}`, or start anew with "
            "--overwrite"
        )


def _check_can_be_made(run_dir: Path) -> None:
    """Raise a UserError unless ``run_dir`` is a directory, or this user can make it one."""
    # os.path.exists, since Path.exists raises below a directory that this user may not enter
    nearest = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UserError(
            f"output_dir {run_dir} is a file; give a directory"
            if nearest == run_dir
            else f"output_dir {run_dir} lies below the file {nearest}; give another"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(
            f"output_dir {run_dir} cannot be written: no permission for {nearest}; give another"
        )


def create_run_dir(config: RunConfig, *, overwrite: bool = False) -> None:
    """Make the run directory and write ``config.yaml`` and ``run.json`` into it.

    Raises
    ------
    UserError
        As `check_new_run_dir`, or if the system refuses to write there.
    """
    check_new_run_dir(config, overwrite=overwrite)
    run_dir = config.output_dir
    identity = {
        "fingerprint": config.fingerprint(),
        "versions": installed_versions(),
        "models": hub_models(config),
    }
    try:
        if (run_dir / RUN_FILE).is_file():
            shutil.rmtree(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RUN_FILE).write_text(json.dumps(identity) + "\n", encoding="utf-8")
        (run_dir / CONFIG_FILE).write_text(config.dump_yaml(), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"output_dir {run_dir} cannot be written ({error.strerror}); give another"
        ) from None


def installed_versions() -> dict[str, str]:
    """Return the versions that a run's numbers depend on, without importing the packages."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in RECORDED_PACKAGES
    }


def hub_models(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return the repository and the commit of each stage's model that is from the hub."""
    return {
        name: {"repo": str(stage.model), "commit": stage.revision}
        for name, stage in config.stages.items()
        if stage.revision is not None
    }


def discard_unused_run_dir(run_dir: Path) -> None:
    """Remove a run directory that holds only what `create_run_dir`, lock and log made."""
    if {path.name for path in run_dir.iterdir()} <= {CONFIG_FILE, RUN_FILE, LOCK_FILE, LOG_FILE}:
        shutil.rmtree(run_dir)


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration of the run in ``run_dir``, its ``output_dir`` where it now lies.

    Parameters
    ----------
    overrides
        As of `load_config`. A run that is known with or without them is this run.

    Raises
    ------
    UserError
        If there is no run, or ``config.yaml`` has been changed since the run began.
    """
    if not (run_dir / CONFIG_FILE).is_file() or not (run_dir / RUN_FILE).is_file():
        raise UserError(
            f"{run_dir} holds no run ({CONFIG_FILE} and {RUN_FILE} are not both there); give the "
            "output_dir of a `workflow-rl train`"
        )
    begun = load_config(run_dir / CONFIG_FILE)
    config = load_config(run_dir / CONFIG_FILE, overrides)
    if read_fingerprint(run_dir) not in begun.fingerprints() | config.fingerprints():
        raise UserError(
            f"{run_dir / CONFIG_FILE} is not what the run began with; undo the change, or train "
            "with it in another output_dir; iterations are changed by `workflow-rl resume "
            f"{run_dir} {ITERATIONS}=N` alone"
        )
    return config.model_copy(update={"output_dir": run_dir})


def read_fingerprint(run_dir: Path) -> str:
    """Return the fingerprint in ``run.json``.

    Raises
    ------
    UserError
        If the file is damaged.
    """
    path = run_dir / RUN_FILE
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["fingerprint"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise UserError(
            f"{path} is damaged: no fingerprint in it; give another output_dir"
        ) from None


def is_locked(run_dir: Path) -> bool:
    """Say whether a process holds the directory's lock."""
    path = run_dir / LOCK_FILE
    if not path.is_file():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def locked_run_dir(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock; it ends with the process, however that ends.

    Raises
    ------
    UserError
        If another process holds it.
    """
    with (run_dir / LOCK_FILE).open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"run directory {run_dir} is in use by a run that is still going; stop that first"
            ) from None
        yield
