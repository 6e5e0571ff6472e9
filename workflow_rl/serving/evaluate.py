"""Does an evaluation: makes or reads every sample once, and scores it by all rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from workflow_rl.config import RunConfig
from workflow_rl.evaluation.candidates import (
    RunCandidate,
    distinct,
    parse_candidates,
    run_label,
)
from workflow_rl.evaluation.chain import evaluate_samples
from workflow_rl.evaluation.comparison import TOTAL, Comparison, ScoredCandidate, compare
from workflow_rl.evaluation.finite import finite_samples
from workflow_rl.evaluation.job import EvaluationJob, Row, make_job
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.serving.chain import ServedChain
from workflow_rl.serving.evaluate_batches import Collected, ScoredBatch, in_batches
from workflow_rl.serving.evaluate_folder import check_files, score_files
from workflow_rl.serving.evaluate_grid import GridWriter
from workflow_rl.serving.evaluate_models import (
    EvaluationListener,
    ResidentModels,
    SilentListener,
    find_checkpoints,
)
from workflow_rl.workflow import StagePlan


def evaluate_run(run_dir: Path, **options: Any) -> Comparison:
    """Compare a run with its start; ``options`` as of `make_job`. Writes nothing."""
    candidates, baseline = parse_candidates([str(run_dir)])
    return evaluate(make_job(candidates, baseline, **options))


def evaluate(
    job: EvaluationJob,
    *,
    grid: Path | None = None,
    listener: EvaluationListener | None = None,
) -> Comparison:
    """Evaluate the candidates one after the other, and compare them.

    The models of one run are freed before the next is loaded; only a run's start and a checkpoint
    of the same run share a load.

    Parameters
    ----------
    grid : Path, optional
        Folder for side-by-side videos or images, one per prompt.

    Raises
    ------
    UserError
        If a run has no such checkpoint or it is damaged, a reward cannot load or score these
        media, or a file of a folder cannot be read.
    """
    listener = listener or SilentListener()
    threads = [run.config.training.threads for run in job.runs]
    if threads and threads[0] is not None:
        torch.set_num_threads(threads[0])
    reward = build_rewards([term.model_dump() for term in job.rewards]).pointwise()
    _check_media(job, reward)
    for files in job.files.values():
        check_files(files, job.kind)
    checkpoints = find_checkpoints(job, listener)
    reward.load()  # one that cannot is told before the models are loaded
    labels, descriptions = _describe(job, checkpoints)
    cells = None if grid is None else GridWriter(grid, job.kind)
    models = ResidentModels(listener)
    scored = []
    for index, label in enumerate(labels):
        listener.begin(label, len(job.rows))
        collected = Collected(len(job.rows))
        for batch in _batches(job, index, checkpoints.get(index), reward, models, listener):
            if cells is not None:
                for media, fps in zip(batch.media, batch.fps, strict=True):
                    cells.add(media, fps)
            collected.add(batch)
            listener.scored(len(batch.media))
        scored.append(collected.candidate(label, descriptions[index], job, index))
    models.free()
    if cells is not None:
        cells.write(labels, [(row.record.prompt, row.seed) for row in job.rows])
    return _compared(job, reward, scored)


def _compared(
    job: EvaluationJob, reward: CompositeReward, scored: Sequence[ScoredCandidate]
) -> Comparison:
    """Give every candidate the same measures, and compare them."""
    names = list(dict.fromkeys(name for candidate in scored for name in candidate.measures))
    nothing_N = torch.full((len(job.rows),), math.nan)
    whole = [
        replace(c, measures={name: c.measures.get(name, nothing_N) for name in names})
        for c in scored
    ]
    sum_says_more = len(reward.terms) > 1 or reward.terms[0].weight != 1
    of_terms = _sources(job, reward)
    labels = dict(zip(reward.labels, of_terms, strict=True))
    sources: dict[str, list[str]] = {}
    if job.weighted and sum_says_more:
        weights = [term.weight for term in reward.terms]
        sources[TOTAL] = [of for of, weight in zip(of_terms, weights, strict=True) if weight]
    sources |= {name: [labels[_label_of(name, labels)]] for name in names}
    return compare(
        whole,
        job.prompts,
        [row.seed for row in job.rows],
        sources,
        baseline=job.baseline,
        confidence=job.options.confidence,
        samples=job.options.bootstrap_samples,
        settings={
            "prompts_file": str(job.prompts_file),
            "rewards": [term.model_dump(mode="json") for term in job.rewards],
            "left_out": job.left_out,
        },
    )


def _sources(job: EvaluationJob, reward: CompositeReward) -> list[str]:
    """Return the name or callable of each term that scores a sample alone."""
    names = [str(term.name or term.callable) for term in job.rewards]
    built = build_rewards([term.model_dump() for term in job.rewards])
    return [name for name, term in zip(names, built.terms, strict=True) if term.group is None]


def _label_of(measure: str, labels: Mapping[str, str]) -> str:
    """Return the label of the reward that ``label`` or ``label/part`` comes from."""
    return max((x for x in labels if measure == x or measure.startswith(f"{x}/")), key=len)


def _check_media(job: EvaluationJob, reward: CompositeReward) -> None:
    for run in job.runs:
        tasks = {name: stage.task for name, stage in run.config.stages.items()}
        reward.check_stages({n: "image" if t == "t2i" else "video" for n, t in tasks.items()})
    if not job.runs:
        reward.check_stages({"folder": job.kind.value})


def _describe(
    job: EvaluationJob, checkpoints: Mapping[int, Path]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the labels of the candidates, and what each of them is."""
    labels, descriptions = [], []
    for index, candidate in enumerate(job.candidates):
        about: dict[str, Any] = {"argument": candidate.argument}
        if isinstance(candidate, RunCandidate):
            path = checkpoints.get(index)
            iteration = 0 if path is None else int(path.name.rpartition("_")[2])
            labels.append(run_label(candidate, iteration))
            about |= {"kind": "run", "iteration": iteration, "weights": candidate.weights}
        else:
            labels.append(candidate.path.resolve().name)
            about |= {"kind": "folder", "iteration": None, "weights": None}
        descriptions.append(about)
    return distinct(labels, [c.argument for c in job.candidates]), descriptions


