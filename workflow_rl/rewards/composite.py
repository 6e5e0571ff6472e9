"""Weighted sums of rewards over a tree: on the final output and on what came before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import (
    LoadsWeights,
    MediaKind,
    RewardBatch,
    RewardScores,
    ScoresElsewhere,
    score_safely,
)
from workflow_rl.rewards.groupwise import Groupwise
from workflow_rl.rewards.pending import ArrivingScores
from workflow_rl.rewards.registry import GroupKind, RewardTerm, nearest


@dataclass(frozen=True)
class StageMedia:
    """What one stage of the chain made.

    Attributes
    ----------
    batch : RewardBatch
        The stage's samples, all of one tree or of many.
    parents : sequence of int
        Per sample the row of the sample of the stage before that it was made from; in the first
        stage the row of its prompt, or nothing: then each text is one prompt.
    """

    batch: RewardBatch
    parents: Sequence[int] = ()


@dataclass(frozen=True)
class TreeScores:
    """Rewards of the leaves: the samples of the last stage.

    Attributes
    ----------
    total : Tensor
        float32 ``[leaves]``, the weighted sum of the raw scores, whatever stages they are credited
        to; NaN exactly where failed.
    failures : dict of int to str
        Why, per failed leaf: the label of the reward and its reason.
    components : dict of str to Tensor
        Each reward apart by its label (and ``label/part`` for its own parts), unweighted, float32
        ``[leaves]``, NaN where failed. A reward on an earlier stage is that of the leaf's
        ancestor.
    component_failures : dict of str to (dict of int to str)
        Per label and leaf, also of rewards with weight 0, which fail no leaf.
    """

    total: Tensor
    failures: dict[int, str]
    components: dict[str, Tensor]
    component_failures: dict[str, dict[int, str]]


class CompositeReward:
    """A weighted sum of rewards, each on the output of one stage.

    A leaf fails where any reward with a weight other than 0 does.

    Parameters
    ----------
    terms : sequence of RewardTerm

    Raises
    ------
    UserError
        No term has a weight other than 0.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        if not any(term.weight for term in terms):
            raise UserError(
                f"{len(terms)} rewards and none has a weight other than 0: give one a weight (the "
                f"reward named constant is the one that teaches nothing)"
            )
        self.terms = [_with_group(term) for term in terms]
        self.labels = _labels(terms)

    def load(self) -> None:
        """Load what the rewards need, before the first sample is made rather than after.

        Raises
        ------
        UserError
            A reward cannot load.
        """
        for term in self.terms:
            if isinstance(term.reward, LoadsWeights):
                term.reward.load()

    def pointwise(self) -> "CompositeReward":
        """Return the sum of the rewards that score a sample alone, for evaluation.

        A win rate within a group says nothing of whether the group got better. Where no other
        reward has a weight, each that is left counts with weight 1.

        Raises
        ------
        UserError
            There is no such reward.
        """
        alone = [term for term in self.terms if term.group is None]
        if not alone:
            raise UserError(
                f"{', '.join(self.labels)}: compares samples of a group, which does not tell "
                f"whether a run gets better; add a reward that scores a sample alone, with weight "
                f"0 if it shall not train"
            )
        if not any(term.weight for term in alone):
            alone = [replace(term, weight=1.0) for term in alone]
        return self if len(alone) == len(self.terms) else CompositeReward(alone)

    def check_stages(self, kinds: Mapping[str, MediaKind]) -> None:
        """Refuse terms on a stage that is not in the chain or makes another kind of media.

        Parameters
        ----------
        kinds : mapping of str to {"image", "video"}
            What each stage makes, in the order of the chain.

        Raises
        ------
        UserError
        """
        for label, term in zip(self.labels, self.terms, strict=True):
            stage = term.on or list(kinds)[-1]
            if stage not in kinds:
                raise UserError(
                    f"reward {label!r} is on stage {stage!r}, which the chain lacks: "
                    f"{nearest(stage, list(kinds))}"
                )
            if term.reward.media_kind not in ("any", kinds[stage]):
                raise UserError(
                    f"reward {label!r} scores {term.reward.media_kind}s, but stage {stage!r} makes "
                    f"{kinds[stage]}s: set on to a stage that makes {term.reward.media_kind}s"
                )

    def score_tree(
        self, media: Mapping[str, StageMedia], arriving: ArrivingScores | None = None
    ) -> TreeScores:
        """Score the leaves of one or more trees.

        Each reward is called once, on the samples of its stage; the score of a sample then counts
        for every leaf that descends from it.

        Parameters
        ----------
        media : mapping of str to StageMedia
            What each stage made, in the order of the chain; the last one's samples are the
            leaves. To score final outputs alone, the last stage is enough.
        arriving : ArrivingScores or None
            Scores of this tree that were asked for while it grew, see :meth:`arriving`.
        """
        self.check_stages({stage: made.batch.media_kind for stage, made in media.items()})
        return self.combine(media, self.obtain(media, arriving))

    def arriving(self, samples: Mapping[str, int]) -> ArrivingScores:
        """Begin to score a tree that is yet to grow, by ``samples`` of each stage from a parent."""
        return ArrivingScores(self.terms, samples)

    def obtain(
        self, media: Mapping[str, StageMedia], arriving: ArrivingScores | None = None
    ) -> list[RewardScores]:
        """Get each term's scores of the samples of its stage.

        Rewards that are computed elsewhere work all at once, and while the others do.

        Parameters
        ----------
        media, arriving
            As in :meth:`score_tree`.

        Returns
        -------
        list of RewardScores
            One per term, over the samples of the stage that it is on.
        """
        last = list(media)[-1]
        batches = [term_batch(term, media, term.on or last) for term in self.terms]
        if arriving is None:
            arriving = ArrivingScores(self.terms)
            for index, batch in enumerate(batches):
                arriving.add_to(index, batch)
        arriving.flush()
        here = {
            index: score_safely(term.reward, batches[index], term.timeout_s)
            for index, term in enumerate(self.terms)
            if not isinstance(term.reward, ScoresElsewhere)
        }
        return [
            here[index] if index in here else arriving.result(index, len(batch))
            for index, batch in enumerate(batches)
        ]

    def combine(
        self, media: Mapping[str, StageMedia], obtained: Sequence[RewardScores]
    ) -> TreeScores:
        """Hand the scores of each term on to the leaves, and sum them.

        Parameters
        ----------
        media : mapping of str to StageMedia
            As in :meth:`score_tree`.
        obtained : sequence of RewardScores
            One per term, as :meth:`obtain` returns them, however and whenever they came.
        """
        ancestors = leaf_ancestors(media)
        last = list(media)[-1]
        total = torch.zeros(len(media[last].batch))
        failures: dict[int, str] = {}
        components: dict[str, Tensor] = {}
        component_failures: dict[str, dict[int, str]] = {}
        for label, term, scores in zip(self.labels, self.terms, obtained, strict=True):
            leaves = _to_leaves(scores, ancestors[term.on or last])
            components[label] = leaves.scores
            components.update({f"{label}/{part}": v for part, v in leaves.components.items()})
            component_failures[label] = leaves.failures
            if term.weight:
                total = total + term.weight * leaves.scores
                for leaf, reason in leaves.failures.items():
                    failures.setdefault(leaf, f"{label}: {reason}")
        for leaf in (~total.isfinite()).nonzero().flatten().tolist():
            failures.setdefault(leaf, "the weighted sum overflows")
            total[leaf] = math.nan
        return TreeScores(total, dict(sorted(failures.items())), components, component_failures)


