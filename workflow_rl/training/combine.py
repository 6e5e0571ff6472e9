"""Several rewards as one credit: what is summed, and which stage each reward is credited to.

A reward is a term with a weight. All terms are values of the leaves, ``[P, n1, ..., nL]``; one of
an earlier stage is that of the leaf's ancestor, so that the mean over the leaves gives it back. The
terms credited to a stage make that stage's credit; the others do not touch it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.training.credit import (
    CREDIT_RULES,
    CreditResult,
    CreditSettings,
    LevelCredit,
    check_credit_names,
    check_group_sizes,
    group_advantages,
    snap,
)

Combine = Literal["sum", "zscore", "rank", "advantages"]
CombineOver = Literal["prompt", "batch"]


@dataclass(frozen=True)
class TermValues:
    """One reward of the leaves.

    Attributes
    ----------
    label : str
        What it is logged as.
    values : Tensor
        float32 ``[P, n1, ..., nL]``, NaN or infinite where it failed.
    weight : float
        Its factor; a term with 0 takes part in nothing.
    levels : frozenset of int or None
        The stages that it is credited to, 0 the first; None: every stage.
    """

    label: str
    values: Tensor
    weight: float = 1.0
    levels: frozenset[int] | None = None

    def credits(self, level: int) -> bool:
        """Whether it takes part in the credit of a stage."""
        return bool(self.weight) and (self.levels is None or level in self.levels)


@dataclass(frozen=True)
class CombinedCredit:
    """Credit of all stages, and how much of it is whose.

    Attributes
    ----------
    credit : CreditResult
        ``failed`` counts the leaves for which a term with a weight has no value.
    contributions : list of dict of str to float
        Per stage, by the label of each term credited to it: the root mean square over the stage's
        valid samples of the term's own part, 0 where there is none. With ``advantages`` that is
        weight times advantage; otherwise weight times the (z-scored, ranked) value less the group's
        mean, before the normalisation that all terms share.
    """

    credit: CreditResult
    contributions: list[dict[str, float]]


def zscore(values: Tensor, std_floor: float) -> Tensor:
    """``(v - mean) / std`` of each row's finite values; exactly 0 in a row of equal ones.

    Parameters
    ----------
    values : Tensor
        float64 ``[S, N]``, NaN where failed; so is the result.
    std_floor : float
        Smallest (population) standard deviation divided by, in the reward's unit.
    """
    settings = CreditSettings("group", advantage_clip=None, std_floor=std_floor)
    scored = group_advantages(values, settings).advantages
    return torch.where(values.isfinite(), scored, math.nan)


def centred_ranks(values: Tensor) -> Tensor:
    """Mid-ranks of each row's finite values, from -1 (lowest) to 1: ``(2r - n - 1) / (n - 1)``.

    Ties share the mean of their ranks, so a row of equal values is exactly 0. The rank is
    ``(number of lower ones - number of higher ones) / (n - 1)``, all whole numbers.

    Parameters
    ----------
    values : Tensor
        float64 ``[S, N]``, NaN where failed; so is the result.
    """
    finite = values.isfinite()
    own, other = values.unsqueeze(-1), values.unsqueeze(-2)
    margin = (other < own).sum(-1) - (other > own).sum(-1)  # NaN is neither lower nor higher
    count = finite.sum(-1, keepdim=True)
    return torch.where(finite, margin.double() / (count - 1).clamp_min(1), math.nan)


def combine_credit(
    terms: Sequence[TermValues],
    *,
    combine: Combine = "sum",
    over: CombineOver = "prompt",
    rule: str = "shared",
    settings: CreditSettings | None = None,
) -> CombinedCredit:
    """Turn several rewards of the leaves into the advantages of every stage's samples.

    Parameters
    ----------
    terms : sequence of TermValues
        At least one has a weight; all of one shape.
    combine : {"sum", "zscore", "rank", "advantages"}
        What is weighted and summed: the values as they are; :func:`zscore` or
        :func:`centred_ranks` of them; or the advantages that the rule gives for each reward alone,
        normalised and clipped on its own, and their sum clipped again (DanceGRPO, arXiv 2505.07818;
        the first step of GDPO, arXiv 2601.05242, whose second, a whitening of the sum over the
        batch, is left out: it would undo ``settings.std_floor``).
    over : {"prompt", "batch"}
        The leaves that ``zscore`` and ``rank`` compare.
    rule, settings
        See :func:`workflow_rl.training.credit.assign_credit`.

    Returns
    -------
    CombinedCredit
        Per stage; a leaf takes part in a stage's credit where every term credited to it is finite.
        A stage that no term is credited to has no valid sample.

    Raises
    ------
    UserError
        Unknown rule, normalisation or way to combine; a tree in which the rule compares nothing.
    """
    settings = settings or CreditSettings()
    check_credit_names(rule, settings.normalisation)
    if combine not in COMBINATIONS:
        raise UserError(
            f"unknown way to combine rewards {combine!r}: choose one of {', '.join(COMBINATIONS)}"
        )
    shape = terms[0].values.shape
    check_group_sizes(rule, shape[1:])
    made: dict[tuple[int, ...], tuple[list[LevelCredit], list[dict[str, float]]]] = {}
    levels: list[LevelCredit] = []
    contributions: list[dict[str, float]] = []
    for level in range(len(shape) - 1):
        chosen = tuple(i for i, term in enumerate(terms) if term.credits(level))
        if not chosen:
            levels.append(_no_credit(shape[: level + 2]))
            contributions.append({})
            continue
        if chosen not in made:
            own = _with_common_failures([terms[i] for i in chosen])
            made[chosen] = COMBINATIONS[combine](own, over, rule, settings)
        credited, shares = made[chosen]
        levels.append(replace(credited[level], advantages=credited[level].advantages.float()))
        contributions.append(shares[level])
    failed = torch.zeros(shape, dtype=torch.bool)
    for term in terms:
        if term.weight:
            failed |= ~term.values.isfinite()
    return CombinedCredit(CreditResult(levels, int(failed.sum())), contributions)


def _no_credit(shape: Sequence[int]) -> LevelCredit:
    nothing = torch.zeros(shape, dtype=torch.bool)
    return LevelCredit(torch.zeros(shape), nothing, nothing, 0, 0, 0)


def _with_common_failures(terms: Sequence[TermValues]) -> list[TermValues]:
    """Make a leaf that failed in one term fail in all: one group of samples for all rewards."""
    finite = torch.stack([term.values.isfinite() for term in terms]).all(0)
    return [replace(term, values=torch.where(finite, term.values, math.nan)) for term in terms]


Combination = Callable[
    [Sequence[TermValues], CombineOver, str, CreditSettings],
    tuple[list[LevelCredit], list[dict[str, float]]],
]


def _sum_of_values(
    transform: Callable[[Tensor, CreditSettings], Tensor],
) -> Combination:
    """Weighted sum of transformed values, credited as one reward."""

    def combine(
        terms: Sequence[TermValues], over: CombineOver, rule: str, settings: CreditSettings
    ) -> tuple[list[LevelCredit], list[dict[str, float]]]:
        shape = terms[0].values.shape
        rows = shape[0] if over == "prompt" else 1
        parts = [
            term.weight * transform(term.values.reshape(rows, -1), settings).reshape(shape)
            for term in terms
        ]
        levels = CREDIT_RULES[rule](_finite(sum(parts, torch.zeros(shape))), settings)
        plain = CreditSettings("none", advantage_clip=None)
        by_term = {
            term.label: CREDIT_RULES[rule](_finite(part), plain)
            for term, part in zip(terms, parts, strict=True)
        }
        return levels, _sizes(levels, by_term)

    return combine


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values.double(), math.nan)


def _sum_of_advantages(
    terms: Sequence[TermValues], over: CombineOver, rule: str, settings: CreditSettings
) -> tuple[list[LevelCredit], list[dict[str, float]]]:
    """Weighted sum of the advantages that each reward has alone."""
    by_term = {}
    for term in terms:
        alone = CREDIT_RULES[rule](_finite(term.values), settings)
        by_term[term.label] = [
            replace(level, advantages=term.weight * level.advantages) for level in alone
        ]
    levels = [
        _added(parts, settings.advantage_clip) for parts in zip(*by_term.values(), strict=True)
    ]
    return levels, _sizes(levels, by_term)


def _added(parts: Sequence[LevelCredit], clip: float | None) -> LevelCredit:
    """Sum of one stage's credits, which are of the same samples.

    A group is active where it is in any of them, unless they cancel in all of its samples.
    """
    stacked = torch.stack([part.advantages for part in parts])
    total = snap(stacked.sum(0), stacked.abs().sum(0))
    first = parts[0]
    axes = tuple(range(total.dim() - first.group_axes, total.dim()))
    cancelled = (total == 0) & (stacked != 0).any(0)
    without = (total == 0).all(axes, keepdim=True) & cancelled.any(axes, keepdim=True)
    active = torch.stack([part.active for part in parts]).any(0) & ~without
    if clip is not None:
        total = total.clamp(-clip, clip)
    flat = first.valid.any(axes) & ~active.any(axes)
    return replace(first, advantages=total, active=active, groups_flat=int(flat.sum()))


def _sizes(
    levels: Sequence[LevelCredit], by_term: Mapping[str, Sequence[LevelCredit]]
) -> list[dict[str, float]]:
    """Root mean square of each term's part over the valid samples, stage by stage."""
    sizes = []
    for position, level in enumerate(levels):
        count = max(int(level.valid.sum()), 1)
        squares = {
            label: torch.where(level.valid, parts[position].advantages, 0.0).square().sum()
            for label, parts in by_term.items()
        }
        sizes.append({label: math.sqrt(float(s) / count) for label, s in squares.items()})
    return sizes


COMBINATIONS: dict[str, Combination] = {
    "sum": _sum_of_values(lambda values, settings: values),
    "zscore": _sum_of_values(lambda values, settings: zscore(values.double(), settings.std_floor)),
    "rank": _sum_of_values(lambda values, settings: centred_ranks(values.double())),
    "advantages": _sum_of_advantages,
}
