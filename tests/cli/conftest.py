"""A chain of folders that pass every check before loading, without a weight in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from workflow_rl.cli.main import app

FOLDERS: dict[str, dict[str, Any]] = {
    "flux": {
        "model_index.json": {"_class_name": "FluxPipeline"},
        "vae/config.json": {"block_out_channels": [8, 16, 32]},
        "transformer/config.json": {"guidance_embeds": False},
    },
    "wan": {
        "model_index.json": {"_class_name": "WanImageToVideoPipeline"},
        "vae/config.json": {"scale_factor_spatial": 4, "scale_factor_temporal": 4},
        "transformer/config.json": {"patch_size": [1, 2, 2]},
    },
}


class Invoked:
    """What a command line answered."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

    def one_line_error(self) -> str:
        """Return the message, after checking that it is all there is."""
        assert self.exit_code == 2, self.stdout + self.stderr
        assert self.stdout == ""
        assert self.stderr.startswith("error: ")
        assert self.stderr.count("\n") == 1
        return self.stderr


Invoke = Callable[..., Invoked]


@pytest.fixture
def invoke() -> Invoke:
    def call(*arguments: str | Path) -> Invoked:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Invoked(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with a chain's folders, prompts and ``run.yaml``."""
    monkeypatch.chdir(tmp_path)
    for name, files in FOLDERS.items():
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(json.dumps(content))
    (tmp_path / "prompts.txt").write_text("a red circle moving left\n")
    config = {
        "output_dir": "run",
        "stages": {
            "t2i": {"task": "t2i", "model": "flux"},
            "i2v": {"task": "i2v", "model": "wan"},
        },
        "data": {"prompts": "prompts.txt", "prompts_per_iteration": 1},
        "rewards": [{"name": "constant"}],
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return tmp_path
