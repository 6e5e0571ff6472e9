"""Comparisons become scores: the order of the winners, one half or 0 where nobody is better."""

import math

import pytest
import torch
from torch import Tensor

from workflow_rl.rewards.comparisons import (
    RANKINGS,
    bradley_terry,
    compared_enough,
    win_rates,
)


def with_empty_diagonal(wins_NN: Tensor) -> Tensor:
    return wins_NN.masked_fill(torch.eye(len(wins_NN), dtype=torch.bool), math.nan)


def of_strengths(strengths: list[float]) -> Tensor:
    """Wins as often as the strengths say."""
    s = torch.tensor(strengths, dtype=torch.float64)
    return with_empty_diagonal(s[:, None] / (s[:, None] + s[None, :]))


@pytest.mark.parametrize("ranking", sorted(RANKINGS))
@pytest.mark.parametrize("size", [2, 5, 16])
def test_draws_alone_give_equal_scores_to_the_bit(ranking: str, size: int) -> None:
    scores = RANKINGS[ranking](with_empty_diagonal(torch.full((size, size), 0.5)))
    assert (scores == (0.5 if ranking == "win_rate" else 0.0)).all()


@pytest.mark.parametrize("ranking", sorted(RANKINGS))
def test_the_stronger_scores_higher(ranking: str) -> None:
    scores = RANKINGS[ranking](of_strengths([1.0, 4.0, 0.5, 2.0]))
    assert scores.argsort().tolist() == [2, 0, 3, 1]


def test_win_rates_by_hand() -> None:
    wins = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.5], [0.0, 0.5, 0.0]])
    rates = win_rates(with_empty_diagonal(wins))
    assert rates.tolist() == [1.0, 0.25, 0.25]
    assert rates.mean() == 0.5


def test_bradley_terry_solves_its_equations() -> None:
    """Each sample won as often as its strength says, the draw with a sample of 1 included."""
    wins = of_strengths([30.0, 1.0, 0.2, 3.0, 3.0])
    wins[0, 1] = wins[1, 0] = math.nan
    s = bradley_terry(wins).exp()
    known = wins.isfinite()
    expected = torch.where(known, s[:, None] / (s[:, None] + s[None, :]), 0.0).sum(1) + s / (s + 1)
    won = torch.where(known, wins, 0.0).sum(1) + 0.5
    torch.testing.assert_close(won, expected, rtol=1e-5, atol=1e-6)


def test_one_that_beats_all_has_a_finite_strength() -> None:
    wins = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    strengths = bradley_terry(with_empty_diagonal(wins))
    assert strengths.isfinite().all()
    assert strengths[0].item() == pytest.approx(-strengths[1].item(), abs=1e-6)


def test_a_win_against_a_strong_one_counts_for_more_in_bradley_terry() -> None:
    """0 and 1 each won their one comparison; 0 against the strong 2, 1 against the weak 3."""
    wins = torch.full((4, 4), math.nan)
    for winner, loser in ((0, 2), (1, 3), (2, 3)):
        wins[winner, loser], wins[loser, winner] = 1.0, 0.0
    rates, strengths = win_rates(wins), bradley_terry(wins)
    assert rates[0] == rates[1]
    assert strengths[0] > strengths[1]


def test_a_sample_needs_half_of_its_comparisons() -> None:
    wins = with_empty_diagonal(torch.full((5, 5), 0.5))
    for other in (1, 2, 3):
        wins[0, other] = wins[other, 0] = math.nan
    assert compared_enough(wins).tolist() == [False, True, True, True, True]
    assert win_rates(torch.full((2, 2), math.nan)).isnan().all()
    assert bradley_terry(torch.full((2, 2), math.nan)).isnan().all()
