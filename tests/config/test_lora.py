"""The LoRA of a stage: what can be configured, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from workflow_rl.config import StageConfig


def _stage(lora: Any, **options: Any) -> StageConfig:
    text = json.dumps({"task": "t2i", "lora": lora, **options})
    return StageConfig.model_validate_json(text, strict=True)


@pytest.mark.parametrize("targets", [None, "all-linear", ["to_q", "ff.net.2"]])
def test_targets(targets: Any) -> None:
    lora = _stage({"targets": targets}).lora
    assert lora is not None
    assert lora.targets == (tuple(targets) if isinstance(targets, list) else targets)


@pytest.mark.parametrize(
    ("lora", "options", "message"),
    [
        ({"rank": 0}, {}, "rank"),
        ({"alpha": 0}, {}, "alpha"),
        ({"dropout": 0.1}, {}, "dropout"),
        ({"targets": []}, {}, "name linear layers"),
        ({"targets": ["to_q", ""]}, {}, "name linear layers"),
        ({"targets": "to_q"}, {}, "all-linear"),
        ({"init": "a", "alpha": 4}, {}, "leave alpha out"),
        ({"init": "a", "targets": ["to_q"]}, {}, "leave targets out"),
        ({}, {"train_modules": ["x"]}, "leave train_modules out"),
        ({}, {"freeze": True}, "give lora.init"),
    ],
)
def test_what_cannot_be_is_refused(
    lora: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        _stage(lora, **options)


def test_a_frozen_stage_may_serve_a_lora() -> None:
    assert _stage({"init": "a"}, freeze=True).freeze
