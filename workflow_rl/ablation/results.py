"""What the runs of an ablation show: each run, each variant, and the checks on the whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workflow_rl.ablation.check_file import WeightsCheck
from workflow_rl.ablation.jobs import Job, exists, is_finished, is_stale, iterations_done
from workflow_rl.ablation.levels import first_reached, mean_score
from workflow_rl.ablation.run_results import BOOTSTRAP_SAMPLES, RunResult, read_finished
from workflow_rl.ablation.variants import CONSTANT, SHARED
from workflow_rl.evaluation.statistics import (
    Interval,
    PairedComparison,
    bootstrap_interval,
    paired_bootstrap,
)
from workflow_rl.report.run_data import EvaluationRecord


@dataclass(frozen=True)
class VariantResult:
    """A variant over its finished runs.

    ``change`` and ``against`` are of means over the seeds, paired by sample, with intervals over
    prompts; ``against`` compares with the reference on the seeds that both have, ``ahead`` of
    them the variant ends higher on. Under a constant reward there is neither.
    """

    name: str
    what: str
    runs: tuple[RunResult, ...]
    change: PairedComparison | None
    against: PairedComparison | None
    ahead: int
    compared: int
    measures: Mapping[str, PairedComparison]


@dataclass(frozen=True)
class Unfinished:
    """A run that was asked for and is not finished; ``reason`` is empty where nothing failed."""

    name: str
    done: int
    iterations: int
    reason: str


@dataclass(frozen=True)
class AblationResult:
    """All variants, and the checks.

    Attributes
    ----------
    stages, output_name
        Names of the stages; what the last one makes, ``videos`` or ``images``.
    confidence : float
        Level of the intervals.
    to_shared : mapping of (variant, seed) to int or None
        Outputs made until the run first reached the best level of the shared run of its seed;
        None if it never did.
    failures
        By name of a finished run, why its process failed after all iterations.
    """

    stages: tuple[str, ...]
    output_name: str
    reference: str
    confidence: float
    left_out: Mapping[str, str]
    variants: tuple[VariantResult, ...]
    unfinished: tuple[Unfinished, ...]
    to_shared: Mapping[tuple[str, int], int | None]
    failures: Mapping[str, str]

    @property
    def runs(self) -> list[RunResult]:
        """All finished runs."""
        return [run for variant in self.variants for run in variant.runs]

    @property
    def equal(self) -> bool:
        """Whether all finished runs made equally many outputs, in equally many steps."""
        return len({(run.videos, run.denoising_steps) for run in self.runs}) <= 1

    @property
    def checks(self) -> dict[str, WeightsCheck]:
        """What the control's check found, by name of the constant reward's runs."""
        return {run.name: run.check for run in self.runs if run.check is not None}

    @property
    def moved(self) -> list[str]:
        """Names of the constant reward's runs in which a weight moved."""
        return [name for name, check in self.checks.items() if check.moved]

    @property
    def failed(self) -> list[str]:
        """Names of the finished runs whose process failed at the end, and by no guard."""
        stopped = {run.name for run in self.runs if run.stopped_by}
        return [name for name in self.failures if name not in stopped]


def collect(
    jobs: Sequence[Job],
    wanted: Sequence[str],
    what: Mapping[str, str],
    failures: Mapping[str, str],
    *,
    left_out: Mapping[str, str],
    reference: str,
) -> AblationResult:
    """Read the finished runs, those of an earlier call too.

    A run whose files are damaged, or that was evaluated on other prompts than the first, counts
    as one that failed.

    Parameters
    ----------
    jobs
        The runs of all variants.
    wanted
        Names of the variants that were chosen; unfinished runs of others are not mentioned.
    what
        By variant, what it is.
    failures
        By name of a run, why it failed just now, or at its end in an earlier call.
    left_out, reference
        See `workflow_rl.ablation.variants.Variants`.
    """
    config = jobs[0].config
    runs, unreadable = read_finished([job for job in jobs if is_finished(job)])
    reasons = {**failures, **unreadable}
    by_variant = {
        name: tuple(runs[j.name] for j in jobs if j.variant == name and j.name in runs)
        for name in what
    }
    *_, last = config.stages.values()
    return AblationResult(
        stages=tuple(config.stages),
        output_name="images" if last.task == "t2i" else "videos",
        reference=reference,
        confidence=config.evaluation.confidence,
        left_out=left_out,
        variants=tuple(
            _variant(
                name,
                what[name],
                runs_of,
                by_variant[reference],
                reference,
                config.evaluation.confidence,
            )
            for name, runs_of in by_variant.items()
            if runs_of
        ),
        unfinished=tuple(
            Unfinished(job.name, _done(job), job.iterations, reasons.get(job.name, ""))
            for job in jobs
            if job.name not in runs and (job.variant in wanted or job.name in reasons)
        ),
        to_shared=_to_shared(list(runs.values())),
        failures={name: reason for name, reason in failures.items() if name in runs},
    )


