"""Whatever a server does, a sample has its own score or has failed, with the cause."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.rewards.remote.conftest import Videos
from tests.rewards.remote.faulty_server import DRIP, HALF, FaultyServer, Results, free_port, mean_of
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.remote import client
from workflow_rl.rewards.remote.client import ServerReward


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)


def test_scores_are_those_in_process(server: FaultyServer, videos: Videos) -> None:
    batch = videos(19)
    result = score_safely(server.reward(media="float32", batch_size=8), batch)
    assert torch.equal(result.scores, mean_of(batch.media))
    assert result.failures == {}
    assert [len(request["samples"]) for request in server.requests] in (
        [8, 8, 3],
        [8, 3, 8],
        [3, 8, 8],
    )


def test_png_rounds_to_8_bits_and_no_further(server: FaultyServer, videos: Videos) -> None:
    batch = videos(3)
    rounded = (batch.media * 255).round() / 255
    assert torch.equal(score_safely(server.reward(), batch).scores, mean_of(rounded))


def test_an_answer_in_another_order_is_matched_by_id(server: FaultyServer, videos: Videos) -> None:
    server.reply = lambda results: results[::-1]
    batch = videos(8)
    result = score_safely(server.reward(media="float32"), batch)
    assert torch.equal(result.scores, mean_of(batch.media))


def test_samples_with_one_id_keep_their_own_scores(server: FaultyServer, videos: Videos) -> None:
    server.reply = lambda results: results[::-1]
    media = videos(4).media
    batch = RewardBatch(["p"] * 4, ["a", "a", "a#2", "a"], media, "video")
    result = score_safely(server.reward(media="float32"), batch)
    assert torch.equal(result.scores, mean_of(media))


def _with_score(score: object) -> Callable[[Results], object]:
    return lambda results: [results[0] | {"score": score}, *results[1:]]


ONE_SAMPLE = {
    "nan": (_with_score(math.nan), "score is nan, not a finite float32"),
    "infinite": (_with_score(1e39), "score is 1e+39, not a finite float32"),
    "text": (_with_score("0.5"), "score is a str, not a number"),
    "true": (_with_score(True), "score is a bool, not a number"),
    "null": (_with_score(None), "score is a NoneType, not a number"),
    "list": (_with_score([0.5]), "score is a list, not a number"),
    "too few": (lambda results: results[1:], "has nothing for this sample"),
    "twice": (lambda results: [*results, results[0]], "has this sample twice"),
    "failed": (lambda results: [{"id": "s0", "failure": "too\ndark"}, *results[1:]], "too dark"),
}


@pytest.mark.parametrize("fault", ONE_SAMPLE)
def test_a_fault_in_one_score_fails_that_sample(
    server: FaultyServer, videos: Videos, fault: str
) -> None:
    server.reply, words = ONE_SAMPLE[fault]
    batch = videos(4)
    result = score_safely(server.reward(media="float32"), batch)
    assert list(result.failures) == [0]
    assert words in result.failures[0]
    assert result.scores[0].isnan()
    assert torch.equal(result.scores[1:], mean_of(batch.media)[1:])


WHOLE_REQUEST = {
    "500": (lambda results: 500, "the server answered 500"),
    "400": (lambda results: 400, "the server answered 400"),
    "half": (lambda results: HALF, "the connection broke off"),
    "prose": (lambda results: b"lovely videos, 9/10", "the server's answer is not JSON"),
    "numbers": (lambda results: b"[0.5, 0.5]", "a list, not a JSON object"),
    "other": (lambda results: b'{"protocol": 2, "results": []}', "no results of this protocol"),
    "empty": (lambda results: [], "has nothing for this sample"),
    "strangers": (lambda results: [{"id": "x", "score": 1.0}], "has nothing for this sample"),
}


@pytest.mark.parametrize("fault", WHOLE_REQUEST)
def test_a_fault_in_an_answer_fails_its_samples(
    server: FaultyServer, videos: Videos, fault: str
) -> None:
    server.reply, words = WHOLE_REQUEST[fault]
    result = score_safely(server.reward(), videos(4))
    assert result.scores.isnan().all()
    assert len(result.failures) == 4
    assert all(words in reason for reason in result.failures.values()), result.failures


@pytest.mark.parametrize("fault", ["503", "broken", "slow"])
def test_what_may_pass_is_asked_again(server: FaultyServer, videos: Videos, fault: str) -> None:
    def reply(results: Results) -> object:
        if len(server.requests) > 2:
            return results
        if fault == "slow":
            server.ended.wait(1.0)
        return 503 if fault == "503" else HALF if fault == "broken" else results

    server.reply = reply
    batch = videos(2)
    limit = 0.3 if fault == "slow" else 5.0
    reward = server.reward(retries=2, media="float32", request_timeout_s=limit)
    assert torch.equal(score_safely(reward, batch).scores, mean_of(batch.media))
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_a_status_says_may_pass_is_asked_again(
    server: FaultyServer, videos: Videos, status: int
) -> None:
    server.reply = lambda results: results if len(server.requests) > 1 else status
    assert score_safely(server.reward(retries=1), videos(1)).failures == {}
    server.reply = lambda results: status
    result = score_safely(server.reward(retries=1), videos(1))
    assert result.failures == {0: f"the server answered {status}"}


@pytest.mark.parametrize("status", [301, 400, 404, 413, 422, 501])
def test_what_a_server_refuses_is_not_asked_again_and_is_told_in_its_words(
    server: FaultyServer, videos: Videos, status: int
) -> None:
    server.reply = lambda results: status  # its body says the same
    result = score_safely(server.reward(retries=3), videos(1))
    assert result.failures == {0: f"the server answered {status}: {status}"}
    assert len(server.requests) == 1


def test_an_answer_that_cannot_be_unpacked_fails_its_samples(
    server: FaultyServer, videos: Videos
) -> None:
    reward = server.reward()
    reward.load()
    server.headers = {"Content-Encoding": "gzip"}
    result = score_safely(reward, videos(2))
    assert set(result.failures.values()) == {"the server's answer cannot be read"}


def test_what_a_server_has_by_another_name_and_for_any_media_is_found(
    server: FaultyServer, videos: Videos
) -> None:
    """With args of its own, which a client that names none leaves to it."""
    server.health["rewards"]["mean"] = {"media_kind": "any", "args": {"power": 2}}
    reward = server.reward(name="brightness", reward="mean")
    assert score_safely(reward, videos(1)).failures == {}
    assert (reward.name, reward.media_kind) == ("brightness", "any")
    assert server.requests[0]["reward"] == "mean"


@pytest.mark.usefixtures("absent_proxy")
def test_no_proxy_of_the_environment_comes_between(server: FaultyServer, videos: Videos) -> None:
    assert score_safely(server.reward(), videos(1)).failures == {}


def test_a_server_that_refuses_or_says_its_health_a_byte_at_a_time_is_not_waited_for(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HEALTH_TIMEOUT_S", 0.3)
    for health, words in ((404, "answered 404"), (DRIP, "no answer from the server within 0.3 s")):
        server.health = health
        began = time.monotonic()
        with pytest.raises(UserError, match=words):
            server.reward(wait_s=60 if health == 404 else 0).load()
        assert time.monotonic() - began < 1.5


def test_the_server_s_fault_is_asked_again_and_the_client_s_is_not(
    server: FaultyServer, videos: Videos
) -> None:
    server.reply = lambda results: 500
    score_safely(server.reward(retries=3), videos(1))
    assert len(server.requests) == 4
    server.reply = lambda results: 422
    score_safely(server.reward(retries=3), videos(1))
    assert len(server.requests) == 5


def test_connections_are_used_again(server: FaultyServer, videos: Videos) -> None:
    reward = server.reward(batch_size=1, in_flight=2)
    for _ in range(2):
        assert score_safely(reward, videos(8)).failures == {}
    assert len(server.requests) == 16
    assert 1 <= server.connections <= 2


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that are waited between tries; nothing waits them."""
    seconds: list[float] = []
    sleep = asyncio.sleep

    async def note(delay: float, result: object = None) -> object:
        seconds.append(delay)
        return await sleep(0, result)

    monkeypatch.setattr(asyncio, "sleep", note)
    return seconds


