"""``workflow-rl export``."""

from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.cli.preflight import model_folder
from workflow_rl.cli.progress import show_message
from workflow_rl.config.model_folder import check_model_folder
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.export.options import (
    DTypeName,
    ExportFormat,
    ExportOptions,
    KeyFormat,
    Weights,
    check_key_format,
    check_options,
)


def export(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)
    ],
    stage: Annotated[
        str, typer.Option("--stage", help="Stage to export, such as i2v.", show_default=False)
    ],
    export_format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="lora: the adapters alone; merged: the stage's transformers, with the LoRA merged "
            "in; diffusers: the whole pipeline folder.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder to make; default: RUN/export/STAGE-FORMAT."),
    ] = None,
    weights: Annotated[
        Weights | None,
        typer.Option("--weights", help="Whose weights; default: the run's evaluation.weights."),
    ] = None,
    iteration: Annotated[
        int | None,
        typer.Option("--iteration", min=0, help="Which checkpoint; default: the newest."),
    ] = None,
    dtype: Annotated[
        DTypeName | None,
        typer.Option("--dtype", help="Type; default: float32 for a LoRA, else the stage's own."),
    ] = None,
    key_format: Annotated[
        KeyFormat,
        typer.Option("--key-format", help="Names of the tensors: diffusers' or ComfyUI's."),
    ] = KeyFormat.DIFFUSERS,
) -> None:
    """Write what a run trained in a stage, for plain diffusers or ComfyUI.

    **Examples**

    ```
    workflow-rl export runs/quickstart --stage i2v --format diffusers
    workflow-rl export runs/flux_wan --stage t2i --format lora --output flux_lora
    workflow-rl export runs/flux_wan --stage i2v --format lora --key-format comfyui
    workflow-rl export runs/flux_wan --stage i2v --format merged --weights ema --dtype bfloat16
    ```

    docs/export.md shows how each is loaded.
    """
    config = load_run_config(run_dir)
    options = ExportOptions(stage, export_format, output, weights, iteration, dtype, key_format)
    chosen = check_options(config, options)
    folder = model_folder(stage, chosen)
    family = check_model_folder(folder, f"stages.{stage}.model", chosen)
    check_key_format(family.name, options)
    from workflow_rl.export.run import export_run

    typer.echo(export_run(run_dir, options, on_message=show_message))
