"""The judge speaks to a real HTTP server, and only a proper answer is a score."""

import base64
import contextlib
import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from PIL import Image

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.judge_answers import Token, expected_labels, parse_answer
from workflow_rl.rewards.vlm_judge import VlmJudge

Reply = Callable[[dict[str, Any]], object]
ONE = {"quality": "Is it good?"}


class ManyConnections(ThreadingHTTPServer):
    """Takes as many connections at once as the judge makes; with the default of 5, some break."""

    request_queue_size = 128


class Server:
    """A server that speaks the API; ``reply`` makes the body of each answer."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.statuses: list[int] = []
        self.models_status = 200
        self.reply: Reply = lambda request: completion('{"quality": 4}')
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(outer.models_status, {"object": "list", "data": []})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(body)
                outer.keys.append(self.headers["Authorization"])
                status = outer.statuses.pop(0) if outer.statuses else 200
                self._answer(status, outer.reply(body))

            def _answer(self, status: int, body: object) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "1")
                length = len(data) + (100 if body == b"half" else 0)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the client gave up
                    self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ManyConnections(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self.http.shutdown()
        self.http.server_close()

    def judge(self, **options: Any) -> VlmJudge:
        settings: dict[str, Any] = {
            "model": "m",
            "base_url": self.url,
            "criteria": ONE,
            "method": "average",
            "samples": 1,
            "retries": 0,
        }
        return VlmJudge(**settings | options)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def completion(*answers: object, tokens: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A reply with these answers."""
    choices = [
        {
            "index": index,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": answer},
            "logprobs": {"content": tokens} if tokens else None,
        }
        for index, answer in enumerate(answers)
    ]
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": choices}


def token(text: str, **alternatives: float) -> dict[str, Any]:
    """A token with the probabilities of ``d4`` for "4", ``s4`` for " 4" and ``x`` for a word."""
    spelt = {"d": "", "s": " "}
    others = [
        {"token": spelt[name[0]] + name[1] if name[0] in spelt else name, "logprob": math.log(p)}
        for name, p in alternatives.items()
    ]
    return {"token": text, "logprob": 0.0, "top_logprobs": others}


def videos(size: int = 2) -> RewardBatch:
    media = torch.rand(size, 3, 9, 16, 24, generator=torch.Generator().manual_seed(0))
    ids = [str(i) for i in range(size)]
    return RewardBatch([f"prompt {i}" for i in ids], ids, media, "video", 8.0)


def prompt_of(request: dict[str, Any]) -> str:
    text: str = request["messages"][1]["content"][0]["text"]
    return text


def assert_failed(result: RewardScores, words: str) -> None:
    assert result.scores.isnan().all()
    assert all(words in reason for reason in result.failures.values()), result.failures


