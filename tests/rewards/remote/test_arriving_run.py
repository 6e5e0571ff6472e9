"""A run whose rewards are elsewhere: they are asked before the last sample is made."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.remote import rewards_for_processes
from tests.rewards.remote.faulty_server import FaultyServer
from tests.rewards.test_vlm_judge import Server as JudgeServer
from tests.rewards.test_vlm_judge import completion
from tests.tiny_models import save_flux, save_wan
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.evaluation.chain import ChainScoring, Evaluation
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.runtime.driver import ProgressEvent
from workflow_rl.training.trainer import SilentListener, train

MEAN = f"{rewards_for_processes.__name__}:mean"
NOTED = f"{rewards_for_processes.__name__}:noted"
STEPS, BATCH, VIDEOS = 2, 2, 8
STEPS_BEFORE_THE_LAST_BATCH = STEPS * (VIDEOS - BATCH) // BATCH
WAIT_S = 30.0
"""That a request may be on its way; a run that holds its requests back waits so long in vain."""


def grades(*names: str, most: int) -> Callable[[dict[str, Any]], object]:
    """Make a judge whose answer depends on all that it is shown, and on nothing else."""

    def reply(request: dict[str, Any]) -> object:
        digest = hashlib.sha256(json.dumps(request["messages"][1]).encode()).digest()
        answer = {name: 1 + digest[i] % most for i, name in enumerate(names)}
        return completion(json.dumps(answer))

    return reply


class Places:
    """Where the rewards are computed."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes
        self.server, self.judge, self.pairs = FaultyServer(), JudgeServer(), JudgeServer()
        self.judge.reply = grades("alignment", "quality", "motion", most=5)
        self.pairs.reply = grades("better", most=2)

    def requests(self) -> dict[str, int]:
        """Count what has arrived at each."""
        return {
            "server": len(self.server.requests),
            "process": len(self.notes.read_text().split()) if self.notes.exists() else 0,
            "judge": len(self.judge.requests),
            "pairs": len(self.pairs.requests),
        }

    def forget(self) -> None:
        """Count from here on."""
        for place in (self.server, self.judge, self.pairs):
            place.requests.clear()
        self.notes.unlink(missing_ok=True)

    def rewards(self, *, elsewhere: bool) -> list[dict[str, Any]]:
        """Name the rewards, two of them elsewhere or in the run; the judges are where they are."""
        settings = {"model": "m", "method": "average", "samples": 1, "frames": 2, "retries": 0}
        server = {"url": self.server.url, "reward": "mean", "media": "float32", "batch_size": 2}
        process = {"batch_size": 2, "env": {"REWARD_NOTES": str(self.notes)}}
        judge = settings | {"base_url": self.judge.url}
        pairs = settings | {"base_url": self.pairs.url, "criteria": {"better": "Which?"}}
        return [
            {"callable": MEAN, **({"server": server} if elsewhere else {})},
            {"callable": NOTED, **({"process": process} if elsewhere else {})},
            {"name": "vlm_judge", "args": judge},
            {"name": "vlm_pairwise", "args": pairs},
        ]

    def close(self) -> None:
        """End the servers."""
        for place in (self.server, self.judge, self.pairs):
            place.close()


class Watch(SilentListener):
    """Holds the last batch of videos, half made, until every place was asked; says what it saw."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.steps = 0
        self.before_the_last_was_made: dict[str, int] = {}
        self.of_the_iteration: dict[str, int] = {}
        self.failed: list[str] = []

    def evaluation(self, number: int, evaluation: Evaluation) -> None:
        if number == 0:  # what is asked from here on is of the iteration
            self.places.forget()
            self.steps = 0

    def progress(self, stage: str, event: ProgressEvent) -> None:
        self.steps += stage == "i2v"
        last = stage == "i2v" and self.steps == STEPS_BEFORE_THE_LAST_BATCH + 1
        if last:
            deadline = time.monotonic() + WAIT_S
            while not all(self.places.requests().values()) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.before_the_last_was_made = self.places.requests()

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        self.of_the_iteration = self.places.requests()

    def message(self, text: str) -> None:
        self.failed.append(text)


def run(folder: Path, name: str, rewards: list[dict[str, Any]], listener: Watch) -> dict[str, Any]:
    """Train one iteration; return its metrics but for the time that it took."""
    sampling = (
        f"samples: 2, num_inference_steps: {STEPS}, rollout_batch_size: {BATCH}, sde: {{kind: cps}}"
    )
    (folder / f"{name}.yaml").write_text(
        f"""
output_dir: {folder / name}
stages:
  t2i: {{task: t2i, model: {folder / "flux"}, {sampling}}}
  i2v: {{task: i2v, model: {folder / "wan"}, {sampling}, num_frames: 5}}
data: {{prompts: {folder / "prompts.txt"}, prompts_per_iteration: 2}}
rewards: {json.dumps(rewards)}
training: {{iterations: 1, threads: 1}}
evaluation: {{every: 0, seeds_per_prompt: 1, bootstrap_samples: 100}}
logging: {{tensorboard: false}}
"""
    )
    config = load_config(folder / f"{name}.yaml")
    create_run_dir(config)
    assert train(config, listener=listener) is None
    (line,) = map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())
    return {key: value for key, value in line.items() if not key.startswith("time/")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and prompts."""
    made = tmp_path_factory.mktemp("arriving")
    save_flux(made / "flux", guidance_embeds=False, dynamic_shift=False)
    save_wan(made / "wan", image_encoder=False)
    (made / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n")
    return made


@pytest.fixture(scope="module")
def places(folder: Path) -> Iterator[Places]:
    made = Places(folder / "notes")
    yield made
    made.close()


@pytest.fixture(scope="module")
def watched(folder: Path, places: Places) -> tuple[Watch, Mapping[str, Any]]:
    """A run with its rewards elsewhere: who watched it, and its metrics."""
    watch = Watch(places)
    return watch, run(folder, "elsewhere", places.rewards(elsewhere=True), watch)


def test_every_reward_elsewhere_is_asked_before_the_last_video_is_made(
    watched: tuple[Watch, Mapping[str, Any]],
) -> None:
    watch, _ = watched
    assert watch.failed == []
    assert all(watch.before_the_last_was_made.values()), watch.before_the_last_was_made
    assert len(watch.before_the_last_was_made) == 4


def test_each_sample_and_pair_is_asked_about_once(
    watched: tuple[Watch, Mapping[str, Any]],
) -> None:
    groups_of_4_in_both_orders = 2 * 4 * 3
    assert watched[0].of_the_iteration == {
        "server": VIDEOS // 2,
        "process": VIDEOS // 2,
        "judge": VIDEOS,
        "pairs": groups_of_4_in_both_orders,
    }


def test_the_run_is_that_whose_rewards_are_asked_at_the_end(
    watched: tuple[Watch, Mapping[str, Any]],
    folder: Path,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rewards, advantages, losses and gradients, to the last digit; two of them in the run."""
    obtain = CompositeReward.obtain
    monkeypatch.setattr(ChainScoring, "made", lambda self, part: None)
    monkeypatch.setattr(CompositeReward, "obtain", lambda self, media, _: obtain(self, media))
    monkeypatch.setattr(f"{__name__}.WAIT_S", 0.0)
    watch = Watch(places)
    line = run(folder, "here", places.rewards(elsewhere=False), watch)
    assert not any(watch.before_the_last_was_made.values())
    assert line == watched[1]
    assert line["reward/vlm_judge"] is not None
    assert line["reward/vlm_pairwise"] == pytest.approx(0.5)
