"""What a ``model_index.json`` says of its components."""

from collections.abc import Mapping
from typing import Any

LIBRARIES = ("diffusers", "transformers")
"""Libraries that components are loaded from."""


def indexed_components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each component that a parsed index lists as present."""
    return {
        name: (str(entry[0]), str(entry[1]))
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0] is not None
    }
