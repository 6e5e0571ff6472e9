"""Writes docs/configuration.md from the configuration models: every key, type, default, meaning.

Run it by hand after a change there: ``python docs/generate_configuration.py``.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from workflow_rl.config import RunConfig

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """# Configuration

Generated from the models in `workflow_rl/config/` by `docs/generate_configuration.py`; change a
description there and run the script again.

A configuration is one YAML file. Any key can be changed on the command line as `KEY=VALUE`, with
dots between the levels and a value in YAML. A stage goes by its name, an element of a list by its
number:

```
workflow-rl train configs/quickstart.yaml seed=1 output_dir=runs/seed1
workflow-rl train configs/quickstart.yaml stages.t2i.freeze=true rewards.0.weight=2.0
workflow-rl train configs/quickstart.yaml 'stages.i2v.sde.window={mode: fixed, start: 0, size: 3}'
```

Values are not converted: a text is no number, and `1` is no `true`. An unknown key, a wrong type or
a combination that cannot work ends the command with one line, before a model is loaded. In the
tables NAME is a stage's name and N counts from 0. `required` means that there is no default.
"""

TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    Any: "anything",
    type(None): "null",
}


def submodels(annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """Return the configuration models inside a type, each with the key that leads to it.

    The key is empty for the model itself, ``.NAME`` for a mapping and ``.N`` for a list.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [("", annotation)]
    step = {dict: ".NAME", tuple: ".N", list: ".N"}.get(get_origin(annotation), "")
    return [
        (step + key, model)
        for argument in get_args(annotation)
        if get_origin(annotation) is not Literal
        for key, model in submodels(argument)
    ]


def describe_type(annotation: Any) -> str:
    """Return a type in the words of someone who writes YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is dict:
        return "mapping"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return "list"
        return f"list of {len(arguments)} {describe_type(arguments[0])}s"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{value}`" for value in annotation)
    return TYPE_NAMES[annotation]


def describe_bounds(field: FieldInfo) -> str:
    """Return the range of a number, such as ``> 0, ≤ 1``; empty where there is none."""
    found = []
    for constraint in field.metadata:
        match constraint:
            case Gt(gt=bound):
                found.append(f"> {bound:g}")
            case Ge(ge=bound):
                found.append(f"≥ {bound:g}")
            case Lt(lt=bound):
                found.append(f"< {bound:g}")
            case Le(le=bound):
                found.append(f"≤ {bound:g}")
    return ", ".join(found)


def describe_default(field: FieldInfo) -> str:
    """Return the default as YAML has it, or ``required``."""
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, BaseModel):
        return "its defaults"
    return f"`{json.dumps(field.default)}`"


def rows(model: type[BaseModel]) -> Iterator[str]:
    """Yield the table of a model's keys, line by line."""
    yield "| key | type | default | what it does |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        bounds = describe_bounds(field)
        kind = describe_type(field.annotation) + (f", {bounds}" if bounds else "")
        text = (field.description or "").replace("|", "\\|")
        yield f"| `{name}` | {kind} | {describe_default(field)} | {text} |"


def sections(model: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the dotted path and the model of every section, a parent before its children."""
    yield path, model
    for name, field in model.model_fields.items():
        for key, child in submodels(field.annotation):
            yield from sections(child, f"{path}.{name}{key}" if path else f"{name}{key}")


def render() -> str:
    """Return the whole page."""
    parts = [HEAD]
    for path, model in sections(RunConfig, ""):
        title = f"`{path}`" if path else "Top level"
        about = (model.__doc__ or "").strip().splitlines()[0]
        parts.append("\n".join([f"## {title}", "", about, "", *rows(model), ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
