"""The runs of an ablation: a variant with a seed, where it lies, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workflow_rl.ablation.check_file import CHECK_FILE
from workflow_rl.ablation.variants import CONSTANT, Variants
from workflow_rl.config import RunConfig
from workflow_rl.config.run_dir import (
    CONFIG_FILE,
    RUN_FILE,
    create_run_dir,
    is_locked,
    read_fingerprint,
)
from workflow_rl.errors import UserError
from workflow_rl.training.checkpoint_folders import checkpoint_folders
from workflow_rl.training.metrics_log import METRICS_FILE
from workflow_rl.whole_files import write_whole

FAULT_FILE = "ablation_fault.txt"
"""In a run's directory: how its process failed after all iterations; gone when that went well."""


@dataclass(frozen=True)
class Job:
    """One run: ``config`` is whole, with the run's own seed and output_dir."""

    variant: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Such as ``shared/seed0``: its path below the ablation's directory."""
        return f"{self.variant}/seed{self.seed}"

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        return self.config.output_dir

    @property
    def iterations(self) -> int:
        """Iterations that it is to do."""
        return self.config.training.iterations

    @property
    def planned(self) -> int:
        """Outputs of the last stage that it is to make."""
        per_prompt = math.prod(stage.samples for stage in self.config.stages.values())
        return self.iterations * self.config.data.prompts_per_iteration * per_prompt


def make_jobs(variants: Variants, seeds: Sequence[int], out: Path) -> list[Job]:
    """Return a run per seed and variant, all variants of a seed before the next seed.

    In this order an ablation that is stopped early leaves whole comparisons.
    """
    return [
        Job(variant.name, seed, _job_config(variant.config, variant.name, seed, out))
        for seed in seeds
        for variant in variants.variants
    ]


def _job_config(config: RunConfig, variant: str, seed: int, out: Path) -> RunConfig:
    logging = config.logging
    named = {
        service: settings.model_copy(
            update={"name": f"{settings.name or out.name}/{variant}/seed{seed}"}
        )
        for service, settings in (("wandb", logging.wandb), ("trackio", logging.trackio))
        if settings is not None
    }
    return config.model_copy(
        update={
            "seed": seed,
            "output_dir": out / variant / f"seed{seed}",
            "logging": logging.model_copy(update=named),
        }
    )


def exists(job: Job) -> bool:
    """Say whether the run has begun; a directory that is only half made counts as none."""
    return (job.run_dir / CONFIG_FILE).is_file() and (job.run_dir / RUN_FILE).is_file()


def is_finished(job: Job) -> bool:
    """Say whether the run did all its iterations, and a constant reward's weights were compared.

    The last iteration's checkpoint, which appears whole or not at all, is the last thing that a
    training writes.
    """
    if not exists(job) or is_stale(job) or not is_trained(job.config):
        return False
    return job.variant != CONSTANT or (job.run_dir / CHECK_FILE).is_file()


def is_trained(config: RunConfig) -> bool:
    """Say whether a run has the checkpoint of its last iteration."""
    folders = checkpoint_folders(config.output_dir / "checkpoints")
    return bool(folders) and folders[-1].name == f"iteration_{config.training.iterations:08d}"


def fault_at_end(job: Job) -> str:
    """Return how the process of a finished run failed at its end; empty where it did not."""
    path = job.run_dir / FAULT_FILE
    if not is_finished(job) or not path.is_file():
        return ""
    return path.read_text(encoding="utf-8", errors="replace").strip() or "no reason was kept"


def keep_fault_at_end(job: Job, reason: str) -> None:
    """Keep how the process of a finished run failed, so that later calls try its end again.

    An empty reason forgets it.
    """
    path = job.run_dir / FAULT_FILE
    if reason:
        write_whole(path, reason + "\n")
    else:
        path.unlink(missing_ok=True)


def iterations_done(job: Job) -> int:
    """Return the iterations that the run has logged."""
    path = job.run_dir / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def check_jobs(jobs: Sequence[Job], *, overwrite: bool) -> None:
    """Check that each run directory is new, or holds just this run. Writes nothing.

    Raises
    ------
    UserError
        If it belongs to another configuration, a process trains in it, or it holds other files.
    """
    for job in jobs:
        run_dir = job.run_dir
        if not run_dir.exists():
            continue
        if not run_dir.is_dir():
            raise UserError(f"{run_dir} is a file; give another directory with --output")
        if is_locked(run_dir):
            raise UserError(
                f"{run_dir} is in use by a run that is still going; wait for its end, or stop it"
            )
        if (run_dir / RUN_FILE).is_file():
            if not overwrite and read_fingerprint(run_dir) not in job.config.fingerprints():
                raise UserError(
                    f"{run_dir} was left by another configuration; give another directory with "
                    "--output, or replace runs of other configurations with --overwrite"
                )
        elif any(run_dir.iterdir()):
            raise UserError(
                f"{run_dir} has files that are no run's; give another directory with --output"
            )


def is_stale(job: Job) -> bool:
    """Say whether the directory holds a run of another configuration."""
    return exists(job) and read_fingerprint(job.run_dir) not in job.config.fingerprints()


def prepare(job: Job) -> None:
    """Make the run's directory with its ``config.yaml``.

    A directory that holds this run already gets the new ``config.yaml``: guards, logging and
    patience are no part of the fingerprint, and the run goes on with those that are wanted now.

    A run of another configuration is replaced; `check_jobs` has refused it where that is not
    wanted.

    Raises
    ------
    UserError, OSError
        If it cannot be made.
    """
    if not exists(job) or is_stale(job):
        create_run_dir(job.config, overwrite=(job.run_dir / RUN_FILE).is_file())
        return
    write_whole(job.run_dir / CONFIG_FILE, job.config.dump_yaml())
