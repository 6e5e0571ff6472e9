"""A vision-language model that compares the samples of a group, two by two."""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.comparisons import RANKINGS, compared_enough
from workflow_rl.rewards.groupwise import Groupwise
from workflow_rl.rewards.remote.base import RemoteReward, in_background
from workflow_rl.rewards.vlm_judge import VlmJudge, judge_failure

CRITERIA = {
    "alignment": "Which shows more of what the text asks for: subjects, attributes, actions?",
    "quality": "Which is clearer, more natural and freer of artefacts?",
    "motion": "Which moves more plausibly, neither frozen nor torn?",
}
RUBRIC = (
    "You compare two pieces of media that generative models made from one text. For each criterion "
    "answer {lowest} where the first is the better one and {highest} where the second is. Judge by "
    "what you see; the order means nothing.\n{criteria}\n"
    "Answer with JSON only: one number for each criterion."
)
FIRST, SECOND = 1, 2


class PairwiseVlmJudge(Groupwise, RemoteReward):
    """Win rate of a sample against the others of its group, in [0, 1]; higher is better.

    A vision-language model behind an OpenAI-compatible API is shown two samples of one prompt and
    says which is better, by each criterion. Every pair is shown in both orders, and the two answers
    are averaged: a judge that prefers a place rather than a sample gives every sample one half. The
    score is the mean over the criteria; each is a component. That ranks rather than grades, which
    delays reward hacking (Pref-GRPO, arXiv 2508.20751). A group of n takes n(n - 1) requests.

    A comparison without a proper answer in both orders is left out; a sample that has fewer than
    half of its comparisons fails. A group is compared as soon as all of it is made.

    Parameters
    ----------
    model, base_url, api_key_env, concurrency, retries, request_timeout_s, use_proxy, extra_body
        As of :class:`workflow_rl.rewards.vlm_judge.VlmJudge`.
    frames, max_side
        Likewise; two samples are shown in one request.
    criteria : mapping of str to str or None
        Name and question of each; None: alignment, quality and motion.
    ranking : {"win_rate", "bradley_terry"}
        How comparisons become scores, see :mod:`workflow_rl.rewards.comparisons`;
        ``bradley_terry`` gives log-strengths, around 0 and without bound.
    method : {"logprob", "average"}
        ``logprob``: the probability that the model gives the first, from its token probabilities.
        ``average``: the share of ``samples`` answers at ``temperature``.
    rubric : str or None
        The system message, in which ``{lowest}`` (1, the first), ``{highest}`` (2, the second) and
        ``{criteria}`` are filled in; None: a plain one.
    """

    name = "vlm_pairwise"

    def __init__(
        self,
        model: str | None = None,
        base_url: str = "http://localhost:8000/v1",
        criteria: Mapping[str, str] | None = None,
        ranking: Literal["win_rate", "bradley_terry"] = "win_rate",
        method: Literal["logprob", "average"] = "logprob",
        samples: int = 1,
        temperature: float = 0.7,
        frames: int = 4,
        max_side: int = 512,
        rubric: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 16,
        retries: int = 3,
        request_timeout_s: float = 60.0,
        use_proxy: bool = False,
        extra_body: Mapping[str, object] | None = None,
    ) -> None:
        if ranking not in RANKINGS:
            raise UserError(f"ranking is {ranking!r}: give {' or '.join(RANKINGS)}")
        RemoteReward.__init__(self, self.name, self.media_kind, batch_size=1)
        self.ranking = ranking
        self.judge = VlmJudge(
            model=model,
            base_url=base_url,
            criteria=CRITERIA if criteria is None else criteria,
            method=method,
            samples=samples,
            temperature=temperature,
            lowest=FIRST,
            highest=SECOND,
            frames=frames,
            max_side=max_side,
            rubric=RUBRIC if rubric is None else rubric,
            api_key_env=api_key_env,
            concurrency=concurrency,
            retries=retries,
            request_timeout_s=request_timeout_s,
            use_proxy=use_proxy,
            extra_body=extra_body,
        )

    def load(self) -> None:
        """Connect to the server."""
        self.judge.load()

    def score_group(self, group: RewardBatch) -> RewardScores:
        """Compare every pair in both orders."""
        self.load()
        return in_background(self.ask(group)).result()

    def score(self, batch: RewardBatch, timeout_s: float | None) -> RewardScores:
        """Score a batch of whole groups, or of one."""
        groups = batch.group_ids or [""] * len(batch)
        return super().score(replace(batch, group_ids=groups), timeout_s)

    async def ask(self, batch: RewardBatch) -> RewardScores:
        """Compare every pair of one group in both orders."""
        orders = list(itertools.permutations(range(len(batch)), 2))
        wins = {
            name: torch.full((len(batch), len(batch)), torch.nan) for name in self.judge.criteria
        }
        reasons: dict[tuple[int, int], str] = {}
        asked = [self._second_wins(batch.row(first), batch.row(second)) for first, second in orders]
        for (first, second), outcome in zip(orders, await asyncio.gather(*asked), strict=True):
            if isinstance(outcome, str):
                reasons[first, second] = outcome
                continue
            for name, share in outcome.items():
                wins[name][first, second] = 1 - share
        return self._scores(wins, reasons)

    async def _second_wins(self, first: RewardBatch, second: RewardBatch) -> dict[str, float] | str:
        """Probability that the second is the better one, by criterion; or why it is not known."""
        what = "an image" if first.media_kind == "image" else "frames of a video, in order"
        texts = [
            {"type": "text", "text": f"The text: {first.prompts[0]}\nThe first is {what}:"},
            {"type": "text", "text": f"The second is {what}:"},
        ]

        def content() -> list[dict[str, Any]]:
            return [texts[0], *self.judge.shown(first), texts[1], *self.judge.shown(second)]

        try:
            return await self.judge.answer(content)
        except Exception as error:  # noqa: BLE001  whatever a foreign server made happen
            return judge_failure(error)

    def _scores(
        self, shown_first: Mapping[str, Tensor], reasons: Mapping[tuple[int, int], str]
    ) -> RewardScores:
        """Scores from how often each sample won in the first place, [N, N] by criterion."""
        components, failures = {}, {}
        for name, first_NN in shown_first.items():
            wins_NN = (first_NN + 1 - first_NN.T) / 2  # NaN unless both orders were answered
            enough = compared_enough(wins_NN)
            components[name] = RANKINGS[self.ranking](wins_NN).where(enough, torch.nan)
            for row in (~enough).nonzero().flatten().tolist():
                why = next(reason for pair, reason in reasons.items() if row in pair)
                failures[row] = f"fewer than half of its comparisons succeeded: {why}"
        return RewardScores(torch.stack([*components.values()]).mean(0), failures, components)
