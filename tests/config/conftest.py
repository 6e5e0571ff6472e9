"""A small valid configuration, as the mapping that a YAML file holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from workflow_rl.config import RunConfig, load_config

LoadWith = Callable[..., RunConfig]


@pytest.fixture
def raw() -> dict[str, Any]:
    return {
        "output_dir": "runs/x",
        "stages": {
            "t2i": {"task": "t2i", "samples": 4, "optimizer": {"lr": 1e-4}},
            "i2v": {"task": "i2v", "samples": 4},
        },
        "data": {"prompts": "prompts.txt"},
        "rewards": [{"name": "directed_motion"}],
    }


@pytest.fixture
def config_file(tmp_path: Path, raw: dict[str, Any]) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture
def load_with(config_file: Path) -> LoadWith:
    """Load the small configuration with overrides."""
    return lambda *overrides: load_config(config_file, overrides)
