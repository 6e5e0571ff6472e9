"""The pairwise judge: whoever wins in both places wins, and only proper answers count."""

import base64
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.rewards.test_vlm_judge import Server, completion, token
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.vlm_pairwise import PairwiseVlmJudge

ONE = {"quality": "Which is better?"}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def judge(server: Server, **options: Any) -> PairwiseVlmJudge:
    settings: dict[str, Any] = {
        "model": "m",
        "base_url": server.url,
        "criteria": ONE,
        "method": "average",
        "retries": 0,
    }
    return PairwiseVlmJudge(**settings | options)


def samples(*values: float) -> RewardBatch:
    media = torch.tensor(values).view(-1, 1, 1, 1).expand(len(values), 3, 8, 8)
    return RewardBatch(["a fox"] * len(values), [str(v) for v in values], media, "image")


def brightness(request: dict[str, Any]) -> list[int]:
    """Brightness of the pictures of a request, in order."""
    found = []
    for part in request["messages"][1]["content"]:
        if part["type"] == "image_url":
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            found.append(Image.open(io.BytesIO(data)).convert("L").getpixel((0, 0)))
    return found  # type: ignore[return-value]


def answers(choose: Callable[[int, int], int]) -> Callable[[dict[str, Any]], object]:
    def reply(request: dict[str, Any]) -> object:
        first, second = brightness(request)
        return completion(json.dumps(dict.fromkeys(ONE, choose(first, second))))

    return reply


def test_the_better_one_wins_in_whatever_order_it_is_shown(server: Server) -> None:
    server.reply = answers(lambda first, second: 1 if first > second else 2)
    result = score_safely(judge(server), samples(0.2, 0.8, 0.5))
    assert result.scores.tolist() == [0.0, 1.0, 0.5]
    assert result.components["quality"].tolist() == [0.0, 1.0, 0.5]
    assert len(server.requests) == 6
    orders = {tuple(brightness(request)) for request in server.requests}
    assert {order[::-1] for order in orders} == orders
    assert "a fox" in server.requests[0]["messages"][1]["content"][0]["text"]
    assert "quality: Which is better?" in server.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("ranking", ["win_rate", "bradley_terry"])
def test_a_judge_that_prefers_a_place_tells_nothing(
    server: Server, place: int, ranking: str
) -> None:
    server.reply = answers(lambda first, second: place)
    scores = score_safely(judge(server, ranking=ranking), samples(0.1, 0.3, 0.6, 0.9)).scores
    assert (scores == scores[0]).all()


def test_the_probability_of_the_first_is_read_from_the_tokens(server: Server) -> None:
    def reply(request: dict[str, Any]) -> object:
        first, second = brightness(request)
        share = 0.8 if first > second else 0.4  # of the first
        parts = [token('{"quality": '), token("1", d1=share, d2=1 - share), token("}")]
        return completion('{"quality": 1}', tokens=parts)

    server.reply = reply
    result = score_safely(judge(server, method="logprob"), samples(0.2, 0.8))
    assert result.scores.tolist() == pytest.approx([0.3, 0.7])  # (0.4 + 0.2) / 2, (0.8 + 0.6) / 2


def test_criteria_are_ranked_apart(server: Server) -> None:
    def reply(request: dict[str, Any]) -> object:
        brighter = 1 if brightness(request)[0] > brightness(request)[1] else 2
        return completion(json.dumps({"light": brighter, "dark": 3 - brighter}))

    server.reply = reply
    both = judge(server, criteria={"light": "?", "dark": "?"})
    result = score_safely(both, samples(0.2, 0.8))
    assert result.components["light"].tolist() == [0.0, 1.0]
    assert result.components["dark"].tolist() == [1.0, 0.0]
    assert result.scores.tolist() == [0.5, 0.5]


def test_prose_leaves_a_comparison_out_and_too_much_of_it_fails_the_sample(
    server: Server,
) -> None:
    dark, bright = 51, 204

    def reply(request: dict[str, Any]) -> object:
        pair = brightness(request)
        if min(abs(value - dark) for value in pair) < 5 and max(pair) < bright - 5:
            return completion("both are lovely")  # nothing is said of the darkest but with one
        return completion(json.dumps({"quality": 1 if pair[0] > pair[1] else 2}))

    server.reply = reply
    result = score_safely(judge(server), samples(0.2, 0.5, 0.6, 0.8))
    assert list(result.failures) == [0]
    assert "did not answer" in result.failures[0]
    assert result.components["quality"][0].isnan()
    assert result.scores[1:].tolist() == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize("place", [0, 1])
def test_one_answer_of_two_is_no_comparison_whichever_is_missing(
    server: Server, place: int
) -> None:
    def reply(request: dict[str, Any]) -> object:
        pair = brightness(request)
        if pair[place] == min(pair):
            return completion("both are lovely")
        return completion(json.dumps({"quality": 1 if pair[0] > pair[1] else 2}))

    server.reply = reply
    result = score_safely(judge(server), samples(0.2, 0.8))
    assert result.scores.isnan().all()
    for row in (0, 1):
        assert "fewer than half of its comparisons succeeded: Value" in result.failures[row]


def test_samples_of_two_groups_are_not_compared(server: Server) -> None:
    server.reply = answers(lambda first, second: 1 if first > second else 2)
    batch = replace(samples(0.2, 0.4, 0.6, 0.8), group_ids=["b", "a", "a", "b"])
    assert score_safely(judge(server), batch).scores.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert len(server.requests) == 4


def test_called_as_a_function_it_connects_first(server: Server) -> None:
    server.reply = answers(lambda first, second: 1 if first > second else 2)
    assert judge(server)(samples(0.2, 0.8)).scores.tolist() == [0.0, 1.0]


def test_every_setting_is_that_of_the_judge_that_it_asks() -> None:
    settings: dict[str, Any] = {
        "model": "m",
        "base_url": "http://there/v1",
        "method": "average",
        "samples": 3,
        "temperature": 0.25,
        "frames": 5,
        "max_side": 96,
        "rubric": "Which of {lowest} and {highest}?",
        "api_key_env": "MY_KEY",
        "retries": 7,
        "request_timeout_s": 1.5,
        "use_proxy": True,
        "extra_body": {"top_k": 1},
    }
    made = PairwiseVlmJudge(**settings, criteria=ONE, concurrency=3).judge
    assert {name: getattr(made, name) for name in settings} == settings
    assert made.criteria == ONE
    default = PairwiseVlmJudge(model="m").judge
    assert [q.split()[0] for q in default.criteria.values()] == ["Which"] * 3
    assert "You compare two" in default.rubric


def test_a_server_that_fails_fails_all_and_turns_nothing_into_a_score(server: Server) -> None:
    server.statuses = [500] * 6
    result = score_safely(judge(server), samples(0.2, 0.5, 0.8))
    assert result.scores.isnan().all()
    assert len(result.failures) == 3


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UserError, match="win_rate or bradley_terry"):
        PairwiseVlmJudge(model="m", ranking="elo")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="logprob or average"):
        PairwiseVlmJudge(model="m", method="x")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"needs args\.model"):
        PairwiseVlmJudge().load()
