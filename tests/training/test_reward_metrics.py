"""Each reward is logged apart, under the same keys whatever happened."""

import math

import torch

from workflow_rl.rewards.composite import TreeScores
from workflow_rl.training.reward_metrics import contribution_metrics, reward_metrics

NAN = math.nan


def test_mean_spread_and_failures_of_each_reward() -> None:
    total = torch.tensor([1.0, 3.0, NAN])
    scores = TreeScores(
        total,
        {2: "b: late"},
        {"a": torch.tensor([1.0, 2.0, 3.0]), "a/part": total, "b": torch.tensor([5.0, 5.0, NAN])},
        {"a": {}, "b": {2: "late"}},
    )
    metrics = reward_metrics(scores, list(scores.components))
    assert metrics["reward_mean"] == 2.0
    assert metrics["reward_std"] == 1.0
    assert metrics["reward_failed"] == 1.0
    assert metrics["reward/a"] == 2.0
    assert metrics["reward_std/a"] == math.sqrt(2 / 3)
    assert (metrics["reward_failed/a"], metrics["reward_failed/b"]) == (0.0, 1.0)
    assert (metrics["reward/b"], metrics["reward_std/b"]) == (5.0, 0.0)
    assert (metrics["reward/a/part"], metrics["reward_std/a/part"]) == (2.0, 1.0)


def test_what_was_logged_once_always_is() -> None:
    whole = TreeScores(torch.ones(2), {}, {"a": torch.ones(2), "a/part": torch.ones(2)}, {"a": {}})
    failed = torch.full((2,), NAN)
    broken = TreeScores(failed, {0: "x", 1: "x"}, {"a": failed}, {"a": {0: "x", 1: "x"}})
    names = list(whole.components)
    assert reward_metrics(whole, names).keys() == reward_metrics(broken, names).keys()
    assert math.isnan(reward_metrics(broken, names)["reward/a/part"])


def test_contributions_are_named_by_reward_and_stage() -> None:
    assert contribution_metrics([{"a": 1.0, "b": 2.0}, {"a": 3.0}], ["t2i", "i2v"]) == {
        "contribution/a/t2i": 1.0,
        "contribution/b/t2i": 2.0,
        "contribution/a/i2v": 3.0,
    }
