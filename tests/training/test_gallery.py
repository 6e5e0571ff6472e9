"""What is kept of an iteration to look at, and what happens when the disk is full."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.card import ModelCard
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.enums import MediaKind
from workflow_rl.request import SampleId, TaskType, make_request
from workflow_rl.rewards.composite import TreeScores
from workflow_rl.training.credit import assign_credit
from workflow_rl.training.gallery import save_groups
from workflow_rl.training.methods.chain import Iteration
from workflow_rl.training.trainer import SilentListener, train
from workflow_rl.workflow import StageOutput, WorkflowStage

NO_SPACE = "No space left on device"


def make_iteration(rewards: torch.Tensor) -> Iteration:
    """An iteration of images alone, ``rewards`` [P, n]."""
    count = rewards.numel()
    samples = [
        SampleId(0, f"prompt {p}", (i,))
        for p in range(len(rewards))
        for i in range(len(rewards[p]))
    ]
    output = StageOutput(
        stage=WorkflowStage("t2i", TaskType.T2I),
        media_kind=MediaKind.IMAGE,
        requests=tuple(make_request("t2i", s.prompt, sample=s) for s in samples),
        parents=tuple(s.path[0] for s in samples),
        media=torch.rand(count, 3, 8, 8),
        record=None,
    )
    flat = rewards.flatten()
    failures = {i: "judge: timed out" for i in range(count) if not math.isfinite(flat[i])}
    scores = TreeScores(flat, failures, {"judge": flat, "size": 2 * flat}, {"judge": failures})
    return Iteration((output,), scores, assign_credit(rewards), rewards)


def read(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "rollouts/iteration_00000003.json").read_text())
    return record


def prompts(run_dir: Path) -> list[str]:
    return [group["prompt"] for group in read(run_dir)["groups"]]


@pytest.mark.parametrize(
    ("groups", "kept"),
    [(1, [2]), (2, [2, 1]), (3, [2, 0, 1]), (9, [2, 3, 0, 4, 1])],
)
def test_the_best_the_worst_and_then_evenly_between(
    tmp_path: Path, groups: int, kept: list[int]
) -> None:
    means = torch.tensor([3.0, 1.0, 5.0, 4.0, 2.0])
    rewards = means[:, None] + torch.tensor([-0.1, 0.1])
    save_groups(tmp_path, 3, make_iteration(rewards), groups)
    assert prompts(tmp_path) == [f"prompt {p}" for p in kept]
    best = read(tmp_path)["groups"][0]
    assert (best["rank"], best["ranked"]) == (1, 5)
    assert best["children"][0]["components"] == pytest.approx({"judge": 4.9, "size": 9.8})


def test_a_prompt_without_any_reward_is_kept_beside_the_others(tmp_path: Path) -> None:
    nan = math.nan
    rewards = torch.tensor([[nan, nan], [0.0, 1.0], [2.0, nan], [nan, nan]])
    save_groups(tmp_path, 3, make_iteration(rewards), 2)
    assert prompts(tmp_path) == ["prompt 2", "prompt 1", "prompt 0"]
    failed = read(tmp_path)["groups"][-1]
    assert failed["reward_mean"] is None
    assert {child["failed"] for child in failed["children"]} == {"judge: timed out"}


def test_no_groups_leave_no_file(tmp_path: Path) -> None:
    save_groups(tmp_path, 3, make_iteration(torch.rand(2, 2)), 0)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_a_tree_without_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of four pictures: the others, the rewards and the cause are kept."""
    calls = []

    def write(path: Path, image: torch.Tensor) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(b"png")
        return path

    monkeypatch.setattr("workflow_rl.evaluation.media_files.write_png", write)
    lost = save_groups(tmp_path, 3, make_iteration(torch.tensor([[0.0, 1.0], [2.0, 3.0]])))
    record = read(tmp_path)
    assert record["media_failed"] == 1
    assert record["media_failure_causes"] == dict(lost.causes) == {NO_SPACE: 1}
    children = [child for group in record["groups"] for child in group["children"]]
    assert [child["media"] is None for child in children] == [False, True, False, False]
    assert [child["reward"] for child in children] == [2.0, 3.0, 0.0, 1.0]


def test_a_disk_that_is_full_for_the_tree_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def write(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    lost = save_groups(tmp_path, 3, make_iteration(torch.rand(2, 2)))
    assert dict(lost.causes) == {NO_SPACE: 1}
    assert not list((tmp_path / "rollouts").iterdir())


class Messages(SilentListener):
    """Keeps what a user is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def make_run(
    folder: Path, cards: tuple[ModelCard, ModelCard], listener: Messages
) -> list[dict[str, Any]]:
    """Train one iteration; return the lines of the metrics."""
    folder.mkdir()
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    stage = (
        "samples: 2, num_inference_steps: 2, rollout_batch_size: 4, sde: {kind: cps}, kl_weight: 0"
    )
    (folder / "config.yaml").write_text(
        f"""
output_dir: {folder / "run"}
stages:
  t2i: {{task: t2i, model: {cards[0].source}, {stage}}}
  i2v: {{task: i2v, model: {cards[1].source}, {stage}, num_frames: 5}}
data: {{prompts: {folder / "prompts.txt"}, prompts_per_iteration: 2}}
rewards: [{{name: frame_change}}]
training: {{iterations: 1, threads: 1}}
evaluation: {{seeds_per_prompt: 1, bootstrap_samples: 100}}
logging: {{tensorboard: false, rollouts: {{every: 1, groups: 1}}}}
"""
    )
    config = load_config(folder / "config.yaml")
    create_run_dir(config)
    assert train(config, listener=listener) is None
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_a_full_disk_while_a_video_is_written_ends_no_iteration(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder meets a full disk in every video: the run's numbers are those of any other."""
    whole = make_run(tmp_path / "whole", cards, Messages())

    def open_on_full_disk(*arguments: Any, **options: Any) -> None:
        Path(arguments[0]).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("av.open", open_on_full_disk)
    listener = Messages()
    lines = make_run(tmp_path / "full", cards, listener)
    run = tmp_path / "full" / "run"
    assert [line["media_failed"] for line in lines] == [4]  # one group of 2 x 2 videos
    assert [line["media_failure_causes"] for line in lines] == [{NO_SPACE: 4}]
    assert [line["media_failed"] for line in whole] == [0]
    assert all(line["media_failure_causes"] == {} for line in whole)
    for one, other in zip(whole, lines, strict=True):
        varying = ("media_", "time/")
        assert {k: v for k, v in one.items() if not k.startswith(varying)} == {
            k: v for k, v in other.items() if not k.startswith(varying)
        }
    for text in (run / "evaluations.jsonl").read_text().splitlines():
        evaluation = json.loads(text)
        assert evaluation["media"]["i2v"] == [None, None]
        assert all((run / path).is_file() for path in evaluation["media"]["t2i"])
        assert evaluation["media_failure_causes"] == {NO_SPACE: 2}
        assert all(math.isfinite(score) for score in evaluation["scores"])
    assert not list(run.rglob("*.mp4"))
    assert not list(run.rglob("*.part"))
    assert sum(NO_SPACE in text for text in listener.texts) == 3