def test_requests_that_fail_together_are_not_repeated_together(
    server: FaultyServer, videos: Videos, waits: list[float]
) -> None:
    server.reply = lambda results: 503
    score_safely(server.reward(batch_size=1, in_flight=8, retries=1), videos(8))
    assert len(set(waits)) == len(waits) == 8
    assert all(0 <= wait <= client.FIRST_WAIT_S for wait in waits)


@pytest.mark.parametrize(
    ("asked", "wait"), [("7", 7.0), ("0", 0.0), ("900", client.LONGEST_WAIT_S)]
)
def test_the_next_try_comes_when_the_server_asks_for_it(
    server: FaultyServer, videos: Videos, waits: list[float], asked: str, wait: float
) -> None:
    server.reply = lambda results: 429
    server.headers = {"Retry-After": asked}
    score_safely(server.reward(retries=3), videos(1))
    assert len(server.requests) == 4
    assert waits == [wait] * 3


def test_a_server_that_hangs_fails_in_the_time_of_a_request(
    server: FaultyServer, videos: Videos
) -> None:
    server.reply = server.hang
    result = score_safely(server.reward(request_timeout_s=0.2), videos(2))
    assert set(result.failures.values()) == {"no answer from the server within 0.2 s"}


def test_an_answer_that_comes_a_byte_at_a_time_has_no_longer(
    server: FaultyServer, videos: Videos
) -> None:
    server.reply = lambda results: DRIP
    result = score_safely(server.reward(request_timeout_s=0.4), videos(1))
    assert result.failures == {0: "no answer from the server within 0.4 s"}


