"""Before and after: the checkpoints a run began with against the weights it trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workflow_rl.config import load_prompts
from workflow_rl.config.run import EvaluationConfig
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.evaluation.chain import Evaluation, evaluate_chain
from workflow_rl.evaluation.statistics import PairedComparison, paired_bootstrap
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.serving.chain import ServedChain, load_chain, publish_run, served_role
from workflow_rl.training.iteration_log import strict_json
from workflow_rl.workflow import StagePlan

EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class BeforeAfter:
    """Paired evaluation of a run on the same prompts and seeds."""

    iteration: int
    before: Evaluation
    after: Evaluation
    comparison: PairedComparison
    components: dict[str, PairedComparison]


def evaluate_run(
    run_dir: Path,
    *,
    prompts: Path | None = None,
    seeds_per_prompt: int | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> BeforeAfter:
    """Evaluate the chain of a run before and after training, and write ``evaluation.json``.

    Parameters
    ----------
    prompts
        Prompt file; None: the run's held-out prompts.
    seeds_per_prompt
        Chains per prompt; None: the run's.

    Raises
    ------
    UserError
        If the run has no checkpoint.
    """
    config = load_run_config(run_dir)
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    path = prompts or config.data.eval_prompts or config.data.prompts
    records = load_prompts(path, list(config.stages))
    reward = build_rewards([term.model_dump() for term in config.rewards])
    reward.load()  # one that cannot is told before the models are loaded
    chain = load_chain(config.workflow, config.stages, config.training.device)
    plans = _plans(chain, config.evaluation)
    seeds = seeds_per_prompt or config.evaluation.seeds_per_prompt

    def run_once() -> Evaluation:
        return evaluate_chain(
            chain.workflow, chain.instances, plans, reward, records, seeds_per_prompt=seeds
        )

    before = run_once()
    iteration = publish_run(chain, run_dir, served_role(config), on_message)
    result = _compared(iteration, before, run_once(), config.evaluation)
    _write(run_dir / EVALUATION_FILE, path, seeds, result)
    return result


def _plans(chain: ServedChain, options: EvaluationConfig) -> dict[str, StagePlan]:
    """Return each stage's plan with the evaluation's batch size and number of steps."""
    plans = {}
    for name, plan in chain.plans.items():
        steps = options.num_inference_steps or plan.params.num_inference_steps
        params = replace(plan.params, num_inference_steps=steps)
        plans[name] = replace(plan, slots=options.batch_size, params=params)
    return plans


def _compared(
    iteration: int, before: Evaluation, after: Evaluation, options: EvaluationConfig
) -> BeforeAfter:
    def compare(first: torch.Tensor, second: torch.Tensor) -> PairedComparison:
        return paired_bootstrap(
            first.tolist(),
            second.tolist(),
            clusters=before.prompts,
            confidence=options.confidence,
            samples=options.bootstrap_samples,
        )

    return BeforeAfter(
        iteration,
        before,
        after,
        compare(before.scores, after.scores),
        {n: compare(values, after.components[n]) for n, values in before.components.items()},
    )


def _summary(comparison: PairedComparison) -> dict[str, float]:
    return {
        "before": comparison.before,
        "after": comparison.after,
        "difference": comparison.difference.mean,
        "low": comparison.difference.low,
        "high": comparison.difference.high,
        "win_rate": comparison.win_rate,
        "failed_pairs": comparison.difference.failed,
    }


def _write(path: Path, prompts: Path, seeds_per_prompt: int, result: BeforeAfter) -> None:
    content = {
        "iteration": result.iteration,
        "prompts": str(prompts),
        "seeds_per_prompt": seeds_per_prompt,
        "reward": _summary(result.comparison),
        "components": {name: _summary(c) for name, c in result.components.items()},
    }
    text = json.dumps(strict_json(content), indent=2, allow_nan=False)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
