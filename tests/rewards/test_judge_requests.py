"""How many requests a judge makes, when, and how long: what other rewards elsewhere do, it does."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.rewards.test_vlm_judge import Server, completion, prompt_of, videos
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, ScoresElsewhere, score_safely
from workflow_rl.rewards.pending import PendingScores
from workflow_rl.rewards.vlm_judge import VlmJudge
from workflow_rl.rewards.vlm_pairwise import PairwiseVlmJudge

WAIT_S = 20.0
GOOD = completion('{"quality": 1}')


class Busy(Server):
    """Holds what it is asked until it is told to answer; knows how much it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.holds, self.most = 0, 0
        self.lock = threading.Lock()
        self.reply = self._hold

    def _hold(self, request: dict[str, Any]) -> object:
        with self.lock:
            self.holds += 1
            self.most = max(self.most, self.holds)
        self.go.wait(WAIT_S)
        time.sleep(0.02)
        with self.lock:
            self.holds -= 1
        return GOOD

    def wait_for(self, holds: int) -> None:
        """Wait until it holds so many requests."""
        deadline = time.monotonic() + WAIT_S
        while self.holds < holds and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.holds == holds

    def pairwise(self, **options: Any) -> PairwiseVlmJudge:
        """A judge of pairs that asks it once."""
        settings = {"model": "m", "base_url": self.url, "criteria": {"quality": "Which?"}}
        more: dict[str, Any] = {"method": "average", "retries": 0, "frames": 1}
        return PairwiseVlmJudge(**(settings | more | options))


@pytest.fixture
def server() -> Iterator[Busy]:
    made = Busy()
    yield made
    made.go.set()
    made.close()


