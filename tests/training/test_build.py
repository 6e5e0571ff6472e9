"""From a configuration to a method: what is found wrong before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.errors import UserError
from workflow_rl.training import build
from workflow_rl.training.build import build_method, stage_cards, workflow_of
from workflow_rl.training.hardware import choose_device

PIPELINES = {"t2i": "FluxPipeline", "i2v": "WanImageToVideoPipeline"}


def _stages(folder: Path) -> dict[str, StageConfig]:
    """Two stages whose folders differ and have one name."""
    stages = {}
    for task, pipeline in PIPELINES.items():
        model = folder / task / "model"
        model.mkdir(parents=True)
        (model / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
        stages[task] = StageConfig.model_validate({"task": task, "model": model})
    return stages


@pytest.mark.parametrize("device", ["gpu", "cuda:999", "vulkan", "meta"])
def test_a_device_that_is_not_there_is_one_line(device: str) -> None:
    with pytest.raises(UserError, match=f"training.device is '{device}', which this machine lacks"):
        choose_device(device)


def test_a_device_is_checked_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(build, "load_card", load)
    config = RunConfig.model_validate(
        {
            "output_dir": tmp_path / "run",
            "stages": {"t2i": {"task": "t2i"}, "i2v": {"task": "i2v"}},
            "data": {"prompts": tmp_path / "prompts.txt"},
            "rewards": [{"name": "constant"}],
            "training": {"device": "gpu"},
        }
    )
    with pytest.raises(UserError, match="use one of these, or null"):
        build_method(config)


def test_folders_of_one_name_are_two_models(tmp_path: Path) -> None:
    stages = _stages(tmp_path)
    cards = stage_cards(workflow_of("chain", stages), stages)
    assert {name: card.source for name, card in cards.items()} == {
        name: stage.model for name, stage in stages.items()
    }


def test_a_card_of_another_task_is_refused(tmp_path: Path) -> None:
    stages = _stages(tmp_path)
    swapped = stages | {"i2v": stages["i2v"].model_copy(update={"model": stages["t2i"].model})}
    with pytest.raises(UserError, match="stage 'i2v' of chain needs a i2v model"):
        stage_cards(workflow_of("chain", swapped), swapped)


def test_a_chain_that_cannot_be_threaded_is_refused(tmp_path: Path) -> None:
    stages = dict(reversed(_stages(tmp_path).items()))
    with pytest.raises(UserError, match="takes no image from 'i2v'"):
        stage_cards(workflow_of("chain", stages), stages)