def test_the_judge_is_asked_with_rubric_prompt_frames_and_schema(server: Server) -> None:
    result = score_safely(server.judge(frames=3, max_side=12, extra_body={"top_k": 1}), videos(1))
    assert result.scores.tolist() == [0.75]  # 4 of 1 to 5
    assert result.components["quality"].tolist() == [0.75]
    (request,) = server.requests
    system, user = request["messages"]
    assert "quality: Is it good?" in system["content"]
    assert "from 1 (worst) to 5 (best)" in system["content"]
    assert "prompt 0" in user["content"][0]["text"]
    urls = [part["image_url"]["url"] for part in user["content"][1:]]
    frames = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    assert [frame.size for frame in frames] == [(12, 8)] * 3
    schema = request["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["properties"]["quality"]["enum"] == [1, 2, 3, 4, 5]
    assert request["top_k"] == 1
    assert request["seed"] == 0


def test_the_frames_are_the_first_the_last_and_between(server: Server) -> None:
    ramp = torch.linspace(0, 1, 9).view(1, 1, 9, 1, 1).expand(1, 3, 9, 16, 24)
    score_safely(server.judge(frames=3), RewardBatch(["p"], ["0"], ramp, "video"))
    urls = [p["image_url"]["url"] for p in server.requests[0]["messages"][1]["content"][1:]]
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
    pixels = [image.convert("L").getpixel((0, 0)) for image in images]
    assert pixels == pytest.approx([0, 128, 255], abs=2)


def test_answers_are_averaged_and_go_to_their_own_samples(server: Server) -> None:
    def reply(request: dict[str, Any]) -> object:
        first = "prompt 0" in prompt_of(request)
        time.sleep(0.05 if first else 0)
        grades = [1, 2] if first else [5, 4]
        return completion(*(json.dumps({"quality": grade}) for grade in grades))

    server.reply = reply
    result = score_safely(server.judge(samples=2), videos())
    assert result.scores.tolist() == [0.125, 0.875]
    assert server.requests[0]["n"] == 2


def test_the_expected_grade_is_read_from_the_token_probabilities(server: Server) -> None:
    server.reply = lambda request: completion(
        '{"quality": 4}',
        tokens=[token('{"quality":'), token(" 4", d4=0.4, s4=0.2, s5=0.2, word=0.2), token("}")],
    )
    result = score_safely(server.judge(method="logprob"), videos(1))
    expected = (0.6 * 4 + 0.2 * 5) / 0.8
    assert result.scores.item() == pytest.approx((expected - 1) / 4)
    assert server.requests[0]["logprobs"] is True
    assert server.requests[0]["temperature"] == 0


def test_several_criteria_are_logged_apart_and_their_mean_is_the_score(server: Server) -> None:
    server.reply = lambda request: completion('{"motion": 5, "quality": 2}')
    result = score_safely(server.judge(criteria=ONE | {"motion": "Does it move?"}), videos(1))
    assert result.components["quality"].item() == 0.25
    assert result.components["motion"].item() == 1.0
    assert result.scores.item() == 0.625


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("The video is great, 5/5!", "did not answer"),
        ('{"quality": 6}', "none of"),
        ('{"quality": "4"}', "none of"),
        ('{"quality": 4.0}', "none of"),
        ('{"quality": true}', "none of"),
        ('{"quality": NaN}', "none of"),
        ('{"quality": null}', "none of"),
        ('{"other": 4}', "did not answer"),
        ("4", "did not answer"),
        (None, "did not answer"),
        ("", "did not answer"),
    ],
)
def test_an_answer_of_another_form_fails(server: Server, answer: object, words: str) -> None:
    server.reply = lambda request: completion(answer)
    assert_failed(score_safely(server.judge(), videos(1)), words)


def test_prose_for_one_sample_fails_that_one(server: Server) -> None:
    server.reply = lambda request: completion(
        "lovely" if "prompt 17" in prompt_of(request) else '{"quality": 3}'
    )
    result = score_safely(server.judge(frames=1), videos(64))
    assert set(result.failures) == {17}, result.failures
    assert result.scores.isnan().nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize(
    "body", [b"half", b"not json", {}, [], {"choices": []}, {"choices": None}, {"choices": "x"}]
)
def test_a_reply_that_is_no_completion_fails(server: Server, body: object) -> None:
    server.reply = lambda request: body
    assert_failed(score_safely(server.judge(), videos(1)), "")


def test_fewer_answers_than_asked_for_fail(server: Server) -> None:
    assert_failed(
        score_safely(server.judge(samples=3), videos(1)),
        "1 of 3 answers: where its server knows no n, use samples 1",
    )


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again_and_one_that_stays_so_fails(
    server: Server, status: int
) -> None:
    server.statuses = [status, status]
    assert score_safely(server.judge(retries=2), videos(1)).scores.tolist() == [0.75]
    server.statuses = [status] * 3
    assert_failed(score_safely(server.judge(retries=2), videos(1)), str(status))
    assert len(server.requests) == 6


def test_a_slow_server_fails_in_time(server: Server) -> None:
    released = threading.Event()

    def hang(request: dict[str, Any]) -> object:
        released.wait(30)
        return completion('{"quality": 4}')

    server.reply = hang
    judge = server.judge(request_timeout_s=0.2)
    judge.load()
    begin = time.monotonic()
    try:
        assert_failed(score_safely(judge, videos(2)), "timed out")
        assert time.monotonic() - begin < 15
    finally:
        released.set()


