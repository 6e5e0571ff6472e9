"""Whatever a reward does, a failure is a failure and a score is a finite number."""

import math
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from workflow_rl.rewards.base import (
    AcceptedKind,
    MediaKind,
    RewardBatch,
    RewardScores,
    score_safely,
    scores_from_raw,
)


class FunctionReward:
    """A reward made of a function of the batch."""

    name = "function"
    media_kind: AcceptedKind = "video"

    def __init__(self, function: Callable[[RewardBatch], object]) -> None:
        self.function = function

    def __call__(self, batch: RewardBatch) -> RewardScores:
        return self.function(batch)  # type: ignore[return-value]  # some return nonsense


def make_batch(size: int = 4, kind: MediaKind = "video") -> RewardBatch:
    """Black media with ids s0, s1, ..."""
    shape = (size, 3, 2, 4, 4) if kind == "video" else (size, 3, 4, 4)
    ids = [f"s{i}" for i in range(size)]
    return RewardBatch(["p"] * size, ids, torch.zeros(shape), kind, fps=8.0)


def numbers(batch: RewardBatch) -> RewardScores:
    """Score each sample the number in its id."""
    return RewardScores(torch.tensor([float(sample_id[1:]) for sample_id in batch.sample_ids]))


def assert_failed(result: RewardScores, rows: list[int], reason: str) -> None:
    """Exactly these rows failed, for this reason, and have NaN."""
    assert sorted(result.failures) == rows
    assert result.scores.isnan().nonzero().flatten().tolist() == rows
    assert all(reason in result.failures[row] for row in rows)


def test_good_scores_come_through_as_they_are() -> None:
    result = score_safely(FunctionReward(numbers), make_batch())
    assert result.scores.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert result.scores.dtype == torch.float32
    assert result.failures == {}


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_one_bad_sample_of_64_fails_alone(timeout_s: float | None) -> None:
    def picky(batch: RewardBatch) -> RewardScores:
        if "s17" in batch.sample_ids:
            raise ZeroDivisionError("bad\nvideo")
        scores = numbers(batch)
        return RewardScores(scores.scores, components={"part": scores.scores * 2})

    result = score_safely(FunctionReward(picky), make_batch(64), timeout_s)
    assert_failed(result, [17], "ZeroDivisionError: bad video")
    assert result.scores[18] == 18
    assert result.components["part"][18] == 36
    assert result.components["part"][17].isnan()


def test_a_reward_that_always_raises_fails_every_sample() -> None:
    def broken(batch: RewardBatch) -> RewardScores:
        raise RuntimeError("no weights")

    result = score_safely(FunctionReward(broken), make_batch())
    assert_failed(result, [0, 1, 2, 3], "RuntimeError: no weights")
    assert set(result.failures.values()) == {"RuntimeError: no weights"}


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_a_reward_that_ends_its_program_fails_its_sample(timeout_s: float | None) -> None:
    def ends(batch: RewardBatch) -> RewardScores:
        if "s1" in batch.sample_ids:
            sys.exit("no licence")
        return numbers(batch)

    result = score_safely(FunctionReward(ends), make_batch(), timeout_s)
    assert_failed(result, [1], "SystemExit: no licence")


def test_a_reward_that_hangs_times_out_and_lets_the_run_go_on() -> None:
    release = threading.Event()

    def hang(batch: RewardBatch) -> RewardScores:
        release.wait(30)
        return numbers(batch)

    started = time.monotonic()
    result = score_safely(FunctionReward(hang), make_batch(), timeout_s=0.05)
    release.set()
    assert time.monotonic() - started < 5
    assert_failed(result, [0, 1, 2, 3], "timed out after 0.05 s")


def test_a_sample_that_hangs_alone_leaves_the_scores_before_it() -> None:
    release = threading.Event()

    def hang_at_two(batch: RewardBatch) -> RewardScores:
        if len(batch) > 1:
            raise RuntimeError("try one by one")
        if batch.sample_ids[0] == "s2":
            release.wait(30)
        return numbers(batch)

    result = score_safely(FunctionReward(hang_at_two), make_batch(), timeout_s=1.5)
    release.set()
    assert_failed(result, [2, 3], "timed out after 1.5 s")
    assert result.scores[:2].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_failed(value: float) -> None:
    reward = FunctionReward(lambda batch: RewardScores(torch.tensor([1.0, value, 2.0, 0.0])))
    assert_failed(score_safely(reward, make_batch()), [1], "returned")


