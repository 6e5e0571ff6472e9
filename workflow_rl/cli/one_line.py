"""What becomes of errors on the command line: one line that names the fault and the mend."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, cast, runtime_checkable

import typer
from typer.core import TyperArgument, TyperOption

from workflow_rl.errors import UserError, WorkflowRLError

USER_ERROR_EXIT_CODE = 2
STOPPED_ON_PURPOSE_EXIT_CODE = 1
MAKE_ROOM = "make room and run the same command again"
DISK_REFUSES = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EFBIG: "raise the limit on a file's size (ulimit -f) and run the same command again",
    errno.EROFS: "give a place that is not read-only",
}
"""What to do where a disk is full, at its quota, takes no file as large, or is read-only."""
ASK = "ask its owner for access, or give a place of your own"

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""A command line that cannot be read. Click's, of which typer has a copy without a public name."""


class _Usage(Protocol):
    """A `UsageError`; without ``ctx`` it does not say which command it is of."""

    ctx: typer.Context | None

    def format_message(self) -> str:
        """Return the fault."""
        ...


@runtime_checkable
class _MissingParameter(Protocol):
    """The `UsageError` of an argument or option that is not given."""

    param: TyperArgument | TyperOption | None
    param_type: str | None


@runtime_checkable
class _NoSuchOption(Protocol):
    """The `UsageError` of an unknown option, with known ones that are like it."""

    option_name: str
    possibilities: Sequence[str] | None


@contextmanager
def errors_in_one_line(called: str) -> Iterator[None]:
    """Show what is raised on purpose as one line; any other exception keeps its traceback.

    A fault in the user's input, or a lack of access, exits with 2; a stop (C2, updates that are not
    finite, a full disk, a refused publication) with 1.

    Parameters
    ----------
    called
        How the program was called, for a fault that does not say which command it is of.
    """
    try:
        yield
    except UsageError as error:
        typer.echo(f"error: {_usage_line(cast(_Usage, error), called)}", err=True)
        raise typer.Exit(USER_ERROR_EXIT_CODE) from None
    except WorkflowRLError as error:
        typer.echo(f"error: {_joined(str(error))}", err=True)
        is_user_error = isinstance(error, UserError)
        code = USER_ERROR_EXIT_CODE if is_user_error else STOPPED_ON_PURPOSE_EXIT_CODE
        raise typer.Exit(code) from None
    except PermissionError as error:
        typer.echo(f"error: {_path(error)}: {error.strerror}; {ASK}", err=True)
        raise typer.Exit(USER_ERROR_EXIT_CODE) from None
    except OSError as error:  # FFmpeg's are some too
        if error.errno not in DISK_REFUSES:
            raise
        what = f"cannot write {_path(error)}: {error.strerror}"
        typer.echo(f"error: {what}; {DISK_REFUSES[error.errno]}", err=True)
        raise typer.Exit(STOPPED_ON_PURPOSE_EXIT_CODE) from None


def _usage_line(error: _Usage, called: str) -> str:
    """Return what is wrong with a command line and how to mend it."""
    command = called if error.ctx is None else error.ctx.command_path
    fault = _joined(error.format_message()).rstrip(".")
    if error.ctx is not None and isinstance(error, _NoSuchOption):
        known = [o for p in error.ctx.command.params for o in p.opts if o.startswith("-")]
        known += error.ctx.help_option_names
        near = error.possibilities
        mend = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        return f"{command} has no option {error.option_name}; {mend}"
    missing = error.param if isinstance(error, _MissingParameter) else None
    if error.ctx is not None and isinstance(missing, TyperArgument):
        pieces = error.ctx.command.collect_usage_pieces(error.ctx)
        return f"{fault}; call it so: {' '.join([command, *pieces])}"
    return f"{fault} (see `{command} --help`)"


def _path(error: OSError) -> object:
    """Return the file of a fault; where one is copied or renamed, the one to write."""
    return error.filename2 or error.filename or "a file"


def _joined(text: str) -> str:
    """Return a text in one line."""
    return " ".join(text.split())
