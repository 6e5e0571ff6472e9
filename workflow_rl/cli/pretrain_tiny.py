"""``workflow-rl pretrain-tiny``."""

from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.errors import UserError


def pretrain_tiny(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="New folder for tiny-flux-t2i and tiny-wan-i2v."),
    ] = Path("outputs/embedded"),
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the pre-training.")] = 0,
) -> None:
    """Pre-train the embedded pair of models on the drawn world (an hour or more on two cores).

    Stopped, it goes on where it was when called again. This is how the pair that ships with the
    project was made; its recipe, time and losses are in each model folder's README.

    **Example**

    ```
    workflow-rl pretrain-tiny --output outputs/embedded
    ```
    """
    begun = (output / "stages" / "recipe.json").is_file()
    if output.exists() and not begun and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"--output {output} is not empty; give a new folder")
    from workflow_rl.embedded.pretrain import pretrain

    for folder in pretrain(output, seed=seed, log=typer.echo):
        typer.echo(folder)
