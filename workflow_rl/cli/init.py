"""``workflow-rl init``."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

import workflow_rl
from workflow_rl.errors import UserError

FOLDERS = ("configs", "examples")


def init(
    target: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where to; made if it is missing.")
    ] = Path(),
) -> None:
    """Write the configurations and examples that ship with the project, to begin with.

    The folders configs and examples appear in FOLDER, by default the working directory. Paths in a
    configuration are relative to the working directory: run it where the two lie.

    **Examples**

    ```
    workflow-rl init
    workflow-rl init my_project && cd my_project
    workflow-rl train configs/quickstart.yaml
    ```
    """
    for name in FOLDERS:
        if (target / name).exists():
            raise UserError(
                f"{target / name} is there already and is left as it is; give another folder: "
                "workflow-rl init FOLDER"
            )
    source = shipped_folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in FOLDERS:
            shutil.copytree(
                source / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
    except OSError as error:
        reason = error.strerror or "the disk refuses"
        raise UserError(f"{target} cannot be written ({reason}); give another folder") from None
    for path in sorted((target / "configs").glob("*.yaml")):
        typer.echo(path)
    where = "" if target == Path() else f"cd {target} && "
    typer.echo(f"next: {where}workflow-rl train configs/quickstart.yaml")


def shipped_folder() -> Path:
    """Return the folder in which the shipped configs and examples lie.

    They are in the package where it is installed from a wheel, beside it in a checkout.
    """
    package = Path(workflow_rl.__file__).parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent
