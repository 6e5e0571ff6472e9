"""Laws of combined credit: whose reward moves which stage, whatever the rewards."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.training.combine import (
    COMBINATIONS,
    CombinedCredit,
    TermValues,
    centred_ranks,
    combine_credit,
    zscore,
)
from workflow_rl.training.credit import CREDIT_RULES, CreditResult, CreditSettings, assign_credit

NAN = math.nan
quick = settings(max_examples=20, deadline=None)
rules = st.sampled_from(sorted(CREDIT_RULES))
combinations = st.sampled_from(sorted(COMBINATIONS))
overs = st.sampled_from(["prompt", "batch"])
shapes = st.sampled_from([(3, 4), (2, 3, 4), (2, 2, 3, 2)])
credit_settings = st.builds(
    CreditSettings,
    normalisation=st.sampled_from(["group", "batch", "none"]),
    leave_one_out=st.booleans(),
    advantage_clip=st.sampled_from([None, 0.7, 5.0]),
)


def draw(shape: tuple[int, ...], seed: int, *, failed: float = 0.15) -> Tensor:
    """Random float32 rewards, some failed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values[torch.rand(shape, generator=generator) < failed] = NAN
    return values


def of_images(shape: tuple[int, ...], seed: int) -> Tensor:
    """Rewards of the first stage, handed on to its leaves."""
    trailing = [1] * (len(shape) - 2)
    return draw(shape[:2], seed).reshape(*shape[:2], *trailing).expand(shape).contiguous()


def assert_identical(left: CreditResult, right: CreditResult, levels: range | None = None) -> None:
    """Equal to the bit, in advantages, masks and counts."""
    for level in range(len(left.levels)) if levels is None else levels:
        one, other = left.levels[level], right.levels[level]
        assert torch.equal(one.advantages, other.advantages)
        assert torch.equal(one.valid, other.valid)
        assert torch.equal(one.active, other.active)
        assert (one.groups, one.groups_skipped, one.groups_flat) == (
            other.groups,
            other.groups_skipped,
            other.groups_flat,
        )


@quick
@given(shapes, st.integers(0, 9999), combinations, overs, rules, credit_settings)
def test_a_term_credited_to_one_stage_leaves_the_others_as_they_were(
    shape: tuple[int, ...], seed: int, combine: Any, over: Any, rule: str, options: CreditSettings
) -> None:
    final = TermValues("final", draw(shape, seed))
    beside = TermValues("beside", of_images(shape, seed + 1), 0.3, frozenset({0}))
    how: dict[str, Any] = {"combine": combine, "over": over, "rule": rule, "settings": options}
    alone, both = combine_credit([final], **how), combine_credit([final, beside], **how)
    assert_identical(alone.credit, both.credit, range(1, len(shape) - 1))
    assert "beside" in both.contributions[0]
    assert all("beside" not in level for level in both.contributions[1:])


@quick
@given(shapes, st.integers(0, 9999), combinations, overs, rules, credit_settings, st.floats(-9, 9))
def test_constant_rewards_give_exactly_nothing(
    shape: tuple[int, ...],
    seed: int,
    combine: Any,
    over: Any,
    rule: str,
    options: CreditSettings,
    value: float,
) -> None:
    failed = draw(shape, seed).isnan()
    constants = [
        TermValues(name, torch.full(shape, number).masked_fill(failed, NAN), weight)
        for name, number, weight in (("a", value, 0.3), ("b", 0.1, -2.0), ("c", 1e4, 1.0))
    ]
    options = replace(options, std_floor=0.0)
    made = combine_credit(constants, combine=combine, over=over, rule=rule, settings=options)
    for level, sizes in zip(made.credit.levels, made.contributions, strict=True):
        assert (level.advantages == 0).all()
        assert not level.active.any()
        assert sizes == {"a": 0.0, "b": 0.0, "c": 0.0}


@quick
@given(shapes, st.integers(0, 9999), st.sampled_from(["zscore", "rank", "advantages"]), rules)
def test_a_constant_beside_a_reward_changes_not_one_bit(
    shape: tuple[int, ...], seed: int, combine: Any, rule: str
) -> None:
    reward = TermValues("reward", draw(shape, seed), 0.7)
    constant = TermValues("constant", torch.full(shape, 1e6), 3.0)
    made = [combine_credit(t, combine=combine, rule=rule) for t in ([reward], [reward, constant])]
    assert_identical(made[0].credit, made[1].credit)


