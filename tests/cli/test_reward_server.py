"""`reward-server` as a process: a run trains with it, and outlives it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import torch

from tests.cli.conftest import Invoke
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.report.build import build_report
from workflow_rl.rewards.base import RewardBatch
from workflow_rl.rewards.remote.protocol import MediaFormat, encode_request
from workflow_rl.training.trainer import SilentListener, train

KILLED_AFTER = 2
REWARDS = "rewards:\n  - {name: frame_change}\n  - {name: directed_motion}\n"


class Server:
    """A process of `reward-server`, ready."""

    def __init__(self, config: Path) -> None:
        command = "from workflow_rl.cli.main import app; app()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, "reward-server", str(config), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.url = self.ready.split()[1]

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal; return the exit code and what it said."""
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    """A place for servers that must not outlive the test."""
    made: list[Server] = []
    yield made
    for server in made:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def _config(folder: Path, name: str, iterations: int, **server: Any) -> RunConfig:
    """A short run of the embedded pair."""
    (folder / "prompts.txt").write_text("a red circle moving left\na blue square moving up\n")
    sampling = "samples: 2, num_inference_steps: 2, rollout_batch_size: 8, sde: {kind: cps}"
    (folder / f"{name}.yaml").write_text(
        f"""
output_dir: {folder / name}
stages:
  t2i: {{task: t2i, {sampling}}}
  i2v: {{task: i2v, {sampling}}}
data: {{prompts: {folder / "prompts.txt"}, prompts_per_iteration: 2}}
rewards: [{{name: directed_motion, server: {json.dumps(server or None)}}}]
training: {{iterations: {iterations}, threads: 1}}
evaluation: {{every: 0, bootstrap_samples: 100}}
logging: {{tensorboard: false}}
"""
    )
    return load_config(folder / f"{name}.yaml")


def _lines(config: RunConfig) -> list[dict[str, Any]]:
    lines = map(json.loads, (config.output_dir / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


class _KillAfter(SilentListener):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        if number == KILLED_AFTER:
            self.server.end(signal.SIGKILL)


def test_a_run_trains_with_a_server_as_without_and_outlives_it(
    servers: list[Server], tmp_path: Path
) -> None:
    (tmp_path / "rewards.yaml").write_text(REWARDS)
    servers.append(Server(tmp_path / "rewards.yaml"))
    assert "serves frame_change, directed_motion" in servers[0].ready

    here = _config(tmp_path, "here", KILLED_AFTER)
    create_run_dir(here)
    train(here)
    away = _config(
        tmp_path, "away", KILLED_AFTER + 1, url=servers[0].url, media="float32", retries=1
    )
    create_run_dir(away)
    listener = _KillAfter(servers[0])
    assert train(away, listener=listener) is None

    lines = _lines(away)
    assert lines[:KILLED_AFTER] == _lines(here)
    cause = "no connection to the server"
    for line in lines[KILLED_AFTER:]:
        assert line["reward_failed/directed_motion"] == 8
        assert line["reward_failure_causes"] == {"directed_motion": {cause: 8}}
        assert line["reward_mean"] is None
        assert line["groups_skipped/t2i"] == 2
    told = f"iteration 3: directed_motion failed for 8 of 8 samples: {cause} (8)"
    assert told in listener.said
    assert f"directed_motion: {cause}" in build_report(away.output_dir).read_text()


def test_it_answers_counts_and_stops_when_told(servers: list[Server], tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text(REWARDS)
    servers.append(Server(tmp_path / "rewards.yaml"))
    media = torch.zeros(2, 3, 9, 32, 32)
    media[1, :, 4:] = 1.0
    batch = RewardBatch(["a fox", "a fox"], ["still", "flash"], media, "video", 8.0)
    with httpx.Client(base_url=servers[0].url, trust_env=False) as client:
        health = client.get("/health").json()
        assert list(health["rewards"]) == ["frame_change", "directed_motion"]
        for kind in get_args(MediaFormat):
            body = encode_request(batch, "frame_change", kind)
            still, flash = client.post("/score", json=body).json()["results"]
            assert (still["id"], flash["id"]) == ("still", "flash")
            assert still["score"] < 0.01 < flash["score"]
        assert client.post("/score", json=body | {"reward": "frame_chang"}).status_code == 404
        assert client.post("/score", content=b"\x80\x04pickle").status_code == 400
        metrics = client.get("/metrics").text
    assert 'reward_server_samples_total{reward="frame_change"} 6.0' in metrics
    assert 'reward_server_failures_total{cause="unknown reward",reward=""} 1.0' in metrics
    assert servers[0].end(signal.SIGTERM) == (0, "stopped\n")


def test_a_port_that_is_taken_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "rewards.yaml").write_text(REWARDS)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("reward-server", tmp_path / "rewards.yaml", "--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in result.one_line_error()


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        ("rewards: [{name: frame_chnge}]", "frame_change"),
        ("rewards: [{name: constant, wieght: 1}]", "wieght"),
        ("rewards: []", "rewards"),
        ("rewards: [{name: vlm_judge}]", "vlm_judge needs args.model"),
        ("reward: [{name: constant}]", "reward"),
    ],
)
def test_rewards_that_cannot_be_served_are_refused(
    invoke: Invoke, tmp_path: Path, rewards: str, says: str
) -> None:
    (tmp_path / "rewards.yaml").write_text(rewards)
    result = invoke("reward-server", tmp_path / "rewards.yaml", "--port", "0")
    assert says in result.one_line_error()


def test_a_run_without_its_server_is_refused_and_leaves_nothing(
    invoke: Invoke, tmp_path: Path
) -> None:
    config = _config(tmp_path, "alone", 1, url="http://127.0.0.1:9")
    result = invoke("train", tmp_path / "alone.yaml")
    assert "the reward server http://127.0.0.1:9 cannot be used" in result.one_line_error()
    assert not config.output_dir.exists()


def test_a_run_tells_that_it_waits_and_leaves_nothing_when_that_was_in_vain(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow_rl.rewards.remote.client.POLL_S", 0.05)
    config = _config(tmp_path, "alone", 1, url="http://127.0.0.1:9", wait_s=0.2)
    result = invoke("train", tmp_path / "alone.yaml")
    assert result.exit_code == 2
    assert "waiting 0.2 s for http://127.0.0.1:9: no connection" in result.stdout
    assert "the reward server http://127.0.0.1:9 cannot be used" in result.stderr
    assert not config.output_dir.exists()
