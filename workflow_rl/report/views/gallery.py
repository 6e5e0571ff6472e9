"""The saved rollouts: groups as trees, with what was credited to whom."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workflow_rl.report.embed import Embedder, Medium
from workflow_rl.report.numbers import number
from workflow_rl.report.run_data import RunData, SampleNode, SavedGroup, SavedRollout

MOST_SAMPLES = 2500
"""Samples in the page; the groups beyond it are left out, and the page says so."""
STEPS = 4
"""Shades on each side of 0 of the scale of advantages."""
TOTAL = "reward"


@dataclass(frozen=True)
class NodeView:
    """One sample; ``children`` are sorted by advantage, the highest first.

    ``shade`` is the advantage on the page's scale, from -`STEPS` to `STEPS`. ``rewards`` are the
    total (the weighted sum; for an inner sample the mean over what was made from it) and each
    reward apart.
    """

    name: str
    stage: str
    medium: Medium
    advantage: float
    shade: int
    rewards: dict[str, str]
    failed: str | None
    children: list[NodeView]


@dataclass(frozen=True)
class GroupView:
    """All samples of one prompt in one iteration.

    ``kind`` is ``best``, ``worst``, ``failed`` or ``other``; ``place`` says it in words. ``most``
    and ``least`` are the samples of the first stage with the highest and the lowest advantage,
    unless no advantage differs from 0. ``credit`` is the largest size of an advantage.
    """

    iteration: int
    prompt: str
    kind: str
    place: str
    rewards: dict[str, float | None]
    credit: float
    failures: int
    children: list[NodeView]
    most: NodeView | None
    least: NodeView | None

    @property
    def texts(self) -> dict[str, str]:
        """The mean of every reward, as the page writes it."""
        return {
            name: number(math.nan if value is None else value)
            for name, value in self.rewards.items()
        }


@dataclass(frozen=True)
class Gallery:
    """The groups of the page, the newest iteration first, and what its filters offer.

    ``limit`` is the size of advantage at which the colours end; ``left_out`` counts the groups that
    the page has no room for.
    """

    groups: list[GroupView]
    limit: float
    left_out: int
    rewards: list[str]
    frozen: list[str]

    @property
    def iterations(self) -> list[int]:
        """Iterations with a group, the newest first."""
        return list(dict.fromkeys(group.iteration for group in self.groups))

    @property
    def prompts(self) -> list[str]:
        """Prompts, sorted."""
        return sorted({group.prompt for group in self.groups})


def gallery(run: RunData, embed: Embedder, most_samples: int = MOST_SAMPLES) -> Gallery:
    """Return the saved groups of a run.

    Where they are too many, whole iterations are left out: kept are the newest, the oldest, and
    those that halve the widest gap between kept ones. In the same order media are put into the
    page, as long as there is room.
    """
    kept: list[SavedRollout] = []
    left = most_samples
    for rollout in _by_importance(run.rollouts):
        size = sum(1 for group in rollout.groups for _ in _nodes(group.children))
        if size > left and kept:
            break
        left -= size
        kept.append(rollout)
    nodes = [n for r in kept for g in r.groups for n in _nodes(g.children)]
    limit = _limit([abs(node.advantage) for node in nodes])
    views = {r.iteration: [_group(r, g, limit, embed) for g in r.groups] for r in kept}
    groups = [view for iteration in sorted(views, reverse=True) for view in views[iteration]]
    return Gallery(
        groups=groups,
        limit=limit,
        left_out=sum(len(r.groups) for r in run.rollouts) - len(groups),
        rewards=[TOTAL, *dict.fromkeys(name for node in nodes for name in node.components)],
        frozen=[name for name, stage in run.config.stages.items() if stage.freeze],
    )


def _by_importance(rollouts: Sequence[SavedRollout]) -> list[SavedRollout]:
    """Order rollouts so that any first few of them span the run: last, first, then the middles."""
    count = len(rollouts)
    order = [count - 1, 0] if count > 1 else list(range(count))
    gaps = [(0, count - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [rollouts[i] for i in order]


def _nodes(nodes: Sequence[SampleNode]) -> Iterator[SampleNode]:
    for node in nodes:
        yield node
        yield from _nodes(node.children)


def _limit(sizes: Sequence[float]) -> float:
    """Return the size at which colours end: that which one advantage in twenty exceeds, rounded."""
    known = sorted(size for size in sizes if math.isfinite(size) and size > 0)
    return float(f"{known[int(0.95 * (len(known) - 1))]:.1g}") if known else 1.0


def _group(rollout: SavedRollout, group: SavedGroup, limit: float, embed: Embedder) -> GroupView:
    kind, place = _place(rollout, group)
    samples = list(_nodes(group.children))
    children = _views(group.children, "", limit, embed)
    credited = [c for c in children if c.advantage != 0 and math.isfinite(c.advantage)]
    names = dict.fromkeys(name for node in samples for name in node.components)
    rewards = {TOTAL: group.reward_mean} | {
        name: _mean([child.components.get(name, math.nan) for child in group.children])
        for name in names
    }
    sizes = [abs(node.advantage) for node in samples if math.isfinite(node.advantage)]
    return GroupView(
        iteration=rollout.iteration,
        prompt=group.prompt,
        kind=kind,
        place=place,
        rewards={name: v if math.isfinite(v) else None for name, v in rewards.items()},
        credit=max(sizes, default=0.0),
        failures=sum(node.failed is not None for node in samples),
        children=children,
        most=credited[0] if credited else None,
        least=credited[-1] if len(credited) > 1 else None,
    )


def _place(rollout: SavedRollout, group: SavedGroup) -> tuple[str, str]:
    """Return whether a group is the best or the worst of its iteration, and that in words."""
    if not math.isfinite(group.reward_mean):
        return "failed", "No reward"
    if group.rank is not None and group.ranked is not None:
        rank, ranked, others = group.rank, group.ranked, f" of {group.ranked}"
    else:
        means = [g.reward_mean for g in rollout.groups if math.isfinite(g.reward_mean)]
        rank, ranked = 1 + sum(mean > group.reward_mean for mean in means), len(means)
        others = ""
    if ranked < 2:
        return "other", "Only one"
    if rank == 1:
        return "best", f"Best{others}"
    return ("worst", f"Worst{others}") if rank == ranked else ("other", f"Number {rank}{others}")


def _views(
    nodes: Sequence[SampleNode], above: str, limit: float, embed: Embedder
) -> list[NodeView]:
    views = []
    for position, node in enumerate(nodes, start=1):
        place = f"{above}{position}"
        rewards = {TOTAL: node.reward} | node.components
        views.append(
            NodeView(
                name=f"{node.stage or 'sample'} {place}",
                stage=node.stage,
                medium=embed(node.media),
                advantage=node.advantage,
                shade=_shade(node.advantage, limit),
                rewards={name: number(value, 3) for name, value in rewards.items()},
                failed=_failure(node),
                children=_views(node.children, f"{place}.", limit, embed),
            )
        )
    return sorted(views, key=lambda view: -_or_zero(view.advantage))


def _failure(node: SampleNode) -> str | None:
    """Return why a sample has no reward, for an inner one that nothing made from it has one."""
    if node.failed is not None or math.isfinite(node.reward):
        return node.failed
    return "nothing made from it has a reward" if node.children else "no reward"


def _shade(advantage: float, limit: float) -> int:
    share = max(-1.0, min(1.0, _or_zero(advantage) / limit))
    return round(STEPS * share)


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan
