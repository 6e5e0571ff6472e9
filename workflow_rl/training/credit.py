"""Credit: from the rewards of a tree of samples to the advantage of every sample of every stage.

A chain of L stages grows a tree per prompt: n1 samples of the first stage, n2 of the second for
each of those, and so on. Only the leaves have a reward, ``rewards [P, n1, ..., nL]``; NaN marks a
failed leaf, which takes part in nothing. Level ``l`` below is the list index of a stage: level 0
is the first stage, with tensors ``[P, n1]``, and the last level has the shape of the rewards.

Everything is computed in float64 and returned in float32.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from workflow_rl.errors import UserError

Normalisation = Literal["group", "batch", "none"]

# Differences this far below the size of the rewards are rounding of the means, not credit: float32
# rewards differ by 6e-8 of their size when they differ at all.
ROUNDING = 1e-12


@dataclass(frozen=True)
class CreditSettings:
    """How a group's values become advantages; see :func:`assign_credit`."""

    normalisation: Normalisation = "group"
    leave_one_out: bool = False
    advantage_clip: float | None = 5.0
    std_floor: float = 1e-4


@dataclass(frozen=True)
class LevelCredit:
    """Credit of one stage's samples.

    Attributes
    ----------
    advantages : Tensor
        ``[P, n1, ..., nl]``, float64 in a rule and float32 in a result; exactly 0 where not
        ``active``.
    valid : Tensor
        bool, same shape: the sample has a value and siblings to compare it with.
    active : Tensor
        bool, same shape: valid, and its group's advantages are not all 0. Only these samples may
        enter a loss: a group without credit moves no weight.
    groups, groups_skipped, groups_flat : int
        Number of groups; of those with fewer than two valid samples; of those whose advantages are
        all 0.
    group_axes : int
        Number of trailing axes along which the samples of one group lie.
    """

    advantages: Tensor
    valid: Tensor
    active: Tensor
    groups: int
    groups_skipped: int
    groups_flat: int
    group_axes: int = 1


@dataclass(frozen=True)
class CreditResult:
    """Credit of all stages, first stage first; ``failed`` counts the leaves without a reward."""

    levels: list[LevelCredit]
    failed: int

    @property
    def advantages(self) -> list[Tensor]:
        """Advantages per level: ``[P, n1]``, ``[P, n1, n2]``, ..."""
        return [level.advantages for level in self.levels]

    @property
    def valid(self) -> list[Tensor]:
        """Valid masks per level, shaped as the advantages."""
        return [level.valid for level in self.levels]

    @property
    def active(self) -> list[Tensor]:
        """Active masks per level, shaped as the advantages."""
        return [level.active for level in self.levels]


CreditRule = Callable[[Tensor, CreditSettings], list[LevelCredit]]


