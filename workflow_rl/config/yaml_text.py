"""YAML as people read it: safe, without the surprises of YAML 1.1, and without twice-given keys.

PyYAML follows YAML 1.1, in which `on` is true, `1e-4` is a string and `1:30` is 90. Here scalars
follow the core schema of YAML 1.2.2 (§10.3.2).
"""

import re
from typing import Any

import yaml

_NUMBER_START = list("-+.0123456789")
_CORE_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:0|[-+]?[1-9][0-9]*)$", _NUMBER_START),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", _NUMBER_START),
)

_NO_JSON = [f"tag:yaml.org,2002:{kind}" for kind in ("binary", "timestamp", "set", "omap", "pairs")]
"""Tags of values that JSON has not."""


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag not in _NO_JSON
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; refuse a key that is given twice."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not a string", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or our reader would take for something else."""


for _tag, _pattern, _first in _CORE_SCALARS:
    for _class in (_CoreLoader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)


def parse_yaml(text: str) -> Any:
    """Return the one document in ``text``.

    Raises
    ------
    yaml.YAMLError
        If the text is not YAML, or gives a key twice.
    """
    loader = _CoreLoader(text)  # a SafeLoader: it makes plain values only
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def dump_yaml(content: Any) -> str:
    """Return ``content`` (mappings, sequences, scalars) as YAML, keys in their order."""
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True))
