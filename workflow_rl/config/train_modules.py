"""Which weights ``train_modules`` names, told from the headers of a model's files."""

from collections.abc import Iterable, Mapping, Sequence

from workflow_rl.config.weight_files import WeightFiles, tensor_names
from workflow_rl.errors import UserError


def has_part(name: str, part: str) -> bool:
    """Say whether ``part`` is a run of whole dotted components of a parameter's ``name``."""
    return f".{part}." in f".{name}."


def check_parts(names: Iterable[str], parts: Sequence[str], where: str) -> None:
    """Check that each of ``parts`` names a parameter, and that each component has one of them.

    Parameters
    ----------
    names
        ``component.parameter`` of each parameter that may train.
    where
        What the parts are called in messages.

    Raises
    ------
    UserError
        At the first that names none, or that is not named.
    """
    known = tuple(names)
    for part in parts:
        if not any(has_part(name, part) for name in known):
            modules = ", ".join(sorted({name.split(".")[1] for name in known}))
            raise UserError(
                f"{where} names {part!r}, which is no part of the model; its modules are {modules}"
            )
    components = dict.fromkeys(name.partition(".")[0] for name in known)
    trained = {n.partition(".")[0] for n in known if any(has_part(n, part) for part in parts)}
    for component in components:
        if parts and component not in trained:
            raise UserError(
                f"{where} names no part of {component}, and each of {' and '.join(components)} has "
                "steps of its own to train; name a part of each, or one that all have"
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
        If a part names no parameter, or none of an expert's parameters is named.
    """
    names = [
        f"{component}.{name}"
        for component, weights in files.items()
        if component.startswith("transformer")
        for file in weights.files
        for name in tensor_names(file)
    ]
    check_parts(names, parts, where)
