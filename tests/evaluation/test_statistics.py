"""Laws of the bootstrap: coverage, equivariance, determinism, and failures that enter nothing."""

import math

import numpy as np
import pytest

from workflow_rl.evaluation.statistics import bootstrap_interval, paired_bootstrap


def coverage(clustered: bool, *, prompts: int = 12, seeds: int = 4, trials: int = 400) -> float:
    """Share of trials whose 95% interval holds the true mean 0, with strong prompt effects."""
    generator = np.random.default_rng(1)
    labels = np.repeat(np.arange(prompts), seeds).tolist()
    hits = 0
    for _ in range(trials):
        prompt_effect = np.repeat(generator.normal(size=prompts), seeds)
        values = prompt_effect + 0.5 * generator.normal(size=prompts * seeds)
        interval = bootstrap_interval(values, clusters=labels if clustered else None, samples=500)
        hits += interval.low <= 0 <= interval.high
    return hits / trials


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    assert 0.925 <= coverage(clustered=True) <= 0.975


def test_seeds_of_one_prompt_are_not_independent() -> None:
    assert coverage(clustered=False) < 0.8


def test_many_gaussian_values_give_the_textbook_interval() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, size=2000)
    interval = bootstrap_interval(values)
    half = 1.96 * values.std(ddof=1) / math.sqrt(2000)
    assert interval.mean == pytest.approx(values.mean(), abs=1e-12)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_higher_confidence_is_wider() -> None:
    values = np.random.default_rng(0).normal(size=30)
    narrow = bootstrap_interval(values, confidence=0.5)
    wide = bootstrap_interval(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_shift_and_scale_equivariance() -> None:
    values = np.random.default_rng(0).normal(size=24)
    labels = [f"prompt {i // 3}" for i in range(24)]
    base = bootstrap_interval(values, clusters=labels)
    moved = bootstrap_interval(2.0 * values + 10.0, clusters=labels)
    for name in ("mean", "low", "high"):
        assert getattr(moved, name) == pytest.approx(2.0 * getattr(base, name) + 10.0, abs=1e-12)


def test_same_seed_same_interval_and_other_seed_another() -> None:
    values = np.random.default_rng(0).normal(size=24)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_order_of_samples_does_not_move_the_mean() -> None:
    values = [0.1, 0.7, 0.2, 0.4]
    labels = ["a", "b", "a", "b"]
    one = bootstrap_interval(values, clusters=labels)
    other = bootstrap_interval(values[::-1], clusters=labels[::-1])
    assert one.mean == pytest.approx(other.mean, abs=1e-15)
    assert one.clusters == other.clusters == 2


def test_equal_values_have_no_spread() -> None:
    interval = bootstrap_interval([0.1] * 7)
    assert (interval.mean, interval.low, interval.high) == (0.1, 0.1, 0.1)


def test_clusters_of_one_sample_are_no_clusters() -> None:
    values = np.random.default_rng(0).normal(size=15)
    assert bootstrap_interval(values) == bootstrap_interval(
        values, clusters=list("abcdefghijklmno")
    )


def test_failed_samples_enter_nothing_and_are_counted() -> None:
    interval = bootstrap_interval([1.0, math.nan, 2.0, 4.0, math.nan], clusters=list("abcde"))
    alone = bootstrap_interval([1.0, 2.0, 4.0], clusters=list("acd"))
    assert (interval.low, interval.mean, interval.high) == (alone.low, alone.mean, alone.high)
    assert (interval.count, interval.failed, interval.clusters) == (3, 2, 3)


def test_without_independent_samples_there_is_no_interval() -> None:
    one_prompt = bootstrap_interval([1.0, 2.0], clusters=["a", "a"])
    assert one_prompt.mean == 1.5
    assert math.isnan(one_prompt.low)
    assert math.isnan(one_prompt.high)
    assert math.isnan(bootstrap_interval([math.nan, math.nan]).mean)
    assert math.isnan(bootstrap_interval([]).mean)


def test_pairs_remove_what_both_sides_share() -> None:
    generator = np.random.default_rng(0)
    difficulty = generator.normal(scale=10.0, size=40)
    after = difficulty + 1.0 + generator.normal(scale=0.1, size=40)
    comparison = paired_bootstrap(difficulty, after)
    assert 0.9 < comparison.difference.low < 1.0 < comparison.difference.high < 1.1
    assert comparison.win_rate == 1.0
    assert comparison.after - comparison.before == pytest.approx(comparison.difference.mean)


def test_equal_scores_give_a_zero_interval_and_half_the_wins() -> None:
    scores = np.random.default_rng(0).normal(size=20)
    comparison = paired_bootstrap(scores, scores.copy())
    difference = comparison.difference
    assert (difference.mean, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert comparison.win_rate == 0.5


def test_swapping_the_sides_mirrors_the_comparison() -> None:
    generator = np.random.default_rng(0)
    before, after = generator.normal(size=(2, 30))
    there, back = paired_bootstrap(before, after), paired_bootstrap(after, before)
    assert there.difference.mean == pytest.approx(-back.difference.mean)
    assert there.difference.low == pytest.approx(-back.difference.high, abs=0.02)
    assert there.win_rate == pytest.approx(1 - back.win_rate)


def test_a_failure_on_either_side_drops_the_pair() -> None:
    comparison = paired_bootstrap([1.0, math.nan, 3.0, 4.0], [2.0, 9.0, math.nan, 3.0])
    assert (comparison.difference.count, comparison.difference.failed) == (2, 2)
    assert (comparison.before, comparison.after, comparison.win_rate) == (2.5, 2.5, 0.5)
    assert math.isnan(paired_bootstrap([math.nan], [1.0]).win_rate)


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([1.0, math.inf], {}),
        ([1.0, 2.0], {"clusters": ["a"]}),
        ([1.0, 2.0], {"confidence": 1.0}),
        ([1.0, 2.0], {"samples": 0}),
    ],
)
def test_nonsense_is_refused(values: list[float], options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        bootstrap_interval(values, **options)  # type: ignore[arg-type]


def test_unequal_sides_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        paired_bootstrap([1.0], [1.0, 2.0])


def test_the_win_rate_has_the_interval_of_its_own_pairs() -> None:
    """Ties are half a win on either side; the interval is that of the mean of wins."""
    before = np.zeros(6)
    after = np.array([1.0, 1.0, 1.0, -1.0, 0.0, math.nan])
    wins = paired_bootstrap(before, after).wins
    expected = bootstrap_interval([1, 1, 1, 0, 0.5, math.nan], samples=10_000)
    assert wins == expected
    assert (wins.mean, wins.failed) == (0.7, 1)
    assert 0 <= wins.low < 0.7 < wins.high <= 1


def test_the_effect_has_no_unit() -> None:
    generator = np.random.default_rng(0)
    before = generator.normal(scale=2.0, size=400)
    after = before + 1.0
    effect = paired_bootstrap(before, after).effect
    assert effect == pytest.approx(1 / before.std(ddof=1))
    assert paired_bootstrap(1000 * before, 1000 * after).effect == pytest.approx(effect)
    assert paired_bootstrap(before + 7, after + 7).effect == pytest.approx(effect)


def test_there_is_no_effect_where_the_baseline_does_not_vary() -> None:
    assert math.isnan(paired_bootstrap([1.0, 1.0], [2.0, 3.0]).effect)
    assert math.isnan(paired_bootstrap([1.0], [2.0]).effect)
