"""``workflow-rl init``."""

import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

import workflow_rl
from workflow_rl.errors import UserError
from workflow_rl.evaluation.output_folder import whole_folder

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
    try:
        with ExitStack() as all_or_none:
            for name in FOLDERS:
                folder = all_or_none.enter_context(whole_folder(target / name))
                _copy(shipped_folder() / name, folder)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}); give another folder"
        ) from None
    for path in sorted((target / "configs").glob("*.yaml")):
        typer.echo(path)
    where = "" if target == Path() else f"cd {shlex.quote(str(target))} && "
    typer.echo(f"next: {where}workflow-rl train configs/quickstart.yaml")


def _copy(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def shipped_folder() -> Path:
    """Return the folder in which the shipped configs and examples lie.

    They are in the package where it is installed from a wheel, beside it in a checkout.
    """
    package = Path(workflow_rl.__file__).parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent
