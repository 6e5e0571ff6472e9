"""What a finished run of an ablation shows, read from its directory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from workflow_rl.ablation.check_file import WeightsCheck, read_check
from workflow_rl.ablation.jobs import Job
from workflow_rl.ablation.levels import mean_score
from workflow_rl.errors import UserError
from workflow_rl.evaluation.statistics import PairedComparison, paired_bootstrap
from workflow_rl.report.run_data import EvaluationRecord, RunData, read_run

BOOTSTRAP_SAMPLES = 10_000


@dataclass(frozen=True)
class RunResult:
    """A run that is finished.

    Attributes
    ----------
    variant, seed, run_dir
        Which it is, and where.
    videos : int
        Outputs of the last stage made for training, as the run counted them.
    denoising_steps : int
        Steps of all samples of all stages made for training: one model call per sample and step,
        two under classifier-free guidance.
    evaluations
        First to last, all of the same samples.
    videos_at
        Of each evaluation, the outputs made before it.
    change
        Reward before and after.
    variance
        Share of the reward's variance within a prompt by stage, mean over iterations.
    check
        Of a constant reward's run, whether a weight moved.
    stopped_by
        Names of the guards that stopped the run after its last iteration, when all was made.
    """

    variant: str
    seed: int
    run_dir: Path
    videos: int
    denoising_steps: int
    evaluations: tuple[EvaluationRecord, ...]
    videos_at: tuple[int, ...]
    change: PairedComparison
    variance: Mapping[str, float]
    check: WeightsCheck | None
    stopped_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As `workflow_rl.ablation.jobs.Job.name`."""
        return f"{self.variant}/seed{self.seed}"

    @property
    def levels(self) -> dict[int, float]:
        """Mean held-out reward by outputs made before."""
        means = (mean_score(evaluation.scores) for evaluation in self.evaluations)
        return dict(zip(self.videos_at, means, strict=True))


def read_finished(jobs: Sequence[Job]) -> tuple[dict[str, RunResult], dict[str, str]]:
    """Return the results of finished runs by name, and why some of them cannot be used."""
    runs: dict[str, RunResult] = {}
    faults: dict[str, str] = {}
    for job in jobs:
        try:
            result = read_result(job)
        except UserError as error:
            faults[job.name] = " ".join(str(error).split())
            continue
        first = next(iter(runs.values()), result)
        if _samples(result.evaluations[0]) != _samples(first.evaluations[0]):
            faults[job.name] = (
                f"was evaluated on other prompts than {first.name}; delete {job.run_dir} to train "
                "it anew"
            )
        else:
            runs[job.name] = result
    return runs, faults


def _samples(evaluation: EvaluationRecord) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return evaluation.prompts, evaluation.seeds


def read_result(job: Job) -> RunResult:
    """Read a finished run.

    Raises
    ------
    UserError
        If a file is damaged, or lacks what this version writes, or its evaluations are of
        different samples.
    """
    data = read_run(job.run_dir)
    stages = job.config.stages
    missing = [name for name in _needed(stages) if name not in data.metrics]
    if missing or not data.evaluations:
        what = f"no {missing[0]} in metrics.jsonl" if missing else "no evaluations.jsonl"
        raise UserError(
            f"{job.run_dir} has {what}, as other versions of workflow-rl leave it; delete it to "
            "train it anew"
        )
    if any(_samples(e) != _samples(data.evaluations[0]) for e in data.evaluations):
        raise UserError(
            f"{job.run_dir} was evaluated on other prompts before a stop than after it; delete it "
            "to train it anew"
        )
    made = {name: _counts(data, name) for name in stages}
    last = made[list(stages)[-1]]
    first, final = data.evaluations[0], data.evaluations[-1]
    return RunResult(
        variant=job.variant,
        seed=job.seed,
        run_dir=job.run_dir,
        videos=sum(last),
        denoising_steps=sum(
            sum(counts) * stages[name].num_inference_steps for name, counts in made.items()
        ),
        evaluations=tuple(data.evaluations),
        videos_at=tuple(sum(last[: evaluation.iteration]) for evaluation in data.evaluations),
        change=compare(first, final, confidence=job.config.evaluation.confidence),
        variance={name: _mean(data.metrics[_share(name)]) for name in stages},
        check=read_check(job.run_dir),
        stopped_by=tuple(
            alarm.guard
            for alarm in data.alarms
            if alarm.action == "stop" and alarm.iteration == job.iterations
        ),
    )


def _needed(stages: Iterable[str]) -> list[str]:
    """Return the names of the metrics that are read."""
    return [name for stage in stages for name in (_made(stage), _share(stage))]


def _made(stage: str) -> str:
    return f"samples/{stage}"


def _share(stage: str) -> str:
    return f"variance/{stage}_share"


def _counts(data: RunData, stage: str) -> list[int]:
    """Return the samples that a stage made in each iteration."""
    counts = data.metrics[_made(stage)]
    for iteration, count in zip(data.iterations, counts, strict=True):
        if math.isnan(count):
            raise UserError(
                f"the line of iteration {iteration} in metrics.jsonl has no {_made(stage)}, so it "
                "is damaged; delete the run's directory to train it anew"
            )
    return [int(count) for count in counts]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, NaN where there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan


def compare(
    first: EvaluationRecord,
    last: EvaluationRecord,
    measure: str | None = None,
    *,
    confidence: float = 0.95,
) -> PairedComparison:
    """Compare the scores, or a measure, of two evaluations of the same samples."""
    before, after = (
        line.scores if measure is None else line.measures[measure] for line in (first, last)
    )
    return paired_bootstrap(
        before, after, clusters=first.prompts, confidence=confidence, samples=BOOTSTRAP_SAMPLES
    )
