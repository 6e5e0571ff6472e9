"""The ``workflow-rl`` command: its sub-commands, and what becomes of errors.

Importing this module is cheap. Each command imports what is heavy (torch, diffusers) in its body,
after everything that can be checked without it.
"""

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
from workflow_rl.cli.one_line import errors_in_one_line
from workflow_rl.cli.plan import plan
from workflow_rl.cli.pretrain_tiny import pretrain_tiny
from workflow_rl.cli.report import report
from workflow_rl.cli.reward_server import reward_server
from workflow_rl.cli.train import resume, train


class _Commands(TyperGroup):
    """Answers every mistake with one line, those in the command line itself too."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if not args:  # shows the help, as an error of its own
            return super().make_context(info_name, args, parent, **extra)
        with errors_in_one_line(info_name or "workflow-rl"):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with errors_in_one_line(f"{ctx.command_path} COMMAND"):
            return super().invoke(ctx)


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
