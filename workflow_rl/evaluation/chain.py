"""Deterministic evaluation of a chain: fixed prompts and seeds, ODE steps, one reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from workflow_rl.config import PromptRecord
from workflow_rl.enums import ExecutionProfile
from workflow_rl.evaluation.diversity import (
    FloatArray,
    distances,
    prompt_diversity,
    signature,
)
from workflow_rl.evaluation.finite import fail_not_finite, finite_samples
from workflow_rl.instance import ModelInstance
from workflow_rl.rewards.base import RewardBatch
from workflow_rl.rewards.composite import CompositeReward, StageMedia, TreeScores
from workflow_rl.runtime.driver import OnProgress
from workflow_rl.workflow import StageOutput, StagePlan, Workflow, run_chain

EVALUATION_DRAW = -1
"""Draw number of evaluation noise: never that of a training iteration, which counts from 0."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of prompts x seeds, prompt-major, and what was scored.

    ``scores`` and ``components`` are float32 [P * S], NaN where a sample failed.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    scores: torch.Tensor
    components: Mapping[str, torch.Tensor]
    failures: Mapping[int, str]
    outputs: tuple[StageOutput, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON types; a failed sample's score is None."""
        return {
            "prompts": list(self.prompts),
            "seeds": list(self.seeds),
            "scores": _json_numbers(self.scores),
            "components": {name: _json_numbers(v) for name, v in self.components.items()},
            "failures": {str(row): reason for row, reason in self.failures.items()},
            "diversity": [v if math.isfinite(v) else None for v in self.diversity().tolist()],
        }

    def diversity(self) -> FloatArray:
        """Return how far apart each prompt's samples are from seed to seed, ``[P]``.

        NaN with fewer than two that are finite; see :mod:`workflow_rl.evaluation.diversity`.
        """
        made_N = torch.stack([finite_samples(output) for output in self.outputs]).all(0)
        signatures = [signature(media) for media in self.outputs[-1].media]
        blocks = distances(signatures, self.prompts)
        return prompt_diversity(blocks, self.prompts, np.array(made_N.tolist(), dtype=np.bool_))


def _json_numbers(values: torch.Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def stage_media(outputs: Sequence[StageOutput]) -> dict[str, StageMedia]:
    """Return the outputs of a chain as the reward layer takes them.

    The reward sees the chain's prompt, not a stage's own text.
    """
    return {
        output.stage.name: StageMedia(_reward_batch(output), parents=output.parents)
        for output in outputs
    }


def _reward_batch(output: StageOutput) -> RewardBatch:
    """Return the samples of a stage, or of a part of one, as a reward sees them."""
    return RewardBatch(
        prompts=[request.sample.prompt for request in output.requests],
        sample_ids=[str(request.sample) for request in output.requests],
        media=output.media,
        media_kind=output.media_kind.value,
        fps=output.fps,
    )


class ChainScoring:
    """Scores of a chain that is being sampled: what is made is sent to the rewards at once.

    That holds for rewards in a process of their own or behind a server, judges among them. Those
    in this process are called at the end: they would compete for the device that samples. The
    scores are those of scoring at the end: the requests are the same. A sample that is not finite
    has failed, and so have its leaves.

    Parameters
    ----------
    samples
        Stage name to its samples per sample of the stage before, in the order of the chain.
    """

    def __init__(self, reward: CompositeReward, samples: Mapping[str, int]) -> None:
        self._reward = reward
        self._arriving = reward.arriving(samples)

    def made(self, part: StageOutput) -> None:
        """Take the next samples of a stage: the ``on_made`` of ``run_chain``."""
        self._arriving.add(part.stage.name, _reward_batch(part))

    def finish(self, outputs: Sequence[StageOutput]) -> TreeScores:
        """Return the scores of the whole chain."""
        scores = self._reward.score_tree(stage_media(outputs), self._arriving)
        return fail_not_finite(outputs, scores)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._arriving.cancel()


def evaluate_chain(
    workflow: Workflow,
    instances: Mapping[str, ModelInstance],
    plans: Mapping[str, StagePlan],
    reward: CompositeReward,
    prompts: Sequence[PromptRecord],
    *,
    seeds_per_prompt: int,
    on_progress: Callable[[str], OnProgress] | None = None,
    wake: Callable[[str], None] | None = None,
) -> Evaluation:
    """Sample one chain per prompt and seed without noise in the steps, and score it.

    Rewards that compare the samples of a group are left out.

    Parameters
    ----------
    plans
        Stage name to plan; its branching and stochastic steps are set aside.
    seeds_per_prompt
        Seeds 0 to this minus 1, the same for every prompt and every call.
    on_progress
        Gives a progress callback for a stage's name.
    wake
        Called with a stage's name before it works.
    """
    chains = [prompt for prompt in prompts for _ in range(seeds_per_prompt)]
    seeds = list(range(seeds_per_prompt)) * len(prompts)
    return evaluate_samples(
        workflow,
        instances,
        plans,
        reward,
        chains,
        seeds,
        on_progress=on_progress,
        wake=wake,
    )


def evaluate_samples(
    workflow: Workflow,
    instances: Mapping[str, ModelInstance],
    plans: Mapping[str, StagePlan],
    reward: CompositeReward,
    chains: Sequence[PromptRecord],
    seeds: Sequence[int],
    *,
    on_progress: Callable[[str], OnProgress] | None = None,
    wake: Callable[[str], None] | None = None,
) -> Evaluation:
    """Sample the chain once per entry of ``chains`` and ``seeds``, and score it.

    Parameters as for :func:`evaluate_chain`.
    """
    serving = {
        name: replace(plan, samples=1, params=replace(plan.params, sde_steps=()))
        for name, plan in plans.items()
    }
    with ChainScoring(reward.pointwise(), {s.name: 1 for s in workflow.stages}) as scoring:
        outputs = run_chain(
            workflow,
            instances,
            serving,
            chains,
            seeds,
            profiles={stage.name: ExecutionProfile.SERVE for stage in workflow.stages},
            draw=EVALUATION_DRAW,
            on_progress=on_progress,
            wake=wake,
            on_made=scoring.made,
        )
        scored = scoring.finish(outputs)
    return Evaluation(
        prompts=tuple(chain.prompt for chain in chains),
        seeds=tuple(seeds),
        scores=scored.total,
        components=scored.components,
        failures=scored.failures,
        outputs=tuple(outputs),
    )