@quick
@given(shapes, st.integers(0, 9999), rules, credit_settings)
def test_one_reward_is_credited_as_without_a_combination(
    shape: tuple[int, ...], seed: int, rule: str, options: CreditSettings
) -> None:
    values = draw(shape, seed)
    expected = assign_credit(
        values,
        rule=rule,
        normalisation=options.normalisation,
        leave_one_out=options.leave_one_out,
        advantage_clip=options.advantage_clip,
    )
    for combine in ("sum", "advantages"):
        how: dict[str, Any] = {"combine": combine, "rule": rule, "settings": options}
        assert_identical(combine_credit([TermValues("r", values)], **how).credit, expected)


@quick
@given(shapes, st.integers(0, 9999), rules)
def test_the_sum_is_the_credit_of_the_weighted_sum(
    shape: tuple[int, ...], seed: int, rule: str
) -> None:
    a, b = draw(shape, seed), draw(shape, seed + 1)
    made = combine_credit([TermValues("a", a, 2.0), TermValues("b", b, -0.3)], rule=rule)
    assert_identical(made.credit, assign_credit(2.0 * a + -0.3 * b, rule=rule))
    assert made.credit.failed == int((a + b).isnan().sum())


@quick
@given(
    shapes, st.integers(0, 9999), st.sampled_from(["zscore", "advantages"]), rules,
    st.floats(0.1, 1e4), st.floats(-100, 100),
)  # fmt: skip
def test_the_scale_of_a_reward_does_not_matter(
    shape: tuple[int, ...], seed: int, combine: Any, rule: str, factor: float, shift: float
) -> None:
    a, b = draw(shape, seed), draw(shape, seed + 1).double()
    how: dict[str, Any] = {
        "combine": combine,
        "rule": rule,
        "settings": CreditSettings("batch", std_floor=0.0),
    }
    plain = combine_credit([TermValues("a", a), TermValues("b", b)], **how)
    scaled = combine_credit([TermValues("a", a), TermValues("b", b * factor + shift)], **how)
    for one, other in zip(plain.credit.levels, scaled.credit.levels, strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, rtol=1e-4, atol=1e-5)


@quick
@given(shapes, st.integers(0, 9999), overs, rules)
def test_ranks_know_the_order_and_nothing_else(
    shape: tuple[int, ...], seed: int, over: Any, rule: str
) -> None:
    a, b = draw(shape, seed).double(), draw(shape, seed + 1)
    terms = [[TermValues("a", values), TermValues("b", b)] for values in (a, a.exp() * 7 - 3)]
    made = [combine_credit(t, combine="rank", over=over, rule=rule) for t in terms]
    assert_identical(made[0].credit, made[1].credit)


@quick
@given(shapes, st.integers(0, 9999), credit_settings)
def test_advantages_add_up(shape: tuple[int, ...], seed: int, options: CreditSettings) -> None:
    options = replace(options, advantage_clip=None)
    a, b = draw(shape, seed, failed=0.0), draw(shape, seed + 1, failed=0.0)
    terms = [TermValues("a", a, 0.5), TermValues("b", b, -2.0)]
    how: dict[str, Any] = {"combine": "advantages", "rule": "nested", "settings": options}
    both = combine_credit(terms, **how).credit.advantages
    apart = [combine_credit([term], **how).credit.advantages for term in terms]
    for total, one, other in zip(both, *apart, strict=True):
        torch.testing.assert_close(total, one + other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", sorted(CREDIT_RULES))
def test_advantages_that_cancel_leave_no_group_active(rule: str) -> None:
    values = draw((2, 3, 3), 0)
    weights = (0.1, 0.2, -0.3)  # which do not add up to 0 in floating point
    terms = [TermValues(str(w), values, w) for w in weights]
    made = combine_credit(terms, combine="advantages", rule=rule)
    for level in made.credit.levels:
        assert (level.advantages == 0).all()
        assert not level.active.any()
        assert level.groups_flat + level.groups_skipped == level.groups


def test_an_image_reward_credited_to_images_by_hand() -> None:
    """Nested: the image's own value adds to its mean; one failed video does not change that."""
    videos = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])
    images = torch.tensor([[[10.0, 10.0], [-10.0, -10.0]]])
    terms = [TermValues("video", videos), TermValues("image", images, 1.0, frozenset({0}))]
    raw = CreditSettings("none", advantage_clip=None)
    for rule, on_videos in (("nested", [-1.0, 1.0, -1.0, 1.0]), ("shared", [-3.0, -1.0, 1.0, 3.0])):
        made = combine_credit(terms, rule=rule, settings=raw)
        assert made.credit.advantages[0].tolist() == [[8.0, -8.0]]
        assert made.credit.advantages[1].flatten().tolist() == on_videos
        assert made.contributions[0] == {"video": 2.0, "image": 10.0}
        assert made.contributions[1] == {"video": math.sqrt(1 if rule == "nested" else 5)}
    videos[0, 1, 0] = NAN
    made = combine_credit(terms, rule="nested", settings=raw)
    assert made.credit.advantages[0].tolist() == [[(2 + 10 - 7 + 10) / 2, -(2 + 10 - 7 + 10) / 2]]


