"""The ``workflow-rl`` command: its sub-commands, and what becomes of errors.

Importing this module is cheap. Each command imports what is heavy (torch, diffusers) in its body,
after everything that can be checked without it.
"""

import errno
import logging
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from workflow_rl import __version__
from workflow_rl.cli.ablate import ablate
from workflow_rl.cli.evaluate import evaluate
from workflow_rl.cli.export import export
from workflow_rl.cli.generate import generate
from workflow_rl.cli.init import init
from workflow_rl.cli.kernels import list_kernels
from workflow_rl.cli.plan import plan
from workflow_rl.cli.pretrain_tiny import pretrain_tiny
from workflow_rl.cli.report import report
from workflow_rl.cli.reward_server import reward_server
from workflow_rl.cli.train import resume, train
from workflow_rl.errors import UserError, WorkflowRLError

USER_ERROR_EXIT_CODE = 2
STOPPED_ON_PURPOSE_EXIT_CODE = 1
DISK_REFUSES = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""A full disk, a quota, a limit on a file's size, a disk that is only read."""


class _Commands(TyperGroup):
    """Shows what is raised on purpose as one line; any other exception keeps its traceback.

    A fault in the user's input exits with 2, a stop (C2, updates that are not finite, a full disk,
    a refused publication) with 1.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WorkflowRLError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            is_user_error = isinstance(error, UserError)
            code = USER_ERROR_EXIT_CODE if is_user_error else STOPPED_ON_PURPOSE_EXIT_CODE
            raise typer.Exit(code) from None
        except OSError as error:  # FFmpeg's are some too
            if error.errno not in DISK_REFUSES:
                raise
            what = f"cannot write {error.filename or 'a file'}: {error.strerror}"
            typer.echo(f"error: {what}; make room and run the same command again", err=True)
            raise typer.Exit(STOPPED_ON_PURPOSE_EXIT_CODE) from None


app = typer.Typer(
    name="workflow-rl",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    epilog="`workflow-rl COMMAND --help` shows each command's options and examples.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"workflow-rl {__version__}")
        raise typer.Exit


def _is_needed(record: logging.LogRecord) -> bool:
    """Whether a message of transformers' imports asks for something other than torchvision.

    Nothing here needs torchvision: image processors run on PIL where it is missing.
    """
    return "requires torchvision" not in record.getMessage()


@app.callback()
def workflow_rl(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train a text → image → video chain from one reward on the final video.

    The embedded pair of small models, end to end on two CPU cores:

    ```
    workflow-rl init       # writes configs/ and examples/, where they are not there yet
    workflow-rl train configs/quickstart.yaml
    workflow-rl evaluate runs/quickstart
    workflow-rl report runs/quickstart
    ```
    """
    logging.getLogger("transformers.utils.import_utils").addFilter(_is_needed)


app.command("init")(init)
app.command("train")(train)
app.command("resume")(resume)
app.command("generate")(generate)
app.command("evaluate")(evaluate)
app.command("ablate")(ablate)
app.command("report")(report)
app.command("reward-server")(reward_server)
app.command("export")(export)
app.command("kernels")(list_kernels)
app.command("plan")(plan)
app.command("pretrain-tiny")(pretrain_tiny)


def main() -> None:
    """Run the command line."""
    app()
