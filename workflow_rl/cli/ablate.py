"""``workflow-rl ablate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workflow_rl.ablation.commits import keep_commits
from workflow_rl.cli.arguments import ConfigArgument, OverridesArgument
from workflow_rl.cli.preflight import (
    check_hardware,
    check_inputs,
    check_rewards_import,
    with_commits,
)
from workflow_rl.cli.train import STOPPED_EXIT_CODE
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.run_dir import RUN_FILE, locked_run_dir
from workflow_rl.errors import UserError

if TYPE_CHECKING:
    from workflow_rl.ablation.jobs import Job
    from workflow_rl.ablation.results import AblationResult
    from workflow_rl.ablation.variants import Variants

WORKER = "workflow_rl.cli.ablate_worker"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


SeedsOption = Annotated[
    str, typer.Option("--seeds", help="A number of seeds, 3 for 0, 1 and 2; or a list: 0,1,5 or 7,")
]
OnlyOption = Annotated[
    str | None,
    typer.Option("--only", metavar="NAMES", help="Train these variants only: nested,shared"),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Trainings at once; default: one, or one per device."),
]
DevicesOption = Annotated[
    str | None,
    typer.Option("--devices", help="GPUs to train on, in turns: 0,1 (CUDA_VISIBLE_DEVICES)."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Directory of the ablation; default: OUTPUT_DIR-ablation."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be trained; write nothing.")
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace runs of another configuration.")
]


@dataclass(frozen=True)
class _Ablation:
    """What there is to train: ``jobs`` are the runs of all variants, of which some are chosen."""

    variants: Variants
    jobs: Sequence[Job]
    chosen: Sequence[Job]
    out: Path


def ablate(
    config_path: ConfigArgument,
    overrides: OverridesArgument = None,
    seeds: SeedsOption = "3",
    only: OnlyOption = None,
    jobs: JobsOption = None,
    devices: DevicesOption = None,
    output: OutputOption = None,
    dry_run: DryRunOption = False,
    overwrite: OverwriteOption = False,
) -> None:
    """Train a configuration's controls, and compare them at equal numbers of videos.

    nested and shared credit over all stages, each stage alone (only_STAGE, the others frozen) and
    a constant reward, which must move no weight; each over several seeds.

    **Examples**

    ```
    workflow-rl ablate configs/quickstart.yaml training.threads=1 --jobs 2
    workflow-rl ablate configs/quickstart.yaml --seeds 1 --only nested,shared --dry-run
    workflow-rl ablate my_chain.yaml --seeds 0,1,2 --devices 0,1,2,3
    ```

    Each run has a directory below that of the ablation, VARIANT/seedN, and is one of
    `workflow-rl train`. The same command again goes on: finished runs are kept, the others resumed.
    ablation.md, .html, .json and .svg hold the result. Exit code 1: a run failed, the runs were
    not equal, or a weight moved under the constant reward.
    """
    numbers = parse_seeds(seeds)
    config, out = _load(config_path, overrides or [], output)
    slots = make_slots(jobs, parse_devices(devices, config))
    check_hardware(config)
    check_inputs(config)
    config = with_commits(config)

    from workflow_rl.ablation.jobs import check_jobs
    from workflow_rl.cli.ablate_view import show_plan

    ablation = _plan(config, numbers, only, out)
    check_jobs(ablation.chosen, overwrite=overwrite)
    if not dry_run:
        check_rewards_import(config)
    show_plan(ablation.chosen, ablation.variants.left_out, slots=len(slots), out=out)
    if not dry_run:
        _run(ablation, slots)


def _load(path: Path, overrides: Sequence[str], output: Path | None) -> tuple[RunConfig, Path]:
    """Return the configuration and the directory of its ablation."""
    if any(override.partition("=")[0] == "seed" for override in overrides):
        raise UserError("seed is set for each run here; give --seeds instead, such as --seeds 3")
    config = load_config(path, overrides)
    out = output or config.output_dir.with_name(f"{config.output_dir.name}-ablation")
    if out.is_file() or (out / RUN_FILE).is_file():
        what = "a file" if out.is_file() else "the directory of a run"
        raise UserError(f"{out} is {what}; give another directory with --output")
    return keep_commits(config, out), out


def _plan(config: RunConfig, seeds: Sequence[int], only: str | None, out: Path) -> _Ablation:
    """Return the runs of every variant and seed."""
    from workflow_rl.ablation.jobs import make_jobs
    from workflow_rl.ablation.variants import build_variants

    variants = build_variants(config)
    wanted = variants.select(None if only is None else split_list(only, "--only"))
    jobs = make_jobs(variants, seeds, out)
    return _Ablation(variants, jobs, [job for job in jobs if job.variant in wanted], out)


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of ``3`` (0, 1 and 2), ``0,1,5`` or ``7,``.

    Raises
    ------
    UserError
        If it is neither.
    """
    words = split_list(text, "--seeds")
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds {text}: expected a number of seeds or a list such as 0,1,2")
    if "," in text:
        return [int(word) for word in words]
    if int(text) == 0:
        raise UserError("--seeds 0: that is no run; for seed 0 alone give --seeds 1")
    return list(range(int(text)))