def _batches(
    job: EvaluationJob,
    index: int,
    checkpoint: Path | None,
    reward: CompositeReward,
    models: ResidentModels,
    listener: EvaluationListener,
) -> Iterator[ScoredBatch]:
    """Make or read the rows of a candidate in batches, and score them."""
    candidate = job.candidates[index]
    if not isinstance(candidate, RunCandidate):
        models.free()
        for rows in in_batches(job.rows, job.options.batch_size):
            yield score_files(rows, job.files[index], job.kind, reward)
        return
    config = candidate.config
    chain = models.chain(candidate, checkpoint)
    plans = _plans(chain, config)
    for rows in in_batches(job.rows, config.evaluation.batch_size):
        yield _sample(chain, plans, config, rows, reward, listener)


def _sample(
    chain: ServedChain,
    plans: Mapping[str, StagePlan],
    config: RunConfig,
    rows: Sequence[Row],
    reward: CompositeReward,
    listener: EvaluationListener,
) -> ScoredBatch:
    result = evaluate_samples(
        chain.workflow,
        chain.instances,
        plans,
        reward,
        [row.record for row in rows],
        [row.seed for row in rows],
        on_progress=lambda stage: partial(listener.step, stage),
        wake=chain.wake if config.training.swap_stages else None,
    )
    made_N = torch.stack([finite_samples(output) for output in result.outputs]).all(0)
    last = result.outputs[-1]
    return ScoredBatch(
        list(last.media),
        [last.fps] * len(rows),
        made_N.tolist(),
        result.scores,
        result.components,
        result.failures,
    )


def _plans(chain: ServedChain, config: RunConfig) -> dict[str, StagePlan]:
    """Return each stage's plan with the batch size and number of steps of the run's evaluations."""
    options = config.evaluation
    plans = {}
    for name, plan in chain.plans.items():
        steps = options.num_inference_steps or plan.params.num_inference_steps
        params = replace(plan.params, num_inference_steps=steps)
        plans[name] = replace(plan, slots=options.batch_size, params=params)
    return plans
