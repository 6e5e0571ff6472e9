"""``workflow-rl train`` and ``workflow-rl resume``."""

from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.cli.arguments import ConfigArgument, OverridesArgument
from workflow_rl.cli.preflight import (
    check_hardware,
    check_inputs,
    check_rewards_import,
    with_commits,
)
from workflow_rl.cli.progress import showing
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.more_iterations import load_run_to_go_on
from workflow_rl.config.run_dir import (
    check_new_run_dir,
    create_run_dir,
    discard_unused_run_dir,
)
from workflow_rl.errors import UserError
from workflow_rl.training.checkpoint_folders import iterations_done

STOPPED_EXIT_CODE = 130
"""Exit code of a run that SIGINT or SIGTERM stopped, as shells have it."""


def train(
    config_path: ConfigArgument,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check configuration, prompts, model folders, rewards, device and attention; load "
            "no model, write nothing.",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the run directory.")
    ] = False,
) -> None:
    """Train the stages of a chain from a reward on the last stage's output.

    **Examples**

    ```
    workflow-rl train configs/quickstart.yaml
    workflow-rl train configs/quickstart.yaml seed=1 output_dir=runs/seed1
    workflow-rl train configs/quickstart.yaml stages.t2i.freeze=true
    workflow-rl train configs/quickstart.yaml credit.rule=shared training.iterations=120
    workflow-rl train my_chain.yaml --dry-run
    ```

    The run directory (output_dir) gets config.yaml, metrics.jsonl, a log, TensorBoard events and
    checkpoints. A model that is named by its hub id is fetched into the hub's cache, and the run
    keeps to that commit. Ctrl-C ends the iteration, writes a checkpoint and stops; `workflow-rl
    resume` goes on from there. Before anything is loaded the configuration, the prompts, the model
    folders, the run directory, the device and attention are checked.
    """
    config = load_config(config_path, overrides or [])
    check_hardware(config)
    check_inputs(config)
    config = with_commits(config)
    check_new_run_dir(config, overwrite=overwrite)
    check_rewards_import(config)
    if dry_run:
        typer.echo(f"{config_path} is ready to train:\n{_summary(config)}")
        return
    create_run_dir(config, overwrite=overwrite)
    try:
        _train(config, resume=False)
    except UserError:
        discard_unused_run_dir(config.output_dir)
        raise


def resume(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Run directory of an earlier `train`.", show_default=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="training.iterations=N",
            help="Train on to N iterations, where the learning rates are constant.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Go on with a run that was stopped or killed, from its last whole checkpoint, or train it on.

    The result is that of a run that was never stopped; with training.iterations=N that of a run
    that began with N. The rest of the configuration is the run's own.

    **Examples**

    ```
    workflow-rl resume runs/quickstart
    workflow-rl resume runs/my_chain training.iterations=300
    ```
    """
    done = iterations_done(run_dir / "checkpoints")
    config = load_run_to_go_on(run_dir, overrides or [], done)
    check_hardware(config)
    check_inputs(config)
    check_rewards_import(config)
    _train(config, resume=True)


def _train(config: RunConfig, *, resume: bool) -> None:
    """Train and show it; exit with code 130 where a signal stopped the run early."""
    from workflow_rl.training.trainer import train as run_training

    run_dir = config.output_dir
    with showing(run_dir) as listener:
        try:
            stopped_after = run_training(config, resume=resume, listener=listener)
        except KeyboardInterrupt:
            listener.message(
                "stopped at once; go on from the last checkpoint, or from the start where there is "
                f"none yet, with: workflow-rl resume {run_dir}"
            )
            raise typer.Exit(STOPPED_EXIT_CODE) from None
        if stopped_after is None:
            listener.message(f"trained; next: workflow-rl report {run_dir}")
            return
        listener.message(
            f"stopped after iteration {stopped_after}, its checkpoint is written; "
            f"go on with: workflow-rl resume {run_dir}"
        )
    raise typer.Exit(STOPPED_EXIT_CODE)


def _summary(config: RunConfig) -> str:
    """Say in a few lines what a configuration would do."""
    lines = []
    inputs = config.data.prompts_per_iteration
    for name, stage in config.stages.items():
        model = "the embedded model" if stage.model is None else str(stage.model)
        state = "frozen" if stage.freeze else f"lr {stage.optimizer.lr:g}"
        made = inputs * stage.samples
        lines.append(
            f"  {name}: {model}, {inputs} × {stage.samples} = {made} samples per iteration, "
            f"{stage.num_inference_steps} steps, {stage.sde.kind}, {state}"
        )
        inputs = made
    rewards = ", ".join(f"{r.weight:g} × {r.name or r.callable}" for r in config.rewards)
    lines.append(f"  reward: {rewards}; credit: {config.credit.rule}")
    lines.append(f"  {config.training.iterations} iterations into {config.output_dir}")
    lines.append(f"  fingerprint {config.fingerprint()}")
    return "\n".join(lines)
