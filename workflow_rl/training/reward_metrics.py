"""What an iteration logs of its rewards: each apart, and each one's part in each stage's credit."""

from collections.abc import Mapping, Sequence

import torch

from workflow_rl.rewards.composite import TreeScores


def reward_metrics(scores: TreeScores, components: Sequence[str]) -> dict[str, float]:
    """Return mean, standard deviation and failures of the rewards of an iteration's leaves.

    Parameters
    ----------
    scores
        Of the iteration.
    components
        The names to log, in this iteration or not: what is not there is NaN, as where all failed.

    Returns
    -------
    dict of str to float
        ``reward_mean``, ``reward_std`` (of the population) and ``reward_failed`` of the weighted
        sum; ``reward/{name}`` and ``reward_std/{name}`` of every reward and of its parts;
        ``reward_failed/{label}`` of every reward.
    """
    metrics = {
        "reward_mean": _mean(scores.total),
        "reward_std": _std(scores.total),
        "reward_failed": float(len(scores.failures)),
    }
    for name in components:
        values = scores.components.get(name, torch.empty(0))
        metrics[f"reward/{name}"] = _mean(values)
        metrics[f"reward_std/{name}"] = _std(values)
    for name, failures in scores.component_failures.items():
        metrics[f"reward_failed/{name}"] = float(len(failures))
    return metrics


def contribution_metrics(
    contributions: Sequence[Mapping[str, float]], stages: Sequence[str]
) -> dict[str, float]:
    """Return ``contribution/{label}/{stage}``: how much of a stage's credit is whose.

    See :class:`workflow_rl.training.combine.CombinedCredit`; only the rewards that are credited to
    the stage have a key.
    """
    return {
        f"contribution/{label}/{stage}": size
        for stage, sizes in zip(stages, contributions, strict=True)
        for label, size in sizes.items()
    }


def _mean(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].double()
    return float(finite.mean()) if len(finite) else float("nan")


def _std(values: torch.Tensor) -> float:
    finite = values[values.isfinite()].double()
    return float(finite.std(correction=0)) if len(finite) else float("nan")