def test_one_answer_that_does_not_come_fails_alone(server: Server) -> None:
    """The others are kept, and its place is taken by the next."""
    released = threading.Event()

    def hang(request: dict[str, Any]) -> object:
        if "prompt 3" in prompt_of(request):
            released.wait(30)
        return completion('{"quality": 3}')

    server.reply = hang
    try:
        result = score_safely(
            server.judge(frames=1, concurrency=1, request_timeout_s=1.0), videos(8)
        )
        assert list(result.failures) == [3]
    finally:
        released.set()


@pytest.mark.parametrize("tokens", [None, [token('{"quality": 4}')]])
def test_without_probabilities_the_expected_grade_fails(
    server: Server, tokens: list[dict[str, Any]] | None
) -> None:
    server.reply = lambda request: completion('{"quality": 4}', tokens=tokens)
    assert_failed(score_safely(server.judge(method="logprob"), videos(1)), "probabilit")


def test_a_judge_that_is_not_there_ends_the_run(server: Server) -> None:
    with pytest.raises(UserError, match="does not answer"):
        server.judge(base_url="http://127.0.0.1:9/v1").load()
    for status in (401, 403):
        server.models_status = status
        with pytest.raises(UserError, match="refuses the key in OPENAI_API_KEY"):
            server.judge().load()
    server.models_status = 404  # lists no models
    assert score_safely(server.judge(), videos(1)).failures == {}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"criteria": {}}, "one or more"),
        ({"criteria": {"Two words": "?"}}, "small letters"),
        ({"method": "median"}, "logprob or average"),
        ({"highest": 10}, "single digits"),
        ({"lowest": 5}, "low to high"),
        ({"frames": 0}, "frames is 0: give a whole number of 1 or more"),
        ({"frames": 2.5}, "frames is 2.5: give a whole number"),
        ({"samples": "3"}, "samples is '3'"),
        ({"max_side": 0}, "max_side is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"retries": -1}, "retries is -1: give a whole number of 0 or more"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0: give seconds above 0"),
        ({"request_timeout_s": math.inf}, "request_timeout_s is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"lowest": "1"}, "grades go from '1' to 5"),
        ({"criteria": ["quality"]}, "give a mapping of names to questions"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        VlmJudge(**{"model": "m"} | options)


def test_a_judge_without_a_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"args\.model"):
        VlmJudge().load()


def test_each_criterion_is_read_at_its_own_token_wherever_the_tokens_are_split() -> None:
    def certain(grade: int) -> list[tuple[str, float]]:
        return [(f"{grade}", 0.0)]

    tokens = [
        Token('{"a', []),
        Token('":', []),
        Token("1", [("1", math.log(0.5)), ("3", math.log(0.5))]),
        Token(', "b": ', []),
        Token("5}", certain(5)),
    ]
    assert expected_labels(tokens, ["a", "b"], range(1, 6)) == {"a": 2.0, "b": 5.0}


def test_a_criterion_with_two_labels_is_no_answer() -> None:
    with pytest.raises(ValueError, match="did not answer with a but"):
        parse_answer('{"a": 1, "a": 5}', ["a"], range(1, 6))


def test_labels_with_little_of_the_probability_are_no_answer() -> None:
    tokens = [Token('{"a":', []), Token("1", [("1", math.log(0.4)), ("The", math.log(0.6))])]
    with pytest.raises(ValueError, match=r"only 0\.40"):
        expected_labels([*tokens, Token("}", [])], ["a"], range(1, 6))


def test_digits_that_are_no_grades_do_not_count() -> None:
    place = Token("4", [("4", math.log(0.6)), ("9", math.log(0.2)), ("44", math.log(0.2))])
    tokens = [Token('{"a":', []), place, Token("}", [])]
    assert expected_labels(tokens, ["a"], range(1, 6)) == {"a": pytest.approx(4.0)}
    assert parse_answer('{"a": 4}', ["a"], range(1, 6)) == {"a": 4.0}
