"""Any Python function as a reward, named by its dotted path."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from workflow_rl.errors import UserError

if TYPE_CHECKING:
    from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores


def import_dotted(path: str) -> object:
    """Import what ``pkg.mod:name`` or ``pkg.mod.name`` names.

    The working directory can be imported from, after everything that is installed.

    Raises
    ------
    UserError
        The path is not a dotted path, or its module or its name is not there or does not import.
    """
    module_name, separator, attribute = path.partition(":")
    if not separator:
        module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        lacks = "function" if module_name else "module"
        raise UserError(
            f"reward callable {path!r} names no {lacks}: write module:function, as in "
            f"my_rewards:smoothness; a reward of this project is given by name instead"
        )
    if "/" in path or module_name.endswith(".py"):
        raise UserError(
            f"reward callable {path!r} names a file: write its module, as in "
            f"{PurePath(module_name).stem}:{attribute}, and put its folder on PYTHONPATH"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"reward callable {path!r} cannot be imported ({what}): mend the path, or put the "
            f"folder of its module on PYTHONPATH"
        ) from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise UserError(
                f"reward callable {path!r} cannot be imported: {module_name} has no {name!r}; "
                f"name a function defined there"
            ) from error
    return found


class PythonCallable:
    """A reward computed by ``fn(media, prompts, sample_ids, **args)``.

    The function gets the media tensor (``videos_BCTHW`` or ``images_BCHW``, float in [0, 1]), a
    list of prompts and a list of ids, and returns one number per sample, or a mapping of names to
    such: then the sum is the score. ``None`` for a sample means that it could not be scored.

    Parameters
    ----------
    path : str
        ``pkg.mod:fn`` or ``pkg.mod.fn``.
    args : mapping
        Further keyword arguments of the function.

    Raises
    ------
    UserError
        It cannot be imported, is not callable, or does not take these arguments.
    """

    media_kind: "AcceptedKind" = "any"

    def __init__(self, path: str, args: Mapping[str, object] | None = None) -> None:
        function = import_dotted(path)
        if not callable(function) or inspect.isclass(function):
            kind = "class" if inspect.isclass(function) else f"value of {type(function).__name__}"
            raise UserError(
                f"reward callable {path!r} is a {kind}: name a function of "
                f"(videos, prompts, sample_ids), or an object that is called so"
            )
        self.name = path.replace(":", ".")
        self.args = dict(args or {})
        self.function: Callable[..., object] = function
        check_arguments(self.function, ("videos", "prompts", "sample_ids"), self.args, path)

    def __call__(self, batch: "RewardBatch") -> "RewardScores":
        """Score the batch with the function."""
        from workflow_rl.rewards.base import scores_from_raw

        raw = self.function(batch.media, list(batch.prompts), list(batch.sample_ids), **self.args)
        return scores_from_raw(raw, len(batch))


def check_arguments(
    function: Callable[..., object],
    positional: tuple[str, ...],
    args: Mapping[str, object],
    path: str,
) -> None:
    """Refuse arguments that a function does not take, before it is called.

    Raises
    ------
    UserError
        Naming the function, what does not fit and what it takes.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature: the first call will tell
        return
    try:
        signature.bind(*positional, **args)
    except TypeError as error:
        given = ", ".join([*positional, *(f"{name}=..." for name in args)])
        raise UserError(
            f"reward {path!r} cannot be called with ({given}): {error}; it takes {signature}"
        ) from error