def masked_mean(values: Tensor, dim: int | tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """Mean of the finite values, NaN where there is none."""
    valid = values.isfinite()
    total = torch.where(valid, values, 0.0).sum(dim, keepdim=keepdim)
    return total / valid.sum(dim, keepdim=keepdim)  # 0/0 = NaN


def snap(values: Tensor, size: Tensor) -> Tensor:
    """Set what is only rounding of values of magnitude ``size`` to exactly 0."""
    return torch.where(values.abs() <= ROUNDING * size, 0.0, values)


def _largest(values: Tensor) -> Tensor:
    """Largest finite magnitude along the last axis, kept as an axis of 1."""
    return torch.where(values.isfinite(), values.abs(), 0.0).amax(-1, keepdim=True)


def group_advantages(values: Tensor, settings: CreditSettings) -> LevelCredit:
    """Compare each sample with its siblings, the samples along the last axis.

    With ``c = value - mean(group)`` the advantage is ``c / s``, where the scale ``s`` is the
    standard deviation (of the population) of the group, or of ``c`` over all valid samples of all
    groups, or 1. ``leave_one_out`` takes the mean of the others as the baseline (RLOO, Ahmadian
    et al. 2024), which is ``c * n / (n - 1)``; ``s`` stays that of ``c``.

    Parameters
    ----------
    values : Tensor
        float64 ``[..., n]``, NaN where a sample failed.

    Returns
    -------
    LevelCredit
        Shapes as ``values``.
    """
    finite = values.isfinite()
    count = finite.sum(-1, keepdim=True)
    valid = finite & (count >= 2)
    centred = snap(values - masked_mean(values, -1, keepdim=True), _largest(values))
    centred = torch.where(valid, centred, 0.0)
    advantages = centred * count / (count - 1).clamp_min(1) if settings.leave_one_out else centred
    if settings.normalisation != "none":
        dims = (-1,) if settings.normalisation == "group" else tuple(range(values.dim()))
        members = valid.sum(dims, keepdim=True).clamp_min(1)
        std = (centred.square().sum(dims, keepdim=True) / members).sqrt()
        scale = std.clamp_min(settings.std_floor)
        advantages = torch.where(std > 0, advantages / scale, 0.0)
    if settings.advantage_clip is not None:
        advantages = advantages.clamp(-settings.advantage_clip, settings.advantage_clip)
    flat = (advantages == 0).all(-1, keepdim=True)
    skipped = count < 2
    return LevelCredit(
        advantages=advantages,
        valid=valid,
        active=valid & ~flat,
        groups=skipped.numel(),
        groups_skipped=int(skipped.sum()),
        groups_flat=int((flat & ~skipped).sum()),
    )


def nested_credit(rewards: Tensor, settings: CreditSettings) -> list[LevelCredit]:
    """Judge each stage against its own siblings, level by level.

    The value of a sample is the mean of its children's values, of a leaf its reward. For two
    stages image ``i`` gets ``mean_j R(i,j) - mean R`` and video ``(i,j)`` gets
    ``R(i,j) - mean_j R(i,j)``: the other stage's luck is averaged out or cancelled.
    """
    levels: list[LevelCredit] = []
    values = rewards
    while values.dim() > 1:
        levels.insert(0, group_advantages(values, settings))
        values = masked_mean(values, -1)
    return levels


def shared_credit(rewards: Tensor, settings: CreditSettings) -> list[LevelCredit]:
    """Give all stages of a trajectory one advantage: the leaf's, relative to its whole prompt.

    A sample with several leaves has several trajectories, and gets the mean of their advantages.
    """
    flat = group_advantages(rewards.flatten(1), settings)
    leaves = torch.where(flat.valid, flat.advantages, math.nan)
    size = _largest(leaves)
    group_active = flat.active.any(-1)
    levels: list[LevelCredit] = []
    values = leaves.reshape(rewards.shape)
    while values.dim() > 1:
        group_shape = [-1] + [1] * (values.dim() - 1)
        valid = values.isfinite()
        advantages = snap(torch.where(valid, values, 0.0), size.reshape(group_shape))
        levels.insert(
            0,
            LevelCredit(
                advantages=advantages,
                valid=valid,
                active=valid & group_active.reshape(group_shape),
                groups=flat.groups,
                groups_skipped=flat.groups_skipped,
                groups_flat=flat.groups_flat,
                group_axes=values.dim() - 1,
            ),
        )
        values = masked_mean(values, -1)
    return levels


CREDIT_RULES: dict[str, CreditRule] = {"shared": shared_credit, "nested": nested_credit}


def check_credit_names(rule: str, normalisation: str) -> None:
    """Refuse a rule or a normalisation that does not exist.

    Raises
    ------
    UserError
    """
    if rule not in CREDIT_RULES:
        raise UserError(f"unknown credit rule {rule!r}: choose one of {', '.join(CREDIT_RULES)}")
    if normalisation not in ("group", "batch", "none"):
        raise UserError(
            f"unknown advantage normalisation {normalisation!r}: choose one of group, batch, none"
        )


def check_group_sizes(rule: str, sizes: Sequence[int]) -> None:
    """Refuse a tree in which a rule can never compare anything.

    Parameters
    ----------
    sizes : sequence of int
        Samples per parent at each level, ``(K, M)`` for two stages.

    Raises
    ------
    UserError
        ``nested`` with one sample per parent below the first level, or one sample per prompt.
    """
    if rule == "nested" and 1 in sizes[1:]:
        raise UserError(
            f"nested credit compares the samples of one parent, but the samples per parent are "
            f"{list(sizes)}: use 2 or more at every stage after the first, or credit 'shared'"
        )
    if math.prod(sizes) == 1:
        raise UserError(
            "one sample per prompt leaves nothing to compare it with: use 2 or more samples"
        )


def assign_credit(
    rewards: Tensor,
    *,
    rule: str = "shared",
    normalisation: Normalisation = "group",
    leave_one_out: bool = False,
    advantage_clip: float | None = 5.0,
    std_floor: float = 1e-4,
) -> CreditResult:
    """Turn the rewards of the leaves into the advantages of every stage's samples.

    Parameters
    ----------
    rewards : Tensor
        ``[P, n1, ..., nL]``, one per leaf; NaN or infinite where the leaf failed.
    rule : str
        A name in ``CREDIT_RULES``: ``shared`` (:func:`shared_credit`) or ``nested``
        (:func:`nested_credit`).
    normalisation : {"group", "batch", "none"}
        Divide by the standard deviation of each group, of all groups of the level together, or
        not at all. With ``shared`` the groups are those of the leaves, at every level.
    leave_one_out : bool
        Compare each sample with the mean of the others of its group rather than of all.
    advantage_clip : float or None
        Advantages are cut to ``[-advantage_clip, advantage_clip]``, in units of the scale.
    std_floor : float
        Smallest standard deviation divided by, in the reward's unit.

    Returns
    -------
    CreditResult
        Per level; samples of a group with fewer than two valid ones have advantage exactly 0.

    Raises
    ------
    UserError
        Unknown rule or normalisation; a tree in which the rule compares nothing.
    """
    check_credit_names(rule, normalisation)
    if rewards.dim() < 2:
        raise ValueError(f"rewards must be [P, n1, ..., nL], got {tuple(rewards.shape)}")
    check_group_sizes(rule, rewards.shape[1:])
    finite = rewards.isfinite()
    leaves = torch.where(finite, rewards.double(), math.nan)
    settings = CreditSettings(normalisation, leave_one_out, advantage_clip, std_floor)
    levels = [
        replace(level, advantages=level.advantages.float())
        for level in CREDIT_RULES[rule](leaves, settings)
    ]
    return CreditResult(levels, int((~finite).sum()))


def variance_split(rewards: Tensor, level_names: Sequence[str]) -> dict[str, float]:
    """Split the variance of the rewards between the prompts and the levels of the tree.

    Nested one-way analysis of variance (Searle, Casella & McCulloch, *Variance Components*, 1992,
    ch. 3). With ``SS_l = sum over leaves of (mean at level l - mean at level l-1)^2``, the sums
    of squares of the prompts and of all levels add up to the total exactly. ``MS_l = SS_l / df_l``
    estimates the variance of everything at or below level ``l``, so ``F_l = MS_l / MS_(l+1)`` is
    about 1 where the samples of level ``l`` make no difference of their own, and their own
    variance is ``(MS_l - MS_(l+1)) / leaves per sample``. With failed leaves that number is the
    mean over the samples that have one.

    Parameters
    ----------
    rewards : Tensor
        ``[P, n1, ..., nL]``, NaN where a leaf failed.
    level_names : sequence of str
        The L stages' names, first stage first.

    Returns
    -------
    dict of str to float
        ``variance/total`` (of all leaves, population); ``variance/prompt_eta2`` and
        ``variance/{level}_eta2``, shares of the sum of squares, which add up to 1;
        ``variance/{level}_share``, shares of the variance within a prompt (negative estimates
        count as 0), which add up to 1: the stage that drives the reward has the largest;
        ``variance/{level}_F`` for all levels but the last. What is not defined (no variance, one
        sample per parent) is NaN.
    """
    if len(level_names) != rewards.dim() - 1:
        raise ValueError(f"{len(level_names)} level names for rewards {tuple(rewards.shape)}")
    leaves = torch.where(rewards.isfinite(), rewards.double(), math.nan)
    valid = leaves.isfinite()
    means = _level_means(leaves)
    counts = [int(mean.isfinite().sum()) for mean in means]
    size = torch.where(valid, leaves.abs(), 0.0).amax()
    squares = [
        float(torch.where(valid, snap(inner - outer, size).square(), 0.0).sum())
        for outer, inner in itertools.pairwise(means)
    ]
    total = sum(squares)
    names = ["prompt", *level_names]
    split = {"variance/total": _ratio(total, counts[-1])}
    for name, square in zip(names, squares, strict=True):
        split[f"variance/{name}_eta2"] = _ratio(square, total)
    mean_squares = [
        _ratio(square, inner - outer)
        for square, (outer, inner) in zip(squares, itertools.pairwise(counts), strict=True)
    ]
    for name, (own, below) in zip(level_names, itertools.pairwise(mean_squares[1:]), strict=False):
        split[f"variance/{name}_F"] = _ratio(own, below)
    components = _variance_components(mean_squares[1:], counts[2:])
    for name, component in zip(level_names, components, strict=True):
        split[f"variance/{name}_share"] = _ratio(component, sum(components))
    return split


def _level_means(leaves: Tensor) -> list[Tensor]:
    """Return the means of the leaves under each sample of each level, axes kept.

    Of all, of each prompt, of each sample of the first stage, ..., and the leaves themselves.
    """
    depth = leaves.dim() - 1
    means = [
        masked_mean(leaves, tuple(range(level, depth + 1)), keepdim=True)
        for level in range(depth + 1)
    ]
    return [*means, leaves]


def _variance_components(mean_squares: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return each level's own variance, first stage first; an estimate below 0 is 0.

    Parameters
    ----------
    mean_squares, counts
        Mean square and number of samples of each level; the last level is the leaves.
    """
    components = []
    for own, below, count in zip(mean_squares, [*mean_squares[1:], 0.0], counts, strict=True):
        component = (own - below) * _ratio(count, counts[-1])
        components.append(component if math.isnan(component) else max(component, 0.0))
    return components


def _ratio(part: float, whole: float) -> float:
    """``part / whole``; infinite for something of nothing, NaN for nothing of nothing."""
    if whole == 0:
        return math.inf if part > 0 else math.nan
    return part / whole
