"""A run from a configuration: files, resume, stop, and the control."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.card import ModelCard
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.evaluation.chain import Evaluation
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.frame_change import FrameChange
from workflow_rl.runtime.driver import ProgressEvent
from workflow_rl.serving.chain import load_chain, publish_run
from workflow_rl.serving.evaluate import evaluate_run
from workflow_rl.serving.generate import generate
from workflow_rl.training.checkpoint import latest_valid, load_checkpoint
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.trainer import Run, RunListener, SilentListener, train
from workflow_rl.training.weight_sync import WeightRole

ITERATIONS = 5


def _config(tmp_path: Path, cards: tuple[ModelCard, ModelCard], *overrides: str) -> RunConfig:
    (tmp_path / "prompts.txt").write_text("\n".join([*PROMPTS, "a green circle moving up"]) + "\n")
    sampling = "samples: 2, num_inference_steps: 3, rollout_batch_size: 4, sde: {kind: cps}"
    (tmp_path / "config.yaml").write_text(
        f"""
output_dir: {tmp_path / "run"}
stages:
  t2i: {{task: t2i, model: {cards[0].source}, {sampling}, ema: {{decay: 0.9}},
        optimizer: {{lr: 1.0e-3, schedule: cosine}}}}
  i2v: {{task: i2v, model: {cards[1].source}, {sampling}, num_frames: 5,
        optimizer: {{lr: 1.0e-3}}}}
data: {{prompts: {tmp_path / "prompts.txt"}, prompts_per_iteration: 2}}
rewards: [{{name: frame_change}}]
training: {{iterations: {ITERATIONS}, checkpoint: {{every: 2, keep: 2}}, threads: 1}}
evaluation: {{every: 2, seeds_per_prompt: 2, bootstrap_samples: 100}}
logging: {{tensorboard: false}}
"""
    )
    return load_config(tmp_path / "config.yaml", overrides)


def _run(config: RunConfig, listener: RunListener | None = None) -> int | None:
    create_run_dir(config)
    return train(config, listener=listener)


def _timeless(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def _final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    path = latest_valid(run_dir / "checkpoints", on_skip=pytest.fail)
    assert path is not None
    return load_checkpoint(path).tensors


@pytest.fixture(scope="module")
def whole_run(
    cards: tuple[ModelCard, ModelCard], tmp_path_factory: pytest.TempPathFactory
) -> RunConfig:
    """A run that was never stopped."""
    config = _config(tmp_path_factory.mktemp("whole"), cards)
    assert _run(config) is None
    return config


class _StopAfter(SilentListener):
    """Sends this process SIGTERM in the middle of an iteration's report."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps: set[tuple[str, int, int]] = set()
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, stage: str, event: ProgressEvent) -> None:
        self.steps.add((stage, event.step, event.num_steps))

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        if number == self.number:
            os.kill(os.getpid(), signal.SIGTERM)


class _CrashError(Exception):
    pass


class _CrashAfter(SilentListener):
    """Ends the run between two checkpoints, as a crash would."""

    def __init__(self, number: int) -> None:
        self.number = number

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        if number == self.number:
            raise _CrashError


class _CrashAfterEvaluation(SilentListener):
    """Ends the run between an evaluation's line and the checkpoint of that iteration."""

    def evaluation(self, number: int, evaluation: Evaluation) -> None:
        if number == 2:
            raise _CrashError


def test_what_a_run_leaves(whole_run: RunConfig) -> None:
    run = whole_run.output_dir
    lines = _timeless(run / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == list(range(ITERATIONS))
    assert all(line["c2_max_log_ratio/i2v"] == 0.0 for line in lines)
    evaluations = _timeless(run / "evaluations.jsonl")
    assert [line["iteration"] for line in evaluations] == [0, 2, 4, 5]
    assert len({json.dumps([e["prompts"], e["seeds"]]) for e in evaluations}) == 1
    assert len(evaluations[0]["scores"]) == 6
    for line in evaluations:
        for paths in line["media"].values():
            assert all((run / path).is_file() for path in paths)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "iteration_00000004",
        "iteration_00000005",
    ]
    tree = json.loads((run / "rollouts" / "iteration_00000005.json").read_text())
    group = tree["groups"][0]
    image = group["children"][0]
    assert len(group["children"]) == len(image["children"]) == 2
    rewards = [video["reward"] for video in image["children"]]
    assert image["reward"] == pytest.approx(sum(rewards) / 2)
    assert group["reward_mean"] >= tree["groups"][-1]["reward_mean"]


