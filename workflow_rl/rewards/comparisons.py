"""From pairwise comparisons to one score per sample.

Comparisons of n samples are a matrix ``wins_NN``: the share, from 0 to 1, of the comparisons of i
and j that i won, so that ``wins[i, j] + wins[j, i] = 1``; NaN where they were not compared, and on
the diagonal.
"""

import math

import torch
from torch import Tensor

MIN_COMPARED = 0.5
"""Share of the others that a sample must have been compared with."""

ITERATIONS = 200
"""Of the maximum-likelihood fit; each multiplies strengths, and 100 settle 64 samples."""


def compared_enough(wins_NN: Tensor) -> Tensor:
    """bool [N]: the samples that were compared with half of the others or more."""
    others = max(len(wins_NN) - 1, 1)
    return wins_NN.isfinite().sum(1) >= MIN_COMPARED * others


def win_rates(wins_NN: Tensor) -> Tensor:
    """Mean share of comparisons won, [N] in [0, 1]; NaN without any (Pref-GRPO, arXiv 2508.20751).

    Without missing comparisons the mean over the samples is exactly one half.
    """
    known = wins_NN.isfinite()
    return torch.where(known, wins_NN, 0.0).sum(1) / known.sum(1)


def bradley_terry(wins_NN: Tensor) -> Tensor:
    """Log-strengths [N] under which i beats j with probability s_i / (s_i + s_j).

    Fitted by minorisation-maximisation (Hunter 2004, The Annals of Statistics 32:384). A win
    against a strong sample counts for more, which matters where comparisons are missing. Each
    sample has one more comparison, a draw with a sample of strength 1: so the strengths are finite
    and unique even where one wins or loses all, and equal samples get exactly 0.
    """
    known = wins_NN.isfinite().double()
    won = torch.where(wins_NN.isfinite(), wins_NN.double(), 0.0).sum(1) + 0.5
    strengths = torch.ones(len(wins_NN), dtype=torch.float64)
    for _ in range(ITERATIONS):
        pairs = known / (strengths[:, None] + strengths[None, :])
        strengths = won / (pairs.sum(1) + 1 / (strengths + 1))
    return torch.where(known.any(1), strengths.log(), math.nan).to(wins_NN.dtype)


RANKINGS = {"win_rate": win_rates, "bradley_terry": bradley_terry}