def groups(count: int, size: int) -> RewardBatch:
    """Groups of videos, one after the other."""
    return replace(videos(count * size), group_ids=[str(i // size) for i in range(count * size)])


def test_both_judges_are_rewards_elsewhere(server: Busy) -> None:
    assert isinstance(server.judge(), ScoresElsewhere)
    assert isinstance(server.pairwise(), ScoresElsewhere)


def test_a_judge_that_nobody_loaded_fails_its_sample_and_blocks_nothing(server: Busy) -> None:
    """To load waits for the thread that asks."""
    server.go.set()
    scores = server.judge(frames=1).submit(videos(1)).result(WAIT_S)
    assert scores.failures == {
        0: "RuntimeError: a remote reward was asked before it was loaded: call its load() first"
    }
    assert score_safely(server.judge(frames=1), videos(1)).failures == {}


def test_samples_are_asked_about_as_they_come_so_many_at_a_time(server: Busy) -> None:
    judge = server.judge(concurrency=3, frames=1)
    judge.load()
    pending = PendingScores(judge)
    for row in range(9):
        pending.add(videos(9).row(row))
        server.wait_for(min(row + 1, 3))
    server.go.set()
    assert pending.result(WAIT_S).failures == {}
    assert (len(server.requests), server.most) == (9, 3)


def test_groups_are_compared_as_they_come_so_many_pairs_at_a_time(server: Busy) -> None:
    judge = server.pairwise(concurrency=4)
    judge.load()
    pending = PendingScores(judge, group_size=3)
    for row in range(6):
        pending.add(videos(6).row(row))
        server.wait_for(0 if row < 2 else 4)
    server.go.set()
    assert pending.result(WAIT_S).scores.tolist() == [0.5] * 6
    assert (len(server.requests), server.most) == (2 * 3 * 2, 4)


@pytest.mark.parametrize("pairs", [False, True])
def test_to_give_up_takes_back_what_was_not_asked_yet(server: Busy, pairs: bool) -> None:
    """And makes room for what comes next."""
    reward = (server.pairwise if pairs else server.judge)(concurrency=2)
    reward.load()
    given_up = PendingScores(reward, group_size=4 if pairs else None)
    given_up.add(videos(4))
    server.wait_for(2)
    given_up.cancel()
    kept = PendingScores(reward, group_size=2 if pairs else None)
    kept.add(videos(2))
    server.wait_for(4)  # the server knows nothing of who left
    server.go.set()
    assert kept.result(WAIT_S).failures == {}
    assert len(server.requests) == 4


def test_a_time_limit_keeps_what_was_answered_before(server: Busy) -> None:
    def reply(request: dict[str, Any]) -> object:
        if "prompt 3" in prompt_of(request):
            server.go.wait(WAIT_S)
        return GOOD

    server.reply = reply
    result = score_safely(server.judge(frames=1), videos(5), timeout_s=1.0)
    assert result.failures == {3: "timed out after 1 s"}


def test_a_time_limit_is_that_of_pairs_too(server: Busy) -> None:
    result = score_safely(server.pairwise(), groups(1, 3), timeout_s=0.5)
    assert result.failures == dict.fromkeys(range(3), "timed out after 0.5 s")


def test_what_a_server_is_told_is_what_was_set(
    server: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.reply = lambda request: GOOD
    score_safely(server.judge(api_key_env="MY_KEY", temperature=0.25, frames=8), videos(1))
    image = RewardBatch(["p"], ["0"], torch.zeros(1, 3, 8, 8), "image")
    score_safely(server.judge(method="logprob", api_key_env="NO_KEY"), image)
    first, second = server.requests
    assert (first["model"], first["temperature"], second["temperature"]) == ("m", 0.25, 0.0)
    assert (second["top_logprobs"], second["model"]) == (20, "m")
    assert server.keys == ["Bearer secret", "Bearer none"]
    assert prompt_of(first).endswith("Below: frames of the video, in order.")
    assert prompt_of(second).endswith("Below: the image.")


def test_a_video_shorter_than_the_frames_shown_is_shown_once(server: Busy) -> None:
    server.reply = lambda request: GOOD
    batch = videos(1)
    score_safely(server.judge(frames=8), replace(batch, media=batch.media[:, :, :3]))
    assert len(server.requests[0]["messages"][1]["content"]) == 1 + 3


@pytest.mark.usefixtures("absent_proxy")
@pytest.mark.parametrize("use_proxy", [False, True])
def test_a_proxy_of_the_environment_is_used_where_it_is_asked_for(
    server: Busy, use_proxy: bool
) -> None:
    server.reply = lambda request: GOOD
    judge = server.judge(frames=1, use_proxy=use_proxy)
    if use_proxy:
        with pytest.raises(UserError, match="does not answer"):
            judge.load()
    else:
        assert score_safely(judge, videos(1)).failures == {}


def test_a_silent_server_is_asked_again_after_the_time_of_a_request(server: Busy) -> None:
    def reply(request: dict[str, Any]) -> object:
        if len(server.requests) == 1:
            server.go.wait(WAIT_S)
        return GOOD

    server.reply = reply
    judge = server.judge(frames=1, retries=1, request_timeout_s=1.5)
    assert score_safely(judge, videos(1)).failures == {}
    assert len(server.requests) == 2


def test_media_are_made_ready_beside_the_requests(
    server: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures that take long hold up no answer."""
    threads: list[str] = []
    shown = VlmJudge.shown

    def noted(self: VlmJudge, sample: RewardBatch) -> list[dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return shown(self, sample)

    monkeypatch.setattr(VlmJudge, "shown", noted)
    server.go.set()
    assert score_safely(server.judge(frames=1), videos(2)).failures == {}
    assert len(threads) == 2
    assert "remote rewards" not in threads


def test_score_connects_first(server: Busy) -> None:
    server.go.set()
    assert server.judge(frames=1).score(videos(1), WAIT_S).failures == {}


def test_a_list_of_models_that_drips_in_ends_the_run_in_time(server: Busy) -> None:
    """Each byte is in time for the client."""
    dripping = socket.create_server(("127.0.0.1", 0))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"

    def drip() -> None:
        connection, _ = dripping.accept()
        connection.recv(65536)
        with contextlib.suppress(OSError), connection:
            connection.sendall(head)
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    url = f"http://127.0.0.1:{dripping.getsockname()[1]}/v1"
    judge = server.judge(base_url=url, request_timeout_s=0.5)
    with dripping, pytest.raises(UserError, match=r"does not answer \(TimeoutError: timed out aft"):
        judge.load()


def test_an_answer_that_drips_in_has_no_longer(server: Busy) -> None:
    """Each byte is in time for the client; all of them are not."""
    judge = server.judge(request_timeout_s=WAIT_S)
    judge.load()
    judge.request_timeout_s = 0.1
    result = score_safely(judge, videos(1))
    assert result.failures == {0: "TimeoutError: timed out after 0.1 s"}


def test_an_answer_to_a_repeat_has_the_time_of_a_request(server: Busy) -> None:
    """The limit is that of all repeats together."""
    server.statuses = [500]

    def slow(request: dict[str, Any]) -> object:
        time.sleep(0.7)
        return GOOD

    server.reply = slow
    judge = server.judge(frames=1, retries=1, request_timeout_s=1.0)
    assert score_safely(judge, videos(1)).failures == {}
    assert len(server.requests) == 2


def test_a_score_does_not_depend_on_what_is_scored_with_it(server: Busy) -> None:
    """To the last digit, with criteria whose mean rounds."""
    names = [f"c{'abcdefgh'[i]}" for i in range(7)]

    def reply(request: dict[str, Any]) -> object:
        number = int(prompt_of(request).split("prompt ")[1].split("\n")[0])
        return completion(json.dumps({n: 1 + (number * 7 + i) % 5 for i, n in enumerate(names)}))

    server.reply = reply
    judge = server.judge(criteria=dict.fromkeys(names, "?"), frames=1, highest=6)
    batch = videos(40)
    together = score_safely(judge, batch).scores
    assert together.tolist() == [
        score_safely(judge, batch.row(row)).scores.item() for row in range(40)
    ]


ENDS = """
import sys
from tests.rewards.test_vlm_judge import videos
from workflow_rl.rewards.pending import ArrivingScores
from workflow_rl.rewards.registry import RewardTerm
from workflow_rl.rewards.vlm_judge import VlmJudge
judge = VlmJudge(model="m", base_url=sys.argv[1], method="average", concurrency=2)
arriving = ArrivingScores([RewardTerm(judge)], {"i2v": 1})
arriving.add("i2v", videos(6))
print("asked", flush=True)
sys.stdin.readline()
try:
    raise KeyboardInterrupt
finally:
    if len(sys.argv) > 2:
        arriving.cancel()
"""


@pytest.mark.parametrize("cancels", [[], ["cancel"]])
def test_what_hangs_keeps_no_run_from_ending(server: Busy, cancels: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, server.url, *cancels],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asked\n"
    server.wait_for(2)
    _, said = process.communicate("go\n", timeout=10)
    assert said.splitlines()[-1] == "KeyboardInterrupt"
    assert said.count("Traceback") == 1
