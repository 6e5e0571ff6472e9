"""The command line, and a configuration that it accepts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.conftest import invoke

__all__ = ["invoke"]

CONFIG: dict[str, Any] = {
    "output_dir": "runs/x",
    "stages": {
        "t2i": {"task": "t2i", "samples": 2, "num_inference_steps": 2},
        "i2v": {"task": "i2v", "samples": 2, "num_inference_steps": 2},
    },
    "data": {"prompts": "prompts.txt", "prompts_per_iteration": 1},
    "rewards": [{"name": "directed_motion"}],
    "training": {"iterations": 6, "threads": 1, "checkpoint": {"every": 1}},
    "evaluation": {"seeds_per_prompt": 1},
    "logging": {"tensorboard": False},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with ``config.yaml``: the embedded pair, 4 videos an iteration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    return tmp_path