def test_a_server_that_hangs_fails_in_the_time_of_the_term(
    server: FaultyServer, videos: Videos
) -> None:
    """What was answered in time keeps its scores."""
    batch = videos(4)
    server.reply = lambda results: results if results[0]["id"] == "s0" else server.hang(results)
    began = time.monotonic()
    reward = server.reward(batch_size=2, media="float32", retries=9)
    result = score_safely(reward, batch, timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert set(result.failures) == {2, 3}
    assert set(result.failures.values()) == {"timed out after 0.5 s"}
    assert torch.equal(result.scores[:2], mean_of(batch.media)[:2])


def test_no_more_than_in_flight_requests_are_made_at_a_time(
    server: FaultyServer, videos: Videos
) -> None:
    server.reply = server.slow
    result = score_safely(server.reward(batch_size=1, in_flight=3), videos(24))
    assert result.failures == {}
    assert max(server.at_once) == 3


def test_hundreds_of_requests_at_once_all_get_through(server: FaultyServer, videos: Videos) -> None:
    result = score_safely(server.reward(batch_size=1, in_flight=64), videos(256))
    assert result.failures == {}


def test_a_sample_that_is_not_finite_is_not_sent(server: FaultyServer, videos: Videos) -> None:
    batch = videos(4)
    batch.media[2, 0, 0, 0, 0] = math.inf
    result = score_safely(server.reward(), batch)
    assert result.failures == {2: "not finite"}
    assert [s["id"] for s in server.requests[0]["samples"]] == ["s0", "s1", "s3"]


def test_a_server_that_is_not_there_ends_the_run_before_it_begins() -> None:
    reward = ServerReward("http://127.0.0.1:9", name="mean", media_kind="video")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 cannot be used \(no connection"):
        reward.load()


def test_a_server_that_is_still_loading_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "POLL_S", 0.05)
    port = free_port()
    reward = ServerReward(f"http://127.0.0.1:{port}", name="mean", media_kind="any", wait_s=30)
    late: list[FaultyServer] = []
    timer = threading.Timer(0.3, lambda: late.append(FaultyServer(port)))
    timer.start()
    reward.load()
    timer.join()
    late[0].close()
    assert reward.media_kind == "video"
    assert len([record for record in caplog.records if "waiting 30 s" in record.message]) == 1


@pytest.mark.parametrize(
    ("health", "words"),
    [
        ({"status": "ok"}, "speaks no protocol 1"),
        ({"protocol": 2, "rewards": {"mean": {}}}, "speaks no protocol 1"),
        ({"protocol": 1, "rewards": {"mean": None}}, "speaks no protocol 1"),
        ([], "cannot be used"),
        ({"protocol": 1, "rewards": {"means": {}}}, "has no reward 'mean'.*'means'"),
        ({"protocol": 1, "rewards": {"mean": {"args": {"power": 2}}}}, "make them equal"),
        (500, "the server answered 500"),
    ],
)
def test_a_server_that_cannot_help_is_refused(
    server: FaultyServer, health: object, words: str
) -> None:
    server.health = health
    with pytest.raises(UserError, match=words):
        server.reward(args={"power": 3}).load()


def test_what_is_sent_is_plain_json(server: FaultyServer, videos: Videos) -> None:
    score_safely(server.reward(), videos(2, fps=None, groups=1))
    (request,) = server.requests
    media = [sample.pop("media") for sample in request["samples"]]
    assert json.dumps(request) == json.dumps(
        {
            "protocol": 1,
            "reward": "mean",
            "media_kind": "video",
            "fps": None,
            "samples": [
                {"id": name, "prompt": f"prompt {name}", "group": "g0"} for name in ("s0", "s1")
            ],
        }
    )
    assert [(one["format"], len(one["data"])) for one in media] == [("png", 3)] * 2
