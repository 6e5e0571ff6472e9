"""How often a stage does what in one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.loop.window import SDEWindow


@dataclass(frozen=True)
class Work:
    """What a stage does in one iteration on the busiest GPU, and in which batches.

    Of ``prompts``, ``samples`` are made, from ``conditions`` encoded images; ``texts`` are encoded,
    of ``texts_cached`` in the run. Of ``steps`` denoising steps ``trained_steps`` are trained on,
    in ``updates`` passes. An evaluation makes ``evaluated`` samples.
    """

    prompts: int
    samples: int
    conditions: int
    texts: int
    texts_cached: int
    steps: int
    trained_steps: int
    updates: int
    with_reference: bool
    rollout_batch: int
    training_batch: int
    evaluation_batch: int
    evaluated: int


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts: of an iteration on the busiest GPU, of the run, and of an evaluation."""

    per_gpu: int
    run: int
    evaluated: int


def stage_work(
    config: RunConfig, stage: StageConfig, parents: int, prompts: Prompts, *, guided: bool
) -> Work:
    """Return the work of one stage.

    Parameters
    ----------
    parents
        Inputs of the stage: prompts, or the samples of the stage before it.
    guided
        Whether the negative prompt is a text more.
    """
    samples = parents * stage.samples
    rows = [row for row in range(parents) for _ in range(stage.samples)]
    negative = 1 if guided else 0
    chains = prompts.evaluated * config.evaluation.seeds_per_prompt
    return Work(
        prompts=prompts.per_gpu,
        samples=samples,
        conditions=distinct_per_batch(rows, stage.rollout_batch_size) if stage.task == "i2v" else 0,
        texts=0 if stage.memory.drop_text_encoders else prompts.per_gpu + negative,
        texts_cached=prompts.run + negative,
        steps=stage.num_inference_steps,
        trained_steps=trained_steps(stage),
        updates=config.training.updates_per_iteration,
        with_reference=stage.kl_weight > 0 and not stage.freeze,
        rollout_batch=min(stage.rollout_batch_size, samples),
        training_batch=min(stage.training_batch_size, samples),
        evaluation_batch=min(config.evaluation.batch_size, chains),
        evaluated=chains,
    )


def trained_steps(stage: StageConfig) -> int:
    """Return how many denoising steps are stochastic, and so trained."""
    if stage.freeze:
        return 0
    window = SDEWindow(**stage.sde.window.model_dump())
    return len(window.steps(stage.num_inference_steps, 0, 0))


def distinct_per_batch(parents: Sequence[int], batch: int) -> int:
    """Return how many images are encoded when samples with these ``parents`` run in batches."""
    return sum(len(set(parents[start : start + batch])) for start in range(0, len(parents), batch))
