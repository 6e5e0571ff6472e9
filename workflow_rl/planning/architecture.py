"""The architecture of a model: the JSON files of its diffusers folder, with or without the folder.

Architectures of models that are often used ship with the package, so that a run can be planned
before anything is downloaded. Reading them needs no PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow_rl.errors import UserError

KNOWN = Path(__file__).parent / "architectures"
"""One JSON file per architecture: the names it goes by, and the files of its folder by path."""

INDEX = "model_index.json"


@dataclass(frozen=True)
class Architecture:
    """What a diffusers folder says in JSON.

    ``source`` says where it is from; ``files`` are parsed, by their path in the folder;
    ``folder`` is None for one that ships with the package.
    """

    source: str
    files: Mapping[str, Mapping[str, Any]]
    folder: Path | None = None

    def read(self, path: str) -> Mapping[str, Any]:
        """Return one parsed file.

        Raises
        ------
        UserError
            If there is no such file.
        """
        if path not in self.files:
            raise UserError(f"{self.source} has no {path}; download the model's JSON files again")
        return self.files[path]

    @property
    def pipeline(self) -> str:
        """Class name of the pipeline."""
        return str(self.read(INDEX)["_class_name"])

    def classes(self) -> dict[str, tuple[str, str]]:
        """Return library and class name of each component that has a configuration file."""
        return {
            name: (entry[0], entry[1])
            for name, entry in self.read(INDEX).items()
            if isinstance(entry, list | tuple) and f"{name}/config.json" in self.files
        }


def find_architecture(model: Path, key: str) -> Architecture:
    """Return the architecture of a folder, or, where there is none, the known one of its name.

    Parameters
    ----------
    model
        A diffusers folder, or any path whose last part names a known architecture, such as
        ``/models/FLUX.1-dev`` or ``flux1-dev``.
    key
        Configuration key that named it, for messages.

    Raises
    ------
    UserError
        If it is neither.
    """
    if (model / INDEX).is_file():
        return _read_folder(model, key)
    return known_architecture(model.name, f"{key}: {model} is no diffusers folder, and ")


def known_architecture(name: str, where: str = "") -> Architecture:
    """Return the architecture that ships with the package under ``name``, in any spelling.

    Raises
    ------
    UserError
        If there is none of that name.
    """
    names: dict[str, str] = {}
    for file in sorted(KNOWN.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        names |= {_plain(alias): file.stem for alias in content["names"]}
        if _plain(name) in names:
            return Architecture(f"known architecture {file.stem}", content["files"])
    raise UserError(
        f"{where}{name!r} names no known architecture; give a diffusers folder or "
        f"one of {', '.join(sorted(set(names.values())))}"
    )


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read_folder(folder: Path, key: str) -> Architecture:
    files = {}
    for file in [folder / INDEX, *sorted(folder.glob("*/*config*.json"))]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise UserError(f"{key}: {file} is not JSON; download the model again") from None
        if isinstance(content, dict):
            files[file.relative_to(folder).as_posix()] = content
    return Architecture(f"folder {folder}", files, folder)
