"""Turns what pydantic found wrong into one line that names the key and the mend."""

import difflib
import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from workflow_rl.config.run import RunConfig

_CUTOFF = 0.6
"""difflib similarity from which a name counts as a likely slip of another."""

_YAML_WORDS = {
    "an object": "a mapping",
    "a valid array": "a list",
    "a valid boolean": "true or false",
}
"""JSON's words in pydantic's messages → those that a YAML file's writer knows."""


def describe(error: ValidationError, raw: dict[str, Any]) -> str:
    """Return the first fault as one line, unknown keys before all others.

    Parameters
    ----------
    error
        What pydantic raised for a `RunConfig`.
    raw
        The mapping that was validated; its stage names make the suggestions.
    """
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    line = _describe_one(faults[0], raw)
    others = len(faults) - 1
    return line if others == 0 else f"{line} (and {others} more)"


def _describe_one(fault: ErrorDetails, raw: dict[str, Any]) -> str:
    location = _location(fault, raw)
    dotted = ".".join(location)
    message = fault["msg"]
    if fault["type"] == "extra_forbidden":
        return f"unknown key '{dotted}'; {_suggestion(location, raw)}"
    if fault["type"] == "missing":
        return f"'{dotted}' is missing; {_purpose(location)}"
    if fault["type"] == "value_error":
        reason = message.removeprefix("Value error, ")
        return f"{dotted}: {reason}" if dotted else reason
    given = fault["input"]
    shown = json.dumps(given, ensure_ascii=False)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    if fault["type"] == "too_short" and "min_length" in fault.get("ctx", {}):
        return f"'{dotted}' is {shown}; give {fault['ctx']['min_length']} or more"
    expected = message.removeprefix("Input should be ")
    for theirs, yaml_word in _YAML_WORDS.items():
        expected = expected.replace(theirs, yaml_word)
    if expected == message:
        return f"'{dotted}' is {shown}; {message[:1].lower()}{message[1:]}"
    close = ""
    if fault["type"].endswith("_type") and given is not None:
        shown = f"{shown} ({_yaml_type(given)})"
    elif fault["type"] == "literal_error":
        names = [name.strip("' ") for name in expected.replace(" or ", ", ").split(",")]
        nearest = difflib.get_close_matches(str(given), names, 1, _CUTOFF)
        close = f"; did you mean '{nearest[0]}'?" if nearest else ""
    return f"'{dotted}' is {shown}; expected {expected}{close}"


def _location(fault: ErrorDetails, raw: Any) -> tuple[str, ...]:
    """Return the keys and positions that lead to a fault.

    Pydantic puts the names of a union's members between them, such as ``bool`` or
    ``literal['all-linear']``: what leads to nothing in ``raw``, but for a key that is missing.
    """
    kept = []
    last = len(fault["loc"]) - 1
    for at, part in enumerate(fault["loc"]):
        found = _has(raw, part)
        if found or (at == last and fault["type"] in ("extra_forbidden", "missing")):
            kept.append(str(part))
        if found:
            raw = raw[part]
    return tuple(kept)


def _has(content: Any, part: int | str) -> bool:
    """Say whether a mapping has the key, or a list the position, that ``part`` is."""
    if isinstance(content, list):
        return isinstance(part, int) and part < len(content)
    return isinstance(content, dict) and part in content


def _yaml_type(value: Any) -> str:
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "a mapping",
    }
    return names[type(value)]


def _purpose(location: tuple[str, ...]) -> str:
    """Say what a missing key is for, in the words of its description."""
    model = _model_at(location[:-1])
    text = "" if model is None else model.model_fields[location[-1]].description or ""
    return f"give it: {text[:1].lower()}{text[1:].rstrip('.')}" if text else "give it"


def _suggestion(location: tuple[str, ...], raw: dict[str, Any]) -> str:
    """Name the valid key nearest to an unknown one: a sibling, one below, or one elsewhere."""
    *parents, name = location
    prefix = ".".join(parents)
    every = list(_valid_keys(RunConfig, "", raw))
    below = [key for key in every if not prefix or key.startswith(f"{prefix}.")]
    siblings = [key for key in below if key.count(".") == len(parents)]
    below.sort(key=lambda key: key.count("."))  # of several keys of one name, the shallowest
    every.sort(key=lambda key: key.count("."))
    for cutoff in (1.0, _CUTOFF):  # a key in the wrong place before one that is spelt alike
        for candidates in (siblings, below, every):
            by_leaf = {key.rpartition(".")[2]: key for key in reversed(candidates)}
            nearest = difflib.get_close_matches(name, list(by_leaf), 1, cutoff)
            if nearest:
                return f"did you mean '{by_leaf[nearest[0]]}'?"
    return f"valid here: {', '.join(key.rpartition('.')[2] for key in siblings)}"


def _model_at(location: tuple[str, ...]) -> type[BaseModel] | None:
    """Return the model that validates what lies at ``location``."""
    model: type[BaseModel] = RunConfig
    skip = False
    for part in location:
        if skip or part.isdecimal():  # a stage's name, or a position in a list
            skip = False
            continue
        below = _model_in(model.model_fields[part].annotation)
        if below is None:
            return None
        skip = part == "stages"
        model = below
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside ``annotation``: itself, or within a union, tuple or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _valid_keys(model: type[BaseModel], prefix: str, raw: Any) -> Iterator[str]:
    """Yield every valid dotted key, with the names and positions that ``raw`` has."""
    given = raw if isinstance(raw, dict) else {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key
        below = _model_in(field.annotation)
        if below is None:
            continue
        value = given.get(name)
        if name == "stages" and isinstance(value, dict):
            for stage, content in value.items():
                yield from _valid_keys(below, f"{key}.{stage}.", content)
        elif isinstance(value, list):
            for position, content in enumerate(value):
                yield from _valid_keys(below, f"{key}.{position}.", content)
        else:
            yield from _valid_keys(below, f"{key}.", value)
