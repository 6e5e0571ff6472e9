"""Reads a configuration file and its overrides; every fault is one line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from workflow_rl.config.messages import describe
from workflow_rl.config.run import RewardConfig, RewardsConfig, RunConfig
from workflow_rl.config.yaml_text import parse_yaml
from workflow_rl.errors import UserError


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a run configuration.

    Parameters
    ----------
    path
        YAML file.
    overrides
        Each ``key.sub=value``; the value is YAML. A stage is named (``stages.t2i.samples=8``), an
        element of a list is numbered (``rewards.0.weight=2``).

    Raises
    ------
    UserError
        For a file that can't be read, an unknown key, a wrong type, an impossible combination.
    """
    path = Path(path)
    raw = _read_mapping(path)
    for override in overrides:
        _apply_override(raw, override)
    try:
        # JSON, because there strict means "no string for a number", yet a list is a tuple.
        return RunConfig.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, raw)}") from None


def load_rewards(path: Path | str, overrides: Sequence[str] = ()) -> tuple[RewardConfig, ...]:
    """Read the rewards of a configuration: of a run's, or of a file with ``rewards`` alone.

    Raises
    ------
    UserError
        As :func:`load_config`.
    """
    path = Path(path)
    raw = _read_mapping(path)
    if set(raw) != {"rewards"}:
        return load_config(path, overrides).rewards
    for override in overrides:
        _apply_override(raw, override)
    try:
        return RewardsConfig.model_validate_json(json.dumps(raw), strict=True).rewards
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, raw)}") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise UserError(
            f"{path}: {found}; give the path of a configuration in YAML (`workflow-rl init` "
            "writes some to begin with)"
        )
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise UserError(f"{path}: line {line}: {error.problem}; mend the YAML there") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: not YAML ({reason}); save it as plain text") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: holds {_kind(raw)}; expected keys such as 'stages' and 'data'")
    return raw


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one key in ``raw``; whether the key exists is for validation to say."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted or not all(dotted.split(".")):
        raise UserError(
            f"override {override!r} is not key.sub=value, such as training.iterations=5"
        )
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not YAML; quote it") from None
    *parents, last = dotted.split(".")
    node: Any = raw
    for depth, key in enumerate(parents):
        where = ".".join(parents[: depth + 1])
        if isinstance(node, list):
            node = node[_list_index(node, key, override)]
        else:
            if node.get(key) is None:
                node[key] = {}
            node = node[key]
        if not isinstance(node, dict | list):
            raise UserError(
                f"override {override!r}: '{where}' is {node!r} and has no keys below it"
            )
    if isinstance(node, list):
        node[_list_index(node, last, override)] = value
    else:
        node[last] = value


def _list_index(node: list[Any], key: str, override: str) -> int:
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(
            f"override {override!r}: {key!r} is no element of a list of {len(node)}; "
            f"number it from 0 to {len(node) - 1}"
        )
    return int(key)