def test_a_failure_named_by_the_reward_is_nan_whatever_its_score() -> None:
    reward = FunctionReward(lambda batch: RewardScores(torch.zeros(4), {2: "no face"}))
    assert_failed(score_safely(reward, make_batch()), [2], "no face")


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (RewardScores(torch.zeros(3)), "shape (3,) for 4 samples"),
        (RewardScores(torch.zeros(4, 1)), "shape (4, 1) for 4 samples"),
        (RewardScores([0.0] * 4), "no tensor"),  # type: ignore[arg-type]
        (RewardScores(torch.zeros(4), {9: "?"}), "named failed samples [9] of 4"),
        (RewardScores(torch.zeros(4), components={"part": torch.zeros(2)}), "component 'part'"),
        (RewardScores(torch.zeros(4), components={"part": [0.0] * 4}), ""),  # type: ignore[dict-item]
        (RewardScores(torch.zeros(4), None), ""),  # type: ignore[arg-type]
        ([0.0] * 4, "returned list, not RewardScores"),
        (None, "returned NoneType"),
    ],
)
def test_nonsense_is_a_failure_of_all(returned: object, reason: str) -> None:
    result = score_safely(FunctionReward(lambda batch: returned), make_batch())
    assert_failed(result, [0, 1, 2, 3], reason)


def test_media_of_another_kind_are_not_scored() -> None:
    result = score_safely(FunctionReward(numbers), make_batch(2, "image"))
    assert_failed(result, [0, 1], "scores videos, was given images")


@pytest.mark.parametrize("timeout_s", [None, 10.0])
def test_rewards_run_without_gradients(timeout_s: float | None) -> None:
    def grad_mode(batch: RewardBatch) -> RewardScores:
        return RewardScores(torch.full((len(batch),), float(torch.is_grad_enabled())))

    result = score_safely(FunctionReward(grad_mode), make_batch(), timeout_s)
    assert result.scores.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "raw",
    [
        [0.0, 1, 2.5, True],
        (0.0, 1.0, 2.5, 1.0),
        np.array([0.0, 1.0, 2.5, 1.0]),
        torch.tensor([0.0, 1.0, 2.5, 1.0], requires_grad=True),
        [np.float32(0), np.int64(1), torch.tensor(2.5), torch.tensor([1.0])],
    ],
)
def test_every_usual_sequence_of_numbers_is_understood(raw: object) -> None:
    result = scores_from_raw(raw, 4)
    assert result.scores.tolist() == [0.0, 1.0, 2.5, 1.0]
    assert result.failures == {}


@pytest.mark.parametrize(
    ("raw", "rows", "reason"),
    [
        ([1.0, None, 2.0], [1], "returned None for this sample: return a number to score it"),
        ([None, None, None], [0, 1, 2], "returned None for this sample: return a number"),
        (None, [0, 1, 2], "returned None, not a sequence of numbers: return a list with one for"),
        ([1.0, "0.5", 2.0], [1], "str, not a number"),
        ([1.0, math.nan, 2.0], [1], "returned nan"),
        ([1.0, 1e300, 2.0], [1], "not a finite float32"),
        ([1.0, 10**400, 2.0], [1], "not a finite float32"),
        ([1.0, 2.0], [0, 1, 2], "2 scores for 3 samples"),
        ("0.5", [0, 1, 2], "str, not a sequence"),
        (0.5, [0, 1, 2], "float, not a sequence"),
        (torch.tensor(0.5), [0, 1, 2], "Tensor, not a sequence"),
        (torch.zeros(3, 1), [0, 1, 2], "list, not a number"),
        ({}, [0, 1, 2], "empty mapping"),
        ({"a": [1, 2, 3], "b": [1, None, 3]}, [1], "'b': returned None for this sample"),
        ({"a": [1, 2, 3], "b": [1]}, [0, 1, 2], "'b': returned 1 scores"),
    ],
)
def test_what_is_no_number_never_becomes_a_score(raw: object, rows: list[int], reason: str) -> None:
    assert_failed(scores_from_raw(raw, 3), rows, reason)


def test_a_mapping_is_summed_and_its_entries_are_the_components() -> None:
    result = scores_from_raw({"a": [1.0, 2.0], "b": [10.0, None]}, 2)
    assert result.scores[0] == 11.0
    assert result.components["a"].tolist() == [1.0, 2.0]
    assert result.components["b"][0] == 10.0
    assert result.components["b"][1].isnan()


@pytest.mark.parametrize("media", [torch.zeros(2, 3, 4, 4), torch.zeros(3, 3, 2, 4, 4)])
def test_a_batch_that_does_not_fit_together_is_refused(media: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"axes|samples"):
        RewardBatch(["p", "p"], ["a", "b"], media, "video")