def split_list(text: str, option: str) -> list[str]:
    """Return the words between commas; one comma may stand at the end.

    Raises
    ------
    UserError
        If there is none, one is empty, or one is there twice.
    """
    words = [word.strip() for word in text.strip().removesuffix(",").split(",")]
    if not all(words):
        raise UserError(f"{option} {text!r}: expected words with commas between them, such as a,b")
    twice = next((word for word in words if words.count(word) > 1), None)
    if twice is not None:
        raise UserError(f"{option} {text}: {twice} is there twice; leave one out")
    return words


def parse_devices(text: str | None, config: RunConfig) -> list[str]:
    """Return the devices to train on in turns; none where the option is not given.

    Raises
    ------
    UserError
        If the configuration names a device that a process with one visible GPU lacks.
    """
    if text is None:
        return []
    if config.training.device not in (None, "cuda", "cuda:0"):
        raise UserError(
            f"training.device is {config.training.device!r}, but with --devices each run sees one "
            "GPU; set it to null"
        )
    return split_list(text, "--devices")


def make_slots(jobs: int | None, devices: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment of each training that goes on at a time.

    The CPU's cores are shared out between them, unless OMP_NUM_THREADS is set; training.threads
    in the configuration goes before both.
    """
    count = jobs or max(1, len(devices))
    threads = {THREADS: str(max(1, len(os.sched_getaffinity(0)) // count))}
    slots = []
    for index in range(count):
        device = {VISIBLE_DEVICES: devices[index % len(devices)]} if devices else {}
        slots.append(threads | dict(os.environ) | device)
    return slots


def _run(ablation: _Ablation, slots: Sequence[dict[str, str]]) -> None:
    """Train what is not finished, then write and show the result."""
    from workflow_rl.ablation.jobs import fault_at_end, is_finished, keep_fault_at_end
    from workflow_rl.ablation.results import collect
    from workflow_rl.ablation.runner import run_jobs
    from workflow_rl.ablation.write import write_all
    from workflow_rl.cli.ablate_result import show_result
    from workflow_rl.cli.ablate_view import showing_jobs

    variants, chosen, out = ablation.variants, ablation.chosen, ablation.out
    out.mkdir(parents=True, exist_ok=True)
    todo = [job for job in chosen if not is_finished(job) or fault_at_end(job)]
    with locked_run_dir(out), showing_jobs() as display:
        outcomes = run_jobs(todo, slots, worker_command, display)
        earlier = {j.name: fault_at_end(j) for j in ablation.jobs if j.name not in outcomes}
        reasons = {name: reason for name, reason in earlier.items() if reason}
        reasons |= {name: o.reason for name, o in outcomes.items() if o.state == "failed"}
        result = collect(
            ablation.jobs,
            list(dict.fromkeys(job.variant for job in chosen)),
            {variant.name: variant.what for variant in variants.variants},
            reasons,
            left_out=variants.left_out,
            reference=variants.reference,
        )
        for job in todo:
            if job.name in outcomes and outcomes[job.name].state != "stopped":
                keep_fault_at_end(job, reasons[job.name] if job.name in result.failed else "")
        paths = write_all(result, out)
    show_result(result, paths)
    if len(outcomes) < len(todo) or any(o.state == "stopped" for o in outcomes.values()):
        typer.echo("stopped; the same command again goes on where it was")
        raise typer.Exit(STOPPED_EXIT_CODE)
    if not is_sound(result):
        raise typer.Exit(1)


def worker_command(job: Job) -> list[str]:
    """Return the command that trains a run from wherever it is to its end."""
    return [sys.executable, "-m", WORKER, str(job.run_dir)]


def is_sound(result: AblationResult) -> bool:
    """Say whether all runs finished, made equally much, and the control's weights stayed.

    A run that a guard stopped after its last iteration is finished; one that failed there is not
    sound.
    """
    complete = not result.unfinished and not result.failed
    return complete and result.equal and not result.moved
