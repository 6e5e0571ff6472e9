"""One prompt through a chain: whose weights, which files, and nothing that is not finite."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from workflow_rl.config import PromptRecord, RunConfig
from workflow_rl.enums import MediaKind
from workflow_rl.errors import WorkflowRLError
from workflow_rl.media import read_mp4
from workflow_rl.request import TaskType
from workflow_rl.serving import generate
from workflow_rl.serving.chain import ServedChain
from workflow_rl.training.build import stage_plan
from workflow_rl.training.weight_sync import WeightRole
from workflow_rl.workflow import T2I_I2V, StageOutput, WorkflowStage

REWARD = {"name": "constant"}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    stage = {"ema": {"decay": 0.9}}
    return RunConfig.model_validate(
        {
            "output_dir": tmp_path,
            "stages": {"t2i": {"task": "t2i", **stage}, "i2v": {"task": "i2v", **stage}},
            "data": {"prompts": tmp_path / "prompts.txt"},
            "rewards": [REWARD],
            "training": {"threads": 3},
            "evaluation": {"weights": "ema", "seeds_per_prompt": 1, "bootstrap_samples": 100},
        }
    )


@pytest.fixture
def roles(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> list[WeightRole]:
    """Replace models and sampling; the list gets the roles that are published."""
    published: list[WeightRole] = []

    def publish(chain: object, run_dir: Path, role: WeightRole, on_skip: object) -> int:
        published.append(role)
        return 5

    plans = {name: stage_plan(stage) for name, stage in config.stages.items()}
    monkeypatch.setattr(generate, "load_run_config", lambda path: config)
    monkeypatch.setattr(generate, "publish_run", publish)
    monkeypatch.setattr(generate, "load_chain", lambda *_: ServedChain(T2I_I2V, {}, plans))
    return published


def test_generate_serves_the_role_that_is_evaluated(
    config: RunConfig, roles: list[WeightRole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "run_chain", lambda *_, **__: [])
    ask: dict[str, Any] = {"prompt": "a", "seed": 0, "output_dir": tmp_path}
    generate.generate(config.workflow, config.stages, run_dir=tmp_path, **ask)
    assert roles == [WeightRole.EMA]
    generate.generate(config.workflow, config.stages, **ask)
    assert roles == [WeightRole.EMA]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_disk_that_is_full_for_the_video_leaves_no_image(
    config: RunConfig,
    roles: list[WeightRole],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    earlier: bool,
) -> None:
    """The files of an earlier call with the same prompt and seed stay as they are."""
    outputs = [
        StageOutput(T2I_I2V.stages[0], MediaKind.IMAGE, (), (0,), torch.rand(1, 3, 8, 8), None),
        StageOutput(T2I_I2V.stages[1], MediaKind.VIDEO, (), (0,), torch.rand(1, 3, 3, 8, 8), None),
    ]
    monkeypatch.setattr(generate, "run_chain", lambda *_, **__: outputs)
    folder = tmp_path / "made" / "here"
    ask: dict[str, Any] = {"prompt": "a", "seed": 0, "output_dir": folder}
    before: dict[Path, bytes] = {}
    if earlier:
        files = generate.generate(config.workflow, config.stages, **ask)
        assert sorted(files) == sorted(folder.iterdir())
        before = {path: path.read_bytes() for path in files}
        outputs[0].media.zero_()

    def write(path: Path, *_: object) -> Path:
        path.write_bytes(b"half of a vid")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workflow_rl.evaluation.media_files.write_mp4", write)
    with pytest.raises(WorkflowRLError, match=r"cannot write to .*here: No space left on device"):
        generate.generate(config.workflow, config.stages, **ask)
    if earlier:
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    else:
        assert not folder.parent.exists()


def test_a_directory_in_the_place_of_the_video_leaves_the_image(
    config: RunConfig, roles: list[WeightRole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [
        StageOutput(stage, MediaKind.IMAGE, (), (0,), torch.rand(1, 3, 8, 8), None)
        for stage in T2I_I2V.stages
    ]
    monkeypatch.setattr(generate, "run_chain", lambda *_, **__: outputs)
    ask: dict[str, Any] = {"prompt": "a", "seed": 0, "output_dir": tmp_path / "made"}
    first, last = sorted(generate.generate(config.workflow, config.stages, **ask))
    last.unlink()
    last.mkdir()
    before = first.read_bytes()
    for output in outputs:
        output.media.zero_()
    with pytest.raises(WorkflowRLError, match=rf"{last.name} is a directory.*nothing is written"):
        generate.generate(config.workflow, config.stages, **ask)
    assert first.read_bytes() == before
    assert sorted((tmp_path / "made").iterdir()) == [first, last]


def test_generate_writes_nothing_that_is_not_finite(
    config: RunConfig, roles: list[WeightRole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    media = torch.full((1, 3, 2, 2), math.nan)
    output = StageOutput(T2I_I2V.stages[0], MediaKind.IMAGE, (), (0,), media, None)
    monkeypatch.setattr(generate, "run_chain", lambda *_, **__: [output])
    with pytest.raises(WorkflowRLError, match="stage 't2i' made values that are not finite"):
        generate.generate(
            config.workflow, config.stages, prompt="a", seed=0, output_dir=tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("sides", "joined"), [((4, 4), ["a_seed0.mp4"]), ((4, 8), []), ((4,), [])])
def test_generate_joins_shots_of_one_size(
    config: RunConfig,
    roles: list[WeightRole],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sides: tuple[int, ...],
    joined: list[str],
) -> None:
    outputs = [
        StageOutput(
            WorkflowStage(f"shot{number}", TaskType.I2V),
            MediaKind.VIDEO,
            (),
            (0,),
            torch.zeros(1, 3, 2, side, side),
            None,
        )
        for number, side in enumerate(sides)
    ]
    monkeypatch.setattr(generate, "run_chain", lambda *_, **__: outputs)
    messages: list[str] = []
    files = generate.generate(
        config.workflow,
        config.stages,
        prompt="a",
        seed=0,
        output_dir=tmp_path / "out",
        on_message=messages.append,
    )
    shots = [f"a_seed0_shot{number}.mp4" for number in range(len(sides))]
    assert [path.name for path in files] == shots + joined
    assert [read_mp4(path).shape[1] for path in files] == [2] * len(sides) + [3] * len(joined)
    assert messages == (["the videos differ in size: they are not joined"] if 8 in sides else [])


def test_generate_hands_the_first_frame_on(
    config: RunConfig, roles: list[WeightRole], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[PromptRecord] = []

    def run_chain(*arguments: Any, **_: Any) -> list[StageOutput]:
        given.extend(arguments[3])
        return []

    monkeypatch.setattr(generate, "run_chain", run_chain)
    (tmp_path / "fox.png").write_bytes(b"any")
    generate.generate(
        config.workflow,
        config.stages,
        prompt="a",
        seed=0,
        output_dir=tmp_path,
        image=tmp_path / "fox.png",
    )
    assert [r.first_frame and r.first_frame.path for r in given] == [tmp_path / "fox.png"]
