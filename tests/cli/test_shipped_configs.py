"""Every configuration that ships trains, or is planned, as it stands."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Invoke
from workflow_rl.config import RunConfig, load_config
from workflow_rl.instance import load_card
from workflow_rl.models import build_card
from workflow_rl.request import TaskType
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint

CONFIGS = Path("configs")
BIG = ("flux_wan", "sd35_wan_ti2v")
"""Of models that are not here."""
SMALL = tuple(sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in BIG))


def _smallest(config: RunConfig, folder: Path) -> list[str]:
    """Return overrides that leave of a run one iteration of the fewest samples."""
    prompts = Path(config.data.eval_prompts or config.data.prompts)
    if prompts.is_file():
        (folder / "eval.txt").write_text(prompts.read_text().splitlines()[0] + "\n")
        prompts = folder / "eval.txt"
    return [
        f"output_dir={folder / 'run'}",
        f"data.eval_prompts={prompts}",
        "data.prompts_per_iteration=1",
        "evaluation.seeds_per_prompt=1",
        "evaluation.num_inference_steps=1",
        "training.iterations=1",
        "training.threads=1",
        "logging.tensorboard=false",
        *(f"stages.{name}.samples=2" for name in config.stages),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_one_iteration_from_the_file_alone_trains_every_stage(
    name: str, invoke: Invoke, tmp_path: Path
) -> None:
    path = CONFIGS / f"{name}.yaml"
    config = load_config(path)
    result = invoke("train", path, *_smallest(config, tmp_path))
    assert result.exit_code == 0, result.stderr

    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert math.isfinite(metrics["reward_mean"])
    checkpoint = latest_valid(tmp_path / "run/checkpoints", on_skip=pytest.fail)
    assert checkpoint is not None
    tensors = load_checkpoint(checkpoint).tensors
    for stage, options in config.stages.items():
        start = load_card(build_card(None, TaskType(options.task)))
        prefix = f"{stage}/weights/transformer."
        trained = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        weights = dict(start.component("transformer").named_parameters())
        assert trained.keys() == weights.keys()
        assert any(not torch.equal(trained[k], weights[k]) for k in weights), stage


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_big_models_are_planned_from_the_file_alone(name: str, invoke: Invoke) -> None:
    result = invoke("plan", CONFIGS / f"{name}.yaml", "--gpu-memory", "80", "--json")
    assert result.exit_code == 0, result.stderr
    assert set(json.loads(result.stdout)["stages"]) == {"t2i", "i2v"}
