"""The HTTP interface: what is refused, with what status, and what is counted."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn

from tests.rewards.remote.conftest import Videos
from tests.rewards.remote.test_queue import WAIT_S, Gated
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import score_safely
from workflow_rl.rewards.registry import RewardSpec, RewardTerm
from workflow_rl.rewards.remote.client import ServerReward
from workflow_rl.rewards.remote.protocol import encode_request, to_json
from workflow_rl.rewards.remote.server import (
    RewardService,
    ServerSettings,
    build_app,
    build_service,
    listen,
)

SETTINGS = ServerSettings(batch_size=4, wait_s=0.0, capacity=4, max_body=200_000)


class Served:
    """A service behind a socket, in a thread."""

    def __init__(
        self,
        reward: Gated,
        timeout_s: float | None = None,
        settings: ServerSettings = SETTINGS,
    ) -> None:
        term = RewardTerm(reward, weight=1.0, on=None, timeout_s=timeout_s)
        service = RewardService({"gated": term}, {"gated": {}}, settings)
        address = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{address.getsockname()[1]}"
        config = uvicorn.Config(build_app(service), log_level="critical")
        self.server = uvicorn.Server(config)
        options = {"sockets": [address]}
        self.thread = threading.Thread(target=self.server.run, kwargs=options, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def metric(self, client: httpx.Client, line: str) -> float:
        """The value of one line of ``/metrics``."""
        found = [t for t in client.get("/metrics").text.splitlines() if t.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


@pytest.fixture
def reward() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def served(reward: Gated) -> Iterator[Served]:
    made = Served(reward)
    yield made
    reward.gate.set()
    made.server.should_exit = True
    made.thread.join(WAIT_S)


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=WAIT_S) as client:
        yield client


def _wait_for_metric(served: Served, http: httpx.Client, line: str, value: float) -> None:
    deadline = time.monotonic() + WAIT_S
    while served.metric(http, line) != value and time.monotonic() < deadline:
        time.sleep(0.02)
    assert served.metric(http, line) == value


MALFORMED: list[dict[str, Any]] = [
    {"protocol": 2},
    {"reward": 7},
    {"media_kind": "sound"},
    {"fps": -1},
    {"fps": True},
    {"samples": []},
    {"samples": [{"id": "a", "prompt": "p", "media": {"format": "png", "data": ["!"]}}]},
    {"samples": [{"id": "a", "prompt": "p", "media": {"format": "png", "data": ["aaaa"]}}]},
    {"samples": [{"id": "a", "prompt": "p", "media": {"format": "mp4", "data": ["aaaa"]}}]},
    {"samples": [{"id": "a", "prompt": "p", "media": {"format": "gif", "data": ["aaaa"]}}]},
    {
        "samples": [
            {
                "id": "a",
                "prompt": "p",
                "media": {"format": "float32", "data": ["AAAA"], "shape": [3, 1, 10**9, 10**9]},
            }
        ]
    },
]


def test_a_request_that_breaks_the_protocol_is_refused_with_400(
    http: httpx.Client, served: Served, videos: Videos
) -> None:
    good = encode_request(videos(1), "gated", "png")
    for change in MALFORMED:
        answer = http.post("/score", json=good | change)
        assert answer.status_code == 400, change
        assert answer.json()["error"]
    for body in (b"", b"\x80\x04N.", b"[1]", b"[" * 100_000):
        assert http.post("/score", content=body).status_code == 400
    twice = good | {"samples": good["samples"] * 2}
    assert "one id" in http.post("/score", json=twice).json()["error"]
    refused = 'reward_server_failures_total{cause="malformed",reward=""}'
    assert served.metric(http, refused) == len(MALFORMED) + 5


def test_a_body_that_is_too_large_is_refused_with_413(http: httpx.Client) -> None:
    """Also one that does not say its length; one that just fits is read."""
    assert http.post("/score", content=b" " * 200_001).status_code == 413
    chunks = (b" " * 10_000 for _ in range(21))
    assert http.post("/score", content=chunks).status_code == 413
    for content in (b" " * 200_000, (b" " * 10_000 for _ in range(20))):
        assert http.post("/score", content=content).status_code == 400


def _connection(served: Served, length: int) -> socket.socket:
    """A connection on which a request of so many bytes has begun."""
    connection = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    connection.settimeout(WAIT_S)
    connection.sendall(
        f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    return connection


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(served: Served) -> None:
    with _connection(served, 10**12) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_request_that_breaks_off_is_counted_and_harms_nothing(
    http: httpx.Client, served: Served
) -> None:
    with _connection(served, 100) as connection:
        connection.sendall(b'{"protocol":')
    _wait_for_metric(served, http, 'reward_server_failures_total{cause="broke off",reward=""}', 1.0)
    assert http.get("/health").status_code == 200


def test_requests_samples_batches_and_reasons_are_counted(
    http: httpx.Client, served: Served, reward: Gated, videos: Videos
) -> None:
    reward.gate.set()
    body = encode_request(replace(videos(3), prompts=["p", "raise", "p"]), "gated", "png")
    first, second, third = http.post("/score", json=body).json()["results"]
    assert second["failure"] == "RuntimeError: no face found"
    assert "score" in first
    assert "score" in third
    label = 'reward="gated"'
    wanted = {
        f'requests_total{{{label},status="200"}}': 1,
        f"samples_total{{{label}}}": 3,
        f'failures_total{{cause="RuntimeError",{label}}}': 1,
        f"request_seconds_count{{{label}}}": 1,
        f"batch_samples_count{{{label}}}": 1,
        f"batch_samples_sum{{{label}}}": 3,
        f"batch_seconds_count{{{label}}}": 1,
        f"queue_samples{{{label}}}": 0,
    }
    found = {name: served.metric(http, f"reward_server_{name}") for name in wanted}
    assert found == wanted


def test_what_waits_is_joined_to_batches_of_the_servers_size(reward: Gated, videos: Videos) -> None:
    """Four samples that wait are two batches, after that of the one that is being scored."""
    served = Served(reward, settings=replace(SETTINGS, batch_size=2))
    client = ServerReward(served.url, name="gated", media_kind="video", batch_size=1, in_flight=8)
    client.load()
    futures = [client.submit(videos(1))]
    assert reward.entered.acquire(timeout=WAIT_S)
    futures += [client.submit(videos(1)) for _ in range(4)]
    with httpx.Client(base_url=served.url, trust_env=False, timeout=WAIT_S) as http:
        _wait_for_metric(served, http, 'reward_server_queue_samples{reward="gated"}', 4.0)
        reward.gate.set()
        assert all(future.result(WAIT_S).failures == {} for future in futures)
        assert served.metric(http, 'reward_server_batch_samples_count{reward="gated"}') == 3
    served.server.should_exit = True


def test_a_reward_that_can_no_longer_load_is_an_error_of_the_server(videos: Videos) -> None:
    class Unready(Gated):
        def load(self) -> None:
            raise UserError("there is no licence")

    served = Served(Unready())
    with httpx.Client(base_url=served.url, trust_env=False, timeout=WAIT_S) as client:
        answer = client.post("/score", json=encode_request(videos(1), "gated", "png"))
    served.server.should_exit = True
    assert answer.status_code == 500
    assert answer.json() == {"error": "UserError: there is no licence"}


def test_the_time_limit_of_an_entry_is_that_of_its_batches(reward: Gated, videos: Videos) -> None:
    served = Served(reward, timeout_s=0.2)
    with httpx.Client(base_url=served.url, trust_env=False, timeout=WAIT_S) as client:
        answer = client.post("/score", json=encode_request(videos(2), "gated", "png")).json()
    served.server.should_exit = True
    assert [r["failure"] for r in answer["results"]] == ["timed out after 0.2 s"] * 2


def test_a_server_computes_what_its_configuration_has_clients_ask_for() -> None:
    """Two of one name have two labels, and each says its arguments."""
    entries = [
        RewardSpec(name="constant", args={"value": 1.0}, server={"url": "http://elsewhere"}),
        RewardSpec(name="constant", args={"value": 2.0}),
        RewardSpec(name="frame_change"),
    ]
    assert build_service(entries, SETTINGS).health()["rewards"] == {
        "constant": {"media_kind": "any", "args": {"value": 1.0}},
        "constant#2": {"media_kind": "any", "args": {"value": 2.0}},
        "frame_change": {"media_kind": "video", "args": {}},
    }


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:70000"):
        listen("127.0.0.1", 70000)


def test_a_full_queue_answers_503_and_when_to_come_again(
    http: httpx.Client, served: Served, reward: Gated, videos: Videos
) -> None:
    client = ServerReward(served.url, name="gated", media_kind="video", batch_size=4)
    client.load()
    futures = [client.submit(videos(4))]
    assert reward.entered.acquire(timeout=WAIT_S)
    futures.append(client.submit(videos(4)))
    waiting = 'reward_server_queue_samples{reward="gated"}'
    _wait_for_metric(served, http, waiting, 4.0)
    answer = http.post("/score", content=to_json(encode_request(videos(1), "gated", "png")))
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    reward.gate.set()
    assert all(future.result(WAIT_S).failures == {} for future in futures)


def test_a_client_that_comes_too_early_is_served_when_there_is_room(
    http: httpx.Client, served: Served, reward: Gated, videos: Videos
) -> None:
    """More than the queue holds gets through, by repeats alone."""
    threading.Timer(0.3, reward.gate.set).start()
    client = ServerReward(served.url, name="gated", media_kind="video", batch_size=4, in_flight=8)
    assert score_safely(client, videos(32)).failures == {}
    assert served.metric(http, 'reward_server_samples_total{reward="gated"}') == 32
    assert served.metric(http, 'reward_server_requests_total{reward="gated",status="503"}') > 0


def test_what_a_client_that_left_asked_for_is_not_scored(
    http: httpx.Client, served: Served, reward: Gated, videos: Videos
) -> None:
    client = ServerReward(served.url, name="gated", media_kind="video", batch_size=4)
    client.load()
    busy = client.submit(videos(1))
    assert reward.entered.acquire(timeout=WAIT_S)
    gone = client.submit(videos(3))
    waiting = 'reward_server_queue_samples{reward="gated"}'
    _wait_for_metric(served, http, waiting, 3.0)
    gone.cancel()
    left = 'reward_server_failures_total{cause="client gone",reward="gated"}'
    _wait_for_metric(served, http, left, 1.0)
    reward.gate.set()
    assert busy.result(WAIT_S).failures == {}
    _wait_for_metric(served, http, waiting, 0.0)
    assert [len(call) for call in reward.calls] == [1]