def _done(job: Job) -> int:
    return iterations_done(job) if exists(job) and not is_stale(job) else 0


def _variant(
    name: str,
    what: str,
    runs: tuple[RunResult, ...],
    reference_runs: tuple[RunResult, ...],
    reference: str,
    confidence: float,
) -> VariantResult:
    if name == CONSTANT:
        return VariantResult(name, what, runs, None, None, 0, 0, {})
    prompts = runs[0].evaluations[0].prompts

    def over_seeds(
        before: Sequence[EvaluationRecord],
        after: Sequence[EvaluationRecord],
        measure: str | None = None,
    ) -> PairedComparison:
        return paired_bootstrap(
            _seed_mean(before, measure),
            _seed_mean(after, measure),
            clusters=prompts,
            confidence=confidence,
            samples=BOOTSTRAP_SAMPLES,
        )

    firsts, lasts = ([run.evaluations[at] for run in runs] for at in (0, -1))
    ends = {run.seed: run.evaluations[-1] for run in reference_runs}
    pairs = [
        (ends[run.seed], run.evaluations[-1])
        for run in runs
        if run.seed in ends and name != reference
    ]
    return VariantResult(
        name=name,
        what=what,
        runs=runs,
        change=over_seeds(firsts, lasts),
        against=over_seeds([p[0] for p in pairs], [p[1] for p in pairs]) if pairs else None,
        ahead=sum(mean_score(own.scores) > mean_score(other.scores) for other, own in pairs),
        compared=len(pairs),
        measures={
            measure: over_seeds(firsts, lasts, measure)
            for measure in runs[0].evaluations[0].measures
            if all(measure in evaluation.measures for evaluation in (*firsts, *lasts))
        },
    )


def _seed_mean(evaluations: Sequence[EvaluationRecord], measure: str | None) -> list[float]:
    """Return each sample's mean over the seeds, NaN where it failed with one of them."""
    rows = [e.scores if measure is None else e.measures[measure] for e in evaluations]
    return [float(value) for value in np.mean(np.asarray(rows, dtype=np.float64), axis=0)]


def _to_shared(runs: Sequence[RunResult]) -> dict[tuple[str, int], int | None]:
    best = {
        run.seed: max((v for v in run.levels.values() if not math.isnan(v)), default=math.nan)
        for run in runs
        if run.variant == SHARED
    }
    return {
        (run.variant, run.seed): first_reached(best[run.seed], run.levels)
        for run in runs
        if run.seed in best and run.variant != CONSTANT
    }


def curve(runs: Sequence[RunResult], confidence: float) -> tuple[list[int], list[Interval]]:
    """Return the outputs made and the mean held-out reward over the seeds, with its interval.

    At the evaluations that all runs have.
    """
    shared = sorted(set.intersection(*(set(run.videos_at) for run in runs)))
    intervals = []
    for videos in shared:
        evaluations = [run.evaluations[run.videos_at.index(videos)] for run in runs]
        intervals.append(
            bootstrap_interval(
                _seed_mean(evaluations, None),
                clusters=evaluations[0].prompts,
                confidence=confidence,
                samples=BOOTSTRAP_SAMPLES,
            )
        )
    return shared, intervals