def _with_group(term: RewardTerm) -> RewardTerm:
    """A term whose group is set where its reward compares samples: the prompt's by default."""
    if isinstance(term.reward, Groupwise) and term.group is None:
        return replace(term, group="prompt")
    return term


def term_batch(term: RewardTerm, media: Mapping[str, StageMedia], stage: str) -> RewardBatch:
    """What a term's reward is called with: the samples of its stage, in groups if it has any."""
    batch = media[stage].batch
    if term.group is None:
        return batch
    return replace(batch, group_ids=group_ids(media, stage, term.group))


def group_ids(media: Mapping[str, StageMedia], stage: str, group: GroupKind) -> list[str]:
    """Group of each sample of a stage: its prompt's tree, or the sample that it was made from."""
    stages = list(media)
    first = media[stages[0]]
    texts = list(dict.fromkeys(first.batch.prompts))
    prompts = first.parents or [texts.index(text) for text in first.batch.prompts]
    rows = list(range(len(media[stage].batch)))
    for name in stages[stages.index(stage) : 0 : -1]:
        rows = [media[name].parents[row] for row in rows]
        if group == "parent":
            return [str(row) for row in rows]
    return [str(prompts[row]) for row in rows]


def _labels(terms: Sequence[RewardTerm]) -> list[str]:
    """Names to log the terms by: ``name``, ``name@stage``, and ``#2`` for the second of a kind."""
    labels: list[str] = []
    for term in terms:
        base = term.reward.name if term.on is None else f"{term.reward.name}@{term.on}"
        label, number = base, 1
        while label in labels:
            number += 1
            label = f"{base}#{number}"
        labels.append(label)
    return labels


def leaf_ancestors(media: Mapping[str, StageMedia]) -> dict[str, Tensor]:
    """Row of each leaf's ancestor in every stage, int64 ``[leaves]``.

    Raises
    ------
    ValueError
        A stage after the first whose parents do not match its samples or the stage before.
    """
    stages = list(media)
    rows = torch.arange(len(media[stages[-1]].batch))
    ancestors = {stages[-1]: rows}
    for before, stage in zip(stages[-2::-1], stages[:0:-1], strict=True):
        parents = torch.as_tensor(media[stage].parents, dtype=torch.int64)
        limit = len(media[before].batch)
        if (
            len(parents) != len(media[stage].batch)
            or not ((parents >= 0) & (parents < limit)).all()
        ):
            raise ValueError(
                f"stage {stage!r} has {len(media[stage].batch)} samples and parents "
                f"{parents.tolist()} among the {limit} of {before!r}"
            )
        rows = parents[rows]
        ancestors[before] = rows
    return ancestors


def _to_leaves(scores: RewardScores, rows: Tensor) -> RewardScores:
    """Hand the scores of a stage's samples on to the leaves that descend from them."""
    return RewardScores(
        scores=scores.scores[rows],
        failures={
            leaf: scores.failures[row]
            for leaf, row in enumerate(rows.tolist())
            if row in scores.failures
        },
        components={name: values[rows] for name, values in scores.components.items()},
    )
