"""``workflow-rl evaluate``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from workflow_rl.cli.preflight import (
    check_frames,
    check_inputs,
    check_rewards_import,
    read_prompts,
)
from workflow_rl.cli.progress import show_message
from workflow_rl.config import RunConfig
from workflow_rl.config.run_dir import load_run_config


def evaluate(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="Prompts; default: the run's data.eval_prompts."),
    ] = None,
    seeds_per_prompt: Annotated[
        int | None,
        typer.Option("--seeds-per-prompt", min=1, help="Chains per prompt; default: the run's."),
    ] = None,
) -> None:
    """Compare the chain before and after training: same prompts, same seeds, no noise.

    Prints the mean reward of both with the bootstrap interval (evaluation.confidence) of the
    paired difference, and writes these figures to evaluation.json in the run directory. The
    weights are the run's evaluation.weights; no video is written.

    **Examples**

    ```
    workflow-rl evaluate runs/quickstart
    workflow-rl evaluate runs/quickstart --prompts more_prompts.txt --seeds-per-prompt 16
    ```
    """
    config = load_run_config(run_dir)
    check_inputs(config)
    if prompts is not None:
        records = read_prompts(prompts, config.stages)
        check_frames(config.stages, [r.first_frame for r in records if r.first_frame is not None])
    check_rewards_import(config)
    from workflow_rl.serving.evaluate import evaluate_run

    result = evaluate_run(
        run_dir, prompts=prompts, seeds_per_prompt=seeds_per_prompt, on_message=show_message
    )
    table = Table("", "before", "after", "difference", interval_heading(config), "better")
    for name, comparison in {"reward": result.comparison, **result.components}.items():
        difference = comparison.difference
        table.add_row(
            name,
            f"{comparison.before:.4f}",
            f"{comparison.after:.4f}",
            f"{difference.mean:+.4f}",
            f"{difference.low:+.4f} to {difference.high:+.4f}",
            f"{comparison.win_rate:.0%}",
        )
    Console().print(table)
    typer.echo(f"after {result.iteration} iterations, {len(result.before.scores)} chains each")
    failed = result.comparison.difference.failed
    if failed:
        typer.echo(f"{failed} pairs left out, because a reward failed on one of the two", err=True)


def interval_heading(config: RunConfig) -> str:
    """Name the interval of the differences, such as ``95% interval``."""
    return f"{config.evaluation.confidence * 100:g}% interval"