def test_a_stopped_run_resumes_to_the_same_bytes(
    whole_run: RunConfig, cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    config = _config(tmp_path, cards)
    listener = _StopAfter(3)
    assert _run(config, listener) == 3
    assert listener.steps == {(s, n, 3) for s in ("t2i", "i2v") for n in (1, 2, 3)}
    assert "SIGTERM: the run stops after this iteration" in listener.messages[-1]
    assert train(config, resume=True, listener=listener) is None
    assert "going on after iteration 3" in listener.messages[-1]
    _assert_same_run(config, whole_run)


def test_options_that_save_memory_change_no_number(
    whole_run: RunConfig, cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """All that is exact to the bit, over a stop and a resume."""
    memory = (
        "{drop_text_encoders: true, embedding_cache: true, gradient_checkpointing: true,"
        " vae_tiling: true, attention_backend: native}"
    )
    options = ["training.swap_stages=true"]
    options += [f"stages.{stage}.memory={memory}" for stage in ("t2i", "i2v")]
    config = _config(tmp_path, cards, *options)
    run = Run(config, SilentListener())
    for policy in run.method.policies:
        modules = policy.student.adapter.modules
        assert modules["transformer"].gradient_checkpointing
        assert modules["vae"].use_tiling
    assert _run(config, _StopAfter(3)) == 3
    assert train(config, resume=True) is None
    _assert_same_run(config, whole_run)
    texts = 3 * len(cards)
    assert len(list((config.output_dir / "embeddings").glob("*.safetensors"))) == texts


@pytest.mark.parametrize("crash", [1, 3])
def test_a_crashed_run_resumes_to_the_same_bytes(
    whole_run: RunConfig, cards: tuple[ModelCard, ModelCard], tmp_path: Path, crash: int
) -> None:
    """The crash comes after lines were written that no checkpoint covers; 1: before the first."""
    config = _config(tmp_path, cards)
    with pytest.raises(_CrashError):
        _run(config, _CrashAfter(crash))
    leftover = config.output_dir / "checkpoints" / ".tmp-iteration_00000001"
    leftover.mkdir(parents=True)
    resumed = Run(config, SilentListener())
    resumed.restore()
    assert not leftover.exists()
    assert train(config, resume=True) is None
    _assert_same_run(config, whole_run)


def test_a_crash_between_evaluation_and_checkpoint_evaluates_again(
    whole_run: RunConfig, cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    config = _config(tmp_path, cards)
    with pytest.raises(_CrashError):
        _run(config, _CrashAfterEvaluation())
    assert len(_timeless(config.output_dir / "evaluations.jsonl")) == 2
    assert train(config, resume=True) is None
    _assert_same_run(config, whole_run)


def test_named_modules_train_alone_and_resume_to_the_same_bytes(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """With an average and a reference, which hold the named modules alone too."""
    overrides = [
        "stages.t2i.train_modules=[single_transformer_blocks]",
        "stages.t2i.kl_weight=0.01",
        "stages.i2v.train_modules=[attn1, attn2]",
        "training.iterations=3",
        "evaluation.every=0",
    ]
    names = {"t2i": ("single_transformer_blocks",), "i2v": ("attn1", "attn2")}
    (tmp_path / "whole").mkdir()
    (tmp_path / "crashed").mkdir()
    whole = _config(tmp_path / "whole", cards, *overrides)
    run = Run(whole, SilentListener())
    before = {policy.name: _all_weights(policy) for policy in run.method.policies}
    assert _run(whole) is None
    crashed = _config(tmp_path / "crashed", cards, *overrides)
    with pytest.raises(_CrashError):
        _run(crashed, _CrashAfter(3))
    assert train(crashed, resume=True) is None
    _assert_same_run(crashed, whole)

    run = Run(whole, SilentListener())
    run.restore()
    for policy in run.method.policies:
        after = _all_weights(policy)
        moved = {key for key in after if not torch.equal(after[key], before[policy.name][key])}
        kept = {key for key in after if set(key.split(".")) & set(names[policy.name])}
        assert 0 < len(moved) < len(after)
        assert moved == kept


def _all_weights(policy: StagePolicy) -> dict[str, torch.Tensor]:
    transformer = policy.student.component("transformer")
    return {name: tensor.detach().clone() for name, tensor in transformer.state_dict().items()}


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(
    whole_run: RunConfig, cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """SIGKILL, sent as soon as the third iteration's line is on the disk."""
    config = _config(tmp_path, cards)
    command = [sys.executable, "-m", "workflow_rl", "train", str(tmp_path / "config.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = config.output_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.is_file() and metrics.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert train(config, resume=True) is None
    _assert_same_run(config, whole_run)


def _assert_same_run(config: RunConfig, whole: RunConfig) -> None:
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        ours, theirs = config.output_dir / name, whole.output_dir / name
        assert _timeless(ours) == _timeless(theirs)
    resumed, expected = _final_tensors(config.output_dir), _final_tensors(whole.output_dir)
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_resume_of_a_finished_run_changes_nothing(whole_run: RunConfig) -> None:
    before = (whole_run.output_dir / "metrics.jsonl").read_bytes()
    listener = _StopAfter(0)
    assert train(whole_run, resume=True, listener=listener) is None
    assert f"all {ITERATIONS} iterations were done" in listener.messages[-1]
    assert (whole_run.output_dir / "metrics.jsonl").read_bytes() == before


def test_the_control_moves_nothing(cards: tuple[ModelCard, ModelCard], tmp_path: Path) -> None:
    config = _config(tmp_path, cards, "rewards=[{name: constant, args: {value: 0.3}}]")
    assert _run(config) is None
    tensors = _final_tensors(config.output_dir)
    for name, card in zip(("t2i", "i2v"), cards, strict=True):
        fresh = card.make_adapter(card, torch.device("cpu"), torch.float32)
        for key, tensor in fresh.trainable("transformer").items():
            assert torch.equal(tensors[f"{name}/weights/transformer.{key}"], tensor)
    assert not any("optim" in key for key in tensors)


def test_evaluate_and_generate_serve_the_trained_weights(
    whole_run: RunConfig, tmp_path: Path
) -> None:
    run = whole_run.output_dir
    result = evaluate_run(run)
    last = _timeless(run / "evaluations.jsonl")[-1]
    before, after = result.candidates
    assert (before.description["iteration"], after.description["iteration"]) == (0, ITERATIONS)
    assert after.total.tolist() == pytest.approx(last["scores"], abs=1e-6)
    assert before.total.tolist() != after.total.tolist()
    assert evaluate_run(run).to_json() == result.to_json()
    png, mp4 = generate(
        whole_run.workflow,
        whole_run.stages,
        prompt=PROMPTS[0],
        seed=3,
        output_dir=tmp_path,
        run_dir=run,
    )
    assert (png.suffix, mp4.suffix) == (".png", ".mp4")


def test_a_role_that_the_run_does_not_keep_is_refused(whole_run: RunConfig) -> None:
    chain = load_chain(whole_run.workflow, whole_run.stages)
    with pytest.raises(UserError, match="keeps no ema weights of stage 'i2v'"):
        publish_run(chain, whole_run.output_dir, WeightRole.EMA, pytest.fail)


class _BreakReward(SilentListener):
    """Has the reward raise in the iterations after which so many are done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, broken: set[int]) -> None:
        self.done = 0
        self.broken = broken
        monkeypatch.setattr(FrameChange, "__call__", self.score)

    def score(self, batch: RewardBatch) -> RewardScores:
        if self.done in self.broken:
            raise RuntimeError("no such key")
        return RewardScores(batch.media.flatten(1).mean(1))

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        self.done = number


def test_iterations_without_a_score_end_the_run_until_the_reward_is_mended(
    tmp_path: Path, cards: tuple[ModelCard, ModelCard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those in a row count, and the run that is resumed has its patience back."""
    config = _config(tmp_path, cards, "training.max_unscored_iterations=2", "evaluation.every=0")
    listener = _BreakReward(monkeypatch, broken={0, 2, 3})
    with pytest.raises(WorkflowRLError, match=r"in 2 iterations in a row .*no such key.*: mend"):
        _run(config, listener)
    assert listener.done == len(_timeless(tmp_path / "run" / "metrics.jsonl")) == 4
    listener.broken = set()
    assert train(config, resume=True, listener=listener) is None
    assert listener.done == ITERATIONS
