"""A run whose rewards fail in another way in each iteration: it goes on, counts and says why."""

from __future__ import annotations

import html
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.rewards.remote import rewards_for_processes
from tests.rewards.remote.faulty_server import HALF, FaultyServer, Reply
from tests.rewards.test_vlm_judge import Server as JudgeServer
from tests.rewards.test_vlm_judge import completion, prompt_of
from tests.tiny_models import save_flux, save_wan
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.report.build import build_report
from workflow_rl.rewards.remote import build
from workflow_rl.rewards.remote.process import ProcessReward
from workflow_rl.training.trainer import SilentListener, train

SAMPLES = 8
LIMIT_S = 2.0
SERVER, PROCESS = "far.away.mean", f"{rewards_for_processes.__name__}.moody"
GOOD = "good"
FAULTS: dict[str, tuple[Reply, int, str]] = {
    GOOD: (lambda results: results, 0, ""),
    "500": (lambda results: 500, SAMPLES, "the server answered 500"),
    "half-way": (lambda results: HALF, SAMPLES, "the connection broke off before the answer was"),
    "nan": (
        lambda results: [results[0] | {"score": math.nan}, *results[1:]],
        1,
        "the answer's score is nan, not a finite float32",
    ),
    "text": (
        lambda results: [r | {"score": "good"} for r in results],
        SAMPLES,
        "the answer's score is a str, not a number",
    ),
    "too few": (lambda results: results[:-3], 3, "the answer has nothing for this sample"),
    "prose": (lambda results: b"I like them all", SAMPLES, "the server's answer is not JSON"),
    "order": (lambda results: results[::-1], 0, ""),
    "killed": (lambda results: results, 0, ""),
    "hangs": (lambda results: results, SAMPLES, f"no answer from the server within {LIMIT_S:g} s"),
}
"""Per iteration: what the server makes of its answer, failed samples, the cause."""
PICKY = f"{rewards_for_processes.__name__}.picky"
RAISED = "RuntimeError: no face found"
KILLED = "the process was killed by SIGKILL, and has had its 0 restarts"


def _prose_about_squares(request: dict[str, Any]) -> object:
    """A judge that forgets its format for the samples of one of the two prompts."""
    is_square = "blue square" in prompt_of(request)
    grades = {"alignment": 3, "quality": 3, "motion": 3}
    return completion("I like it" if is_square else json.dumps(grades))


class _Mischief(SilentListener):
    """Before each iteration, sets how it is to fail."""

    def __init__(self, server: FaultyServer, processes: list[ProcessReward]) -> None:
        self.server = server
        self.processes = processes

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        fault = [*FAULTS, GOOD][number]
        self.server.reply = self.server.hang if fault == "hangs" else FAULTS[fault][0]
        if fault == "killed":
            (process,) = self.processes
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)


class _Kept(ProcessReward):
    """A process that a test can find."""

    made: ClassVar[list[ProcessReward]] = []

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run, trained to its end."""
    folder = tmp_path_factory.mktemp("faulty")
    save_flux(folder / "flux", guidance_embeds=False, dynamic_shift=False)
    save_wan(folder / "wan", image_encoder=False)
    (folder / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n")
    server, judge = FaultyServer(), JudgeServer()
    judge.reply = _prose_about_squares
    sampling = "samples: 2, num_inference_steps: 2, rollout_batch_size: 8, sde: {kind: cps}"
    (folder / "config.yaml").write_text(
        f"""
output_dir: {folder / "run"}
stages:
  t2i: {{task: t2i, model: {folder / "flux"}, {sampling}}}
  i2v: {{task: i2v, model: {folder / "wan"}, {sampling}, num_frames: 5}}
data: {{prompts: {folder / "prompts.txt"}, prompts_per_iteration: 2}}
rewards:
  - callable: far.away:mean
    server: {{url: "{server.url}", reward: mean, retries: 0, request_timeout_s: {LIMIT_S}}}
  - callable: {rewards_for_processes.__name__}:moody
    weight: 0.0
    process: {{restarts: 0}}
  - callable: {PICKY}
    weight: 0.0
  - name: vlm_judge
    weight: 0.0
    args: {{model: m, base_url: "{judge.url}", method: average, samples: 1, frames: 1, retries: 0}}
training: {{iterations: {len(FAULTS)}, threads: 1}}
evaluation: {{every: 0, bootstrap_samples: 100}}
logging: {{tensorboard: false}}
"""
    )
    config = load_config(folder / "config.yaml")
    create_run_dir(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "ProcessReward", _Kept)
        assert train(config, listener=_Mischief(server, _Kept.made)) is None
    yield config.output_dir
    server.close()
    judge.close()
    for process in _Kept.made:
        process.close()


@pytest.fixture(scope="module")
def lines(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Each iteration's metrics, by its fault."""
    text = (run_dir / "metrics.jsonl").read_text().splitlines()
    return dict(zip(FAULTS, map(json.loads, text), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_becomes_a_score_and_each_is_counted_with_its_cause(
    lines: dict[str, dict[str, Any]], fault: str
) -> None:
    _, failed, cause = FAULTS[fault]
    line = lines[fault]
    causes = line["reward_failure_causes"].get(SERVER, {})
    assert line[f"reward_failed/{SERVER}"] == failed
    assert sum(causes.values()) == failed
    assert all(reason.startswith(cause) for reason in causes)
    if failed == SAMPLES:
        assert line["reward_mean"] is None
        assert line["groups_skipped/t2i"] == 2
    else:
        assert line["reward_mean"] is not None


def test_a_killed_process_costs_its_own_scores_of_one_iteration(
    lines: dict[str, dict[str, Any]],
) -> None:
    for fault, line in lines.items():
        killed = fault == "killed"
        assert line[f"reward_failed/{PROCESS}"] == (SAMPLES if killed else 0)
        causes = line["reward_failure_causes"].get(PROCESS, {})
        assert causes == ({KILLED: SAMPLES} if killed else {})
    assert lines["killed"][f"reward_failed/{SERVER}"] == 0


def test_a_reward_that_raises_on_one_sample_and_a_judge_that_answers_prose_fail_those_alone(
    lines: dict[str, dict[str, Any]],
) -> None:
    for line in lines.values():
        assert line[f"reward_failed/{PICKY}"] == 1
        assert line["reward_failure_causes"][PICKY] == {RAISED: 1}
        assert line["reward_failed/vlm_judge"] == SAMPLES // 2
        assert sum(line["reward_failure_causes"]["vlm_judge"].values()) == SAMPLES // 2
        assert line["reward/vlm_judge"] == 0.5


def test_both_give_the_same_score_of_the_same_samples(lines: dict[str, dict[str, Any]]) -> None:
    """The server sees 8 bits of each value, the process all of it."""
    for fault in (GOOD, "order"):
        line = lines[fault]
        assert line[f"reward/{SERVER}"] == pytest.approx(line[f"reward/{PROCESS}"], abs=1e-3)


def test_the_report_shows_every_cause_with_its_count(run_dir: Path) -> None:
    page = html.unescape(build_report(run_dir).read_text())
    for _, failed, cause in FAULTS.values():
        if failed:
            assert f"{SERVER}: {cause}" in page
    assert f"{PROCESS}: {KILLED}" in page
    assert f"{PICKY}: {RAISED}" in page
    assert "vlm_judge: ValueError: " in page
    total = sum(failed for _, failed, _ in FAULTS.values())
    assert f"training samples without a reward of {SERVER}" in page
    assert f">{total}<" in page
