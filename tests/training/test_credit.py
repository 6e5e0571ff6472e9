"""Laws of credit: what the advantages of a tree must satisfy whatever the rewards."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.training.credit import (
    CREDIT_RULES,
    CreditResult,
    Normalisation,
    assign_credit,
    variance_split,
)

NAN = math.nan
NORMALISATIONS: list[Normalisation] = ["group", "batch", "none"]
quick = settings(max_examples=25, deadline=None)
rules = st.sampled_from(sorted(CREDIT_RULES))
normalisations = st.sampled_from(NORMALISATIONS)
shapes = st.one_of(
    st.tuples(st.integers(1, 3), st.integers(2, 4)),
    st.tuples(st.integers(1, 3), st.integers(2, 4), st.integers(2, 4)),
    st.tuples(st.integers(1, 2), st.integers(2, 3), st.integers(2, 3), st.integers(2, 3)),
)


@st.composite
def trees(draw: st.DrawFn, *, failures: bool = False) -> Tensor:
    """Rewards of a tree of depth 1 to 3, some leaves failed if asked for."""
    shape = draw(shapes)
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
    if failures:
        rewards[torch.rand(shape, generator=generator) < 0.3] = NAN
    return rewards


def credit(rewards: Tensor, rule: str, normalisation: Normalisation = "none") -> CreditResult:
    """Credit without clipping."""
    return assign_credit(rewards, rule=rule, normalisation=normalisation, advantage_clip=None)


def assert_same(left: CreditResult, right: CreditResult) -> None:
    """Equal advantages and masks at every level."""
    for one, other in zip(left.levels, right.levels, strict=True):
        torch.testing.assert_close(one.advantages, other.advantages, rtol=1e-5, atol=1e-6)
        assert torch.equal(one.valid, other.valid)
        assert torch.equal(one.active, other.active)


def test_two_levels_as_the_design_writes_them() -> None:
    rewards = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])
    images, videos = credit(rewards, "nested").advantages
    assert images.tolist() == [[-2.0, 2.0]]
    assert videos.tolist() == [[[-1.0, 1.0], [-1.0, 1.0]]]
    images, videos = credit(rewards, "shared").advantages
    assert images.tolist() == [[-2.0, 2.0]]
    assert videos.tolist() == [[[-3.0, -1.0], [1.0, 3.0]]]


def test_group_normalisation_divides_by_the_group_and_batch_by_all() -> None:
    rewards = torch.tensor([[1.0, 3.0], [10.0, 30.0]])
    assert credit(rewards, "shared", "group").advantages[0].tolist() == [[-1, 1], [-1, 1]]
    std = math.sqrt((1 + 100) / 2)
    expected = torch.tensor([[-1.0, 1.0], [-10.0, 10.0]]) / std
    torch.testing.assert_close(credit(rewards, "shared", "batch").advantages[0], expected)


def test_each_level_of_nested_credit_has_its_own_batch_scale() -> None:
    rewards = torch.tensor([[[0.0, 0.1], [8.0, 8.1]]])
    images, videos = credit(rewards, "nested", "batch").advantages
    assert images.tolist() == [[-1.0, 1.0]]
    torch.testing.assert_close(videos, torch.tensor([[[-1.0, 1.0], [-1.0, 1.0]]]))


@quick
@given(trees(failures=True), normalisations)
def test_nested_advantages_of_each_group_sum_to_zero(
    rewards: Tensor, normalisation: Normalisation
) -> None:
    for advantages in credit(rewards, "nested", normalisation).advantages:
        assert advantages.sum(-1).abs().max() < 1e-4


@quick
@given(trees(failures=True), normalisations)
def test_shared_leaf_advantages_of_each_prompt_sum_to_zero(
    rewards: Tensor, normalisation: Normalisation
) -> None:
    leaves = credit(rewards, "shared", normalisation).advantages[-1]
    assert leaves.flatten(1).sum(-1).abs().max() < 1e-4


@quick
@given(trees(failures=True), rules, normalisations, st.floats(-100, 100))
def test_adding_a_number_to_all_rewards_of_a_prompt_changes_nothing(
    rewards: Tensor, rule: str, normalisation: Normalisation, shift: float
) -> None:
    shifted = rewards.clone()
    shifted[0] += shift
    assert_same(credit(rewards, rule, normalisation), credit(shifted, rule, normalisation))


@quick
@given(trees(failures=True), rules, st.floats(0.1, 100))
def test_normalised_credit_has_no_unit_and_raw_credit_has_the_rewards(
    rewards: Tensor, rule: str, factor: float
) -> None:
    for normalisation in ("group", "batch"):
        kind: Normalisation = "group" if normalisation == "group" else "batch"
        assert_same(credit(rewards, rule, kind), credit(rewards * factor, rule, kind))
    raw, scaled = credit(rewards, rule), credit(rewards * factor, rule)
    for one, other in zip(raw.advantages, scaled.advantages, strict=True):
        torch.testing.assert_close(one * factor, other, rtol=1e-4, atol=1e-5)


@quick
@given(trees())
def test_nested_advantages_along_a_path_add_up_to_the_shared_one(rewards: Tensor) -> None:
    nested = credit(rewards, "nested").advantages
    total = torch.zeros(rewards.shape)
    for advantages in nested:
        trailing = [1] * (rewards.dim() - advantages.dim())
        total = total + advantages.reshape(*advantages.shape, *trailing)
    torch.testing.assert_close(
        total, credit(rewards, "shared").advantages[-1], rtol=1e-4, atol=1e-5
    )


@quick
@given(trees(failures=True), rules, normalisations, st.randoms(use_true_random=False))
def test_the_order_of_siblings_means_nothing(
    rewards: Tensor, rule: str, normalisation: Normalisation, random: Random
) -> None:
    order = list(range(rewards.shape[1]))
    random.shuffle(order)
    permuted = credit(rewards[:, order], rule, normalisation)
    for one, other in zip(
        credit(rewards, rule, normalisation).advantages, permuted.advantages, strict=True
    ):
        torch.testing.assert_close(one[:, order], other, rtol=1e-5, atol=1e-6)


@quick
@given(trees(), rules, normalisations, st.booleans())
def test_a_failed_first_level_sample_leaves_its_siblings_as_if_it_were_absent(
    rewards: Tensor, rule: str, normalisation: Normalisation, leave_one_out: bool
) -> None:
    absent = torch.cat([rewards, rewards[:, :1]], 1)
    absent[:, -1] = NAN
    kwargs = {"rule": rule, "normalisation": normalisation, "leave_one_out": leave_one_out}
    with_failed = assign_credit(absent, **kwargs)  # type: ignore[arg-type]
    without = assign_credit(rewards, **kwargs)  # type: ignore[arg-type]
    for one, other in zip(with_failed.levels, without.levels, strict=True):
        torch.testing.assert_close(one.advantages[:, :-1], other.advantages)
        assert torch.equal(one.valid[:, :-1], other.valid)
        assert not one.valid[:, -1].any()
        assert (one.advantages[:, -1] == 0).all()


@quick
@given(shapes, rules, normalisations, st.booleans(), st.floats(-1e3, 1e3), st.integers(0, 99))
def test_a_constant_reward_gives_exactly_nothing(
    shape: tuple[int, ...],
    rule: str,
    normalisation: Normalisation,
    leave_one_out: bool,
    value: float,
    seed: int,
) -> None:
    rewards = torch.full(shape, value, dtype=torch.float64)
    failed = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    rewards[failed] = NAN
    result = assign_credit(
        rewards, rule=rule, normalisation=normalisation, leave_one_out=leave_one_out, std_floor=0.0
    )
    for level in result.levels:
        assert (level.advantages == 0).all()
        assert not level.active.any()
        assert level.groups_flat + level.groups_skipped == level.groups


@pytest.mark.parametrize("rule", sorted(CREDIT_RULES))
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_a_tenth_sixteen_times_gives_exactly_nothing(
    rule: str, normalisation: Normalisation
) -> None:
    result = credit(torch.full((2, 4, 4), 0.1), rule, normalisation)
    assert all((advantages == 0).all() for advantages in result.advantages)


def test_images_with_the_same_mean_get_exactly_nothing_while_their_videos_do() -> None:
    # the same rewards in other orders, whose sums differ in the last bit
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(7, generator=generator, dtype=torch.float64).sqrt()
    rows = [values[torch.randperm(7, generator=generator)] for _ in range(8)]
    rewards = torch.stack(rows)[None]
    assert len(set(rewards.sum(-1).flatten().tolist())) > 1
    images, videos = assign_credit(rewards, rule="nested", std_floor=0.0).levels
    assert (images.advantages == 0).all()
    assert images.groups_flat == 1
    assert not images.active.any()
    assert videos.active.all()
    assert (assign_credit(rewards, rule="shared").advantages[0] == 0).all()
    assert variance_split(rewards, ["t2i", "i2v"])["variance/t2i_F"] == 0


def test_one_video_moving_all_its_siblings_changes_only_its_image() -> None:
    rewards = torch.tensor([[[1.0, 2.0], [5.0, 3.0]]])
    lucky = rewards.clone()
    lucky[0, 1] += 10.0
    before, after = credit(rewards, "nested"), credit(lucky, "nested")
    torch.testing.assert_close(before.advantages[1], after.advantages[1])
    assert (after.advantages[0][0, 1] - before.advantages[0][0, 1]).item() == 5.0


def test_a_failure_leaves_its_group_and_a_group_of_one_is_skipped() -> None:
    rewards = torch.tensor([[[1.0, 3.0, NAN], [8.0, NAN, math.inf], [NAN, NAN, NAN]]])
    result = credit(rewards, "nested")
    images, videos = result.levels
    assert result.failed == 6
    assert images.valid.tolist() == [[True, True, False]]
    assert images.advantages.tolist() == [[-3.0, 3.0, 0.0]]
    assert videos.valid.tolist() == [[[True, True, False], [False] * 3, [False] * 3]]
    assert videos.advantages.tolist() == [[[-1.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]]
    assert (videos.groups, videos.groups_skipped, videos.groups_flat) == (3, 2, 0)


@pytest.mark.parametrize("rule", sorted(CREDIT_RULES))
def test_a_batch_that_failed_altogether_gives_nothing(rule: str) -> None:
    for normalisation in NORMALISATIONS:
        result = credit(torch.full((2, 2, 2), NAN), rule, normalisation)
        for level in result.levels:
            assert (level.advantages == 0).all()
            assert not level.valid.any()
            assert level.groups_skipped == level.groups


@quick
@given(trees(failures=True))
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: Tensor) -> None:
    leaves = assign_credit(
        rewards, rule="nested", normalisation="none", leave_one_out=True, advantage_clip=None
    ).levels[-1]
    for group, got, valid in zip(
        rewards.flatten(0, -2),
        leaves.advantages.flatten(0, -2),
        leaves.valid.flatten(0, -2),
        strict=True,
    ):
        for i in valid.nonzero().flatten().tolist():
            others = [x for j, x in enumerate(group.tolist()) if j != i and math.isfinite(x)]
            assert got[i].item() == pytest.approx(
                group[i].item() - sum(others) / len(others), abs=1e-5
            )


@quick
@given(trees(), rules)
def test_no_advantage_passes_the_clip(rewards: Tensor, rule: str) -> None:
    result = assign_credit(rewards, rule=rule, advantage_clip=0.5)
    free = credit(rewards, rule, "group")
    assert all(advantages.abs().max() <= 0.5 for advantages in result.advantages)
    torch.testing.assert_close(result.advantages[-1], free.advantages[-1].clamp(-0.5, 0.5))


def test_the_floor_keeps_a_tiny_spread_tiny() -> None:
    rewards = torch.tensor([[0.5, 0.5 + 1e-6]], dtype=torch.float64)
    assert assign_credit(rewards, std_floor=1e-4).advantages[0].abs().max() < 0.01
    assert assign_credit(rewards, std_floor=0.0).advantages[0].abs().max() > 0.99


def test_shared_works_with_one_video_per_image() -> None:
    images, videos = credit(torch.tensor([[[1.0], [3.0]]]), "shared").advantages
    assert images.tolist() == [[-1.0, 1.0]]
    assert videos.tolist() == [[[-1.0], [1.0]]]


@pytest.mark.parametrize(
    ("shape", "kwargs", "words"),
    [
        ((2, 4, 1), {"rule": "nested"}, "2 or more"),
        ((2, 1, 1), {"rule": "shared"}, "2 or more"),
        ((2, 4, 4), {"rule": "nestd"}, "shared, nested"),
        ((2, 4, 4), {"normalisation": "layer"}, "group, batch, none"),
    ],
)
def test_what_cannot_be_is_refused(
    shape: tuple[int, ...], kwargs: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        assign_credit(torch.zeros(shape), **kwargs)  # type: ignore[arg-type]


@quick
@given(trees(failures=True))
def test_sums_of_squares_add_up_to_the_total(rewards: Tensor) -> None:
    names = [f"stage{i}" for i in range(rewards.dim() - 1)]
    split = variance_split(rewards, names)
    valid = rewards[rewards.isfinite()]
    if len(valid) < 2:
        assert not split["variance/total"] > 0
        return
    assert split["variance/total"] == pytest.approx(valid.var(correction=0).item(), rel=1e-9)
    shares = [value for key, value in split.items() if key.endswith("_eta2")]
    assert sum(shares) == pytest.approx(1.0)


def test_the_variance_split_of_a_tree_by_hand() -> None:
    # images at 1, 3 | 5, 9 with videos at +-1; df: prompts 1, images 2, videos 4
    rewards = torch.tensor([[[0.0, 2.0], [2.0, 4.0]], [[4.0, 6.0], [8.0, 10.0]]])
    split = variance_split(rewards, ["t2i", "i2v"])
    prompts, images, videos = 8 * 2.5**2, 4 * 1.0 + 4 * 4.0, 8 * 1.0
    total = prompts + images + videos
    assert split["variance/total"] == pytest.approx(total / 8)
    assert split["variance/prompt_eta2"] == pytest.approx(prompts / total)
    assert split["variance/t2i_eta2"] == pytest.approx(images / total)
    assert split["variance/i2v_eta2"] == pytest.approx(videos / total)
    assert split["variance/t2i_F"] == pytest.approx((images / 2) / (videos / 4))
    of_images, of_videos = (images / 2 - videos / 4) / 2, videos / 4
    assert split["variance/t2i_share"] == pytest.approx(of_images / (of_images + of_videos))
    assert split["variance/i2v_share"] == pytest.approx(of_videos / (of_images + of_videos))


@pytest.mark.parametrize("failed", [0.0, 0.2])
def test_the_variance_shares_find_the_variances_that_made_the_rewards(failed: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    rewards = 5 * normal(400, 1, 1, 1) + 3 * normal(400, 3, 1, 1) + 2 * normal(400, 3, 3, 1)
    rewards = rewards + normal(400, 3, 3, 3)
    rewards[torch.rand(rewards.shape, generator=generator) < failed] = NAN
    split = variance_split(rewards, ["a", "b", "c"])
    for name, variance in (("a", 9), ("b", 4), ("c", 1)):
        assert split[f"variance/{name}_share"] == pytest.approx(variance / 14, abs=0.05)


def test_a_stage_without_effect_has_an_f_of_one() -> None:
    rewards = torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(1))
    split = variance_split(rewards, ["t2i", "i2v"])
    assert split["variance/t2i_F"] == pytest.approx(1.0, abs=0.1)
    assert split["variance/t2i_share"] < 0.02


def test_what_the_split_cannot_tell_is_nan() -> None:
    constant = variance_split(torch.full((2, 2, 2), 0.1), ["t2i", "i2v"])
    assert constant["variance/total"] == 0
    assert math.isnan(constant["variance/t2i_share"])
    single = variance_split(torch.randn(2, 4, 1), ["t2i", "i2v"])
    assert math.isnan(single["variance/t2i_share"])
    assert math.isfinite(single["variance/t2i_eta2"])
