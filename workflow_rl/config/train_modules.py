"""Which weights ``train_modules`` names, told from the headers of a model's files."""

from collections.abc import Iterable, Mapping, Sequence

from workflow_rl.config.weight_files import WeightFiles, tensor_names
from workflow_rl.errors import UserError


def has_part(name: str, part: str) -> bool:
    """Say whether ``part`` is a run of whole dotted components of a parameter's ``name``."""
    return f".{part}." in f".{name}."


def check_parts(names: Iterable[str], parts: Sequence[str], where: str) -> None:
    """Check that each of ``parts`` names at least one parameter.

    Parameters
    ----------
    names
        ``component.parameter`` of each parameter that may train.
    where
        What the parts are called in messages.

    Raises
    ------
    UserError
        At the first that names none.
    """
    known = tuple(names)
    for part in parts:
        if not any(has_part(name, part) for name in known):
            modules = ", ".join(sorted({name.split(".")[1] for name in known}))
            raise UserError(
                f"{where} names {part!r}, which is no part of the model; its modules are {modules}"
            )


def check_train_modules(files: Mapping[str, WeightFiles], parts: Sequence[str], where: str) -> None:
    """Check ``train_modules`` against the transformers' files, before a weight is read.

    Parameters
    ----------
    files
        Weight files by component.

    Raises
    ------
    UserError
        If a part names no parameter.
    """
    names = [
        f"{component}.{name}"
        for component, weights in files.items()
        if component.startswith("transformer")
        for file in weights.files
        for name in tensor_names(file)
    ]
    check_parts(names, parts, where)