@pytest.mark.parametrize("combine", sorted(COMBINATIONS))
def test_a_failed_image_reward_fails_its_image_and_no_video_that_it_is_not_credited_to(
    combine: Any,
) -> None:
    videos, images = draw((2, 3, 2), 0, failed=0.0), of_images((2, 3, 2), 3)
    images[0, 1] = NAN
    terms = [TermValues("video", videos), TermValues("image", images, 1.0, frozenset({0}))]
    credit = combine_credit(terms, combine=combine, rule="nested").credit
    assert not credit.levels[0].valid[0, 1]
    assert credit.levels[1].valid.all()
    assert credit.failed == int(images.isnan().sum())


def test_a_stage_without_a_reward_has_no_credit() -> None:
    values = draw((2, 3, 2), 0)
    made = combine_credit([TermValues("r", values, 1.0, frozenset({1}))], rule="nested")
    images, videos = made.credit.levels
    assert images.advantages.shape == (2, 3)
    assert not images.valid.any()
    assert made.contributions[0] == {}
    assert videos.active.any()


def test_a_weight_of_0_takes_part_in_nothing() -> None:
    values, broken = draw((2, 3, 2), 0), torch.full((2, 3, 2), NAN)
    terms = [TermValues("r", values), TermValues("logged", broken, 0.0)]
    made = [combine_credit(t, combine="advantages", rule="nested") for t in (terms[:1], terms)]
    assert_identical(made[0].credit, made[1].credit)
    assert made[0].credit.failed == made[1].credit.failed == int(values.isnan().sum())


def test_one_reward_does_not_drown_another_by_its_scale() -> None:
    a, b = draw((8, 4, 4), 0, failed=0.0), 1000 * draw((8, 4, 4), 1, failed=0.0)
    terms = [TermValues("a", a), TermValues("b", b)]

    def sizes(combine: Any) -> CombinedCredit:
        return combine_credit(terms, combine=combine, rule="nested")

    for level in sizes("sum").contributions:
        assert level["b"] > 500 * level["a"]
    for combine in ("zscore", "rank", "advantages"):
        for level in sizes(combine).contributions:
            assert level["b"] == pytest.approx(level["a"], rel=0.5)


def test_tied_ranks_are_shared_and_failures_have_none() -> None:
    values = torch.tensor([[5.0, 1.0, NAN, 5.0, 7.0], [2.0, NAN, NAN, NAN, NAN]]).double()
    ranks = centred_ranks(values)
    midranks = torch.tensor([2.5, 1.0, 2.5, 4.0])  # of 4
    expected = (2 * midranks - 5) / 3
    assert ranks[0, [0, 1, 3, 4]].tolist() == pytest.approx(expected.tolist())
    assert ranks.isnan().tolist() == values.isnan().tolist()
    assert ranks[1, 0] == 0


def test_zscores_by_hand() -> None:
    values = torch.tensor([[1.0, 3.0, NAN], [0.1, 0.1, 0.1], [5.0, NAN, NAN]]).double()
    scored = zscore(values, 1e-4)
    assert scored.isnan().tolist() == values.isnan().tolist()
    assert scored.nan_to_num().tolist() == [[-1.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]


def test_zscores_over_the_batch_keep_the_spread_of_each_prompt() -> None:
    """A prompt whose rewards hardly differ keeps a small say; over the prompt a full one."""
    values = torch.tensor([[0.0, 0.02], [0.0, 2.0]])
    raw = CreditSettings("none", advantage_clip=None)
    terms = [TermValues("r", values)]
    ratio = {}
    for over in ("prompt", "batch"):
        how: dict[str, Any] = {"combine": "zscore", "over": over, "settings": raw}
        narrow, wide = combine_credit(terms, **how).credit.advantages[0][:, 1].tolist()
        ratio[over] = wide / narrow
    assert ratio["prompt"] == pytest.approx(1.0)
    assert ratio["batch"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"combine": "product"}, "sum, zscore, rank, advantages"),
        ({"rule": "nestd"}, "shared, nested"),
        ({"rule": "nested"}, "2 or more"),
        ({"settings": CreditSettings("layer")}, "group, batch, none"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        combine_credit([TermValues("r", torch.zeros(2, 4, 1))], **options)
