"""End-to-end reinforcement learning of a chain of any length, from one reward on its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from workflow_rl.config import PromptRecord
from workflow_rl.config.reward_checks import credit_fault
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.evaluation.chain import ChainScoring
from workflow_rl.rewards.composite import CompositeReward, TreeScores
from workflow_rl.runtime.driver import OnProgress
from workflow_rl.training.combine import (
    Combine,
    CombinedCredit,
    CombineOver,
    TermValues,
    combine_credit,
)
from workflow_rl.training.credit import (
    CreditResult,
    CreditSettings,
    Normalisation,
    check_group_sizes,
    variance_split,
)
from workflow_rl.training.methods.base import Batch, TrainingMethod
from workflow_rl.training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.residency import StageSwap
from workflow_rl.training.reward_metrics import contribution_metrics, reward_metrics
from workflow_rl.training.update import StageUpdate, update_stage
from workflow_rl.training.weight_sync import WeightRole
from workflow_rl.workflow import StageOutput, StagePlan, Workflow, run_chain

COMPONENTS = "/reward_components"
"""Key of the state that names no stage: what a reward had logged, so that it always is."""


@dataclass(frozen=True)
class ChainSettings:
    """What holds for the whole chain.

    Parameters
    ----------
    credit_rule, normalisation, leave_one_out, advantage_clip
        See :func:`workflow_rl.training.credit.assign_credit`.
    combine, combine_over
        See :func:`workflow_rl.training.combine.combine_credit`.
    updates_per_iteration
        Optimiser steps per stage on one iteration's samples.
    c2_tolerance
        Largest |log-ratio| allowed before the first update.
    max_skipped_updates
        Non-finite updates of a stage in a row that end the run.
    keep_old_policy
        Keep a copy of the weights each rollout was made with, so that ``OLD_POLICY`` can be
        published.
    swap_stages
        Keep one stage on the computing device; the others sleep in the CPU's memory.
    seed
        Seed of the random SDE windows.
    """

    credit_rule: str = "shared"
    normalisation: Normalisation = "group"
    leave_one_out: bool = False
    advantage_clip: float | None = 5.0
    combine: Combine = "sum"
    combine_over: CombineOver = "prompt"
    updates_per_iteration: int = 1
    c2_tolerance: float = 0.0
    max_skipped_updates: int = 10
    keep_old_policy: bool = False
    swap_stages: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Iteration:
    """What one iteration made: kept until the next one, for galleries and inspection.

    ``rewards`` [P, n1, ..., nL] is the weighted sum of the raw scores; ``contributions`` is each
    reward's part in each stage's credit, see
    :class:`workflow_rl.training.combine.CombinedCredit`.
    """

    outputs: tuple[StageOutput, ...]
    scores: TreeScores
    credit: CreditResult
    rewards: torch.Tensor
    contributions: Sequence[Mapping[str, float]] = ()


class ChainRLMethod(TrainingMethod):
    """Trains every stage of a workflow from the reward of the last stage's output.

    One iteration: grow a tree of samples under each prompt through the served loop; score the
    leaves; give each stage its credit; one PPO-clip update per stage; publish the new weights.
    """

    def __init__(
        self,
        workflow: Workflow,
        policies: Sequence[StagePolicy],
        reward: CompositeReward,
        settings: ChainSettings,
    ) -> None:
        names = [policy.name for policy in policies]
        if names != [stage.name for stage in workflow.stages]:
            raise UserError(f"{workflow.workflow_id} needs its stages in order; got {names}")
        self.workflow = workflow
        self.policies = tuple(policies)
        self.reward = reward
        self.settings = settings
        self.last: Iteration | None = None
        self.on_progress: Callable[[str], OnProgress] | None = None
        self._swap = StageSwap(self.policies) if settings.swap_stages else None
        self._components: dict[str, None] = {}  # names of all that was ever logged, in order
        check_group_sizes(settings.credit_rule, self.branching)
        reward.check_stages({p.name: p.student.adapter.media_kind.value for p in self.policies})
        samples = dict(zip(names, self.branching, strict=True))
        trained = [policy.name for policy in self._trained()]
        if settings.credit_rule == "nested" and samples[names[0]] == 1 and names[0] in trained:
            raise UserError(
                f"stage {names[0]!r} makes 1 sample per prompt, which nested credit has nothing to "
                "compare with: use 2 or more, credit 'shared', or freeze the stage"
            )
        fault = credit_fault(reward.terms, samples, trained, settings.combine)
        if fault is not None:
            raise UserError(fault)

    @property
    def branching(self) -> tuple[int, ...]:
        """Samples per parent at each stage: (K, M) for two."""
        return tuple(policy.settings.plan.samples for policy in self.policies)

    def managed_train_step(
        self, batch: Batch, iteration: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Run one iteration.

        Parameters
        ----------
        batch
            ``prompts`` (str or PromptRecord) and ``seeds``, P of each.
        iteration
            0-based; part of the noise identity and of every schedule.

        Returns
        -------
        losses : dict
            ``{stage}_pg_loss``: PPO-clip loss, mean over samples and steps.
        metrics : dict
            ``reward_mean``, ``ppo_ratio_mean``, ``{stage}_weights_version``, each reward apart
            (:mod:`workflow_rl.training.reward_metrics`) and, per trained stage, ``loss/``, ``kl/``,
            ``clip_fraction/``, ``ratio_*/``, ``grad_norm/``, ``c2_*/``, ``lr/``,
            ``skipped_updates/`` (in a row) and ``skipped_updates_total/``: the same keys in every
            iteration. A frozen stage has no loss and none of these. ``kl/`` is NaN where nothing
            measured it: ``kl_weight`` is 0, or no sample was active.

        Raises
        ------
        C2Error
            If recomputed log-probs differ from the captured ones by more than the tolerance.
        WorkflowRLError
            After too many non-finite updates in a row.
        """
        prompts = [p if isinstance(p, PromptRecord) else PromptRecord(p) for p in batch["prompts"]]
        self.last = None  # its videos would be there beside those that are made now
        if self.settings.keep_old_policy:
            for policy in self._trained():
                policy.keep_old_policy()
        samples = {policy.name: policy.settings.plan.samples for policy in self.policies}
        with ChainScoring(self.reward, samples) as scoring:
            outputs = self._rollout(prompts, batch["seeds"], iteration, scoring.made)
            scores = scoring.finish(outputs)
        rewards = scores.total.reshape(len(prompts), *self.branching)
        combined = self._credit(scores, rewards.shape)
        credit = combined.credit
        self.last = Iteration(tuple(outputs), scores, credit, rewards, combined.contributions)
        updates = self._update(outputs, credit, iteration)
        losses = {
            f"{name}_pg_loss": torch.tensor(update.pg_loss) for name, update in updates.items()
        }
        return losses, self._metrics(updates)

    def wake(self, name: str) -> None:
        """Have stage ``name`` on the computing device before it works; who drives it calls this."""
        if self._swap is not None:
            self._swap.wake(name)

    def _trained(self) -> list[StagePolicy]:
        return [policy for policy in self.policies if not policy.settings.freeze]

    def _plan(self, policy: StagePolicy, iteration: int) -> StagePlan:
        settings = policy.settings
        if settings.freeze:
            return settings.plan
        steps = settings.window.steps(
            settings.plan.params.num_inference_steps, iteration, self.settings.seed
        )
        return replace(settings.plan, params=replace(settings.plan.params, sde_steps=steps))

    def _rollout(
        self,
        prompts: Sequence[PromptRecord],
        seeds: Sequence[int],
        iteration: int,
        on_made: Callable[[StageOutput], None],
    ) -> list[StageOutput]:
        return run_chain(
            self.workflow,
            {policy.name: policy.student for policy in self.policies},
            {policy.name: self._plan(policy, iteration) for policy in self.policies},
            prompts,
            seeds,
            profiles={policy.name: policy.profile() for policy in self.policies},
            draw=iteration,
            on_progress=self.on_progress,
            wake=self.wake,
            on_made=on_made,
        )

    def _credit(self, scores: TreeScores, shape: torch.Size) -> CombinedCredit:
        """Give each stage the credit of the rewards that are credited to it."""
        places = {policy.name: level for level, policy in enumerate(self.policies)}
        terms = []
        for label, term in zip(self.reward.labels, self.reward.terms, strict=True):
            stages = places if term.credit_to is None else term.credit_to
            levels = frozenset(places[stage] for stage in stages)
            values = scores.components[label].reshape(shape)
            terms.append(TermValues(label, values, term.weight, levels))
        settings = self.settings
        return combine_credit(
            terms,
            combine=settings.combine,
            over=settings.combine_over,
            rule=settings.credit_rule,
            settings=CreditSettings(
                settings.normalisation, settings.leave_one_out, settings.advantage_clip
            ),
        )

    def _update(
        self, outputs: Sequence[StageOutput], credit: CreditResult, iteration: int
    ) -> dict[str, StageUpdate]:
        updates = {}
        for policy, output, level in zip(self.policies, outputs, credit.levels, strict=True):
            if policy.settings.freeze or output.record is None:
                continue
            self.wake(policy.name)
            update = update_stage(
                policy,
                output.record,
                level.advantages.flatten(),
                level.active.flatten(),
                iteration=iteration,
                num_updates=self.settings.updates_per_iteration,
                c2_tolerance=self.settings.c2_tolerance,
            )
            if policy.settings.kl_weight == 0 or not bool(level.active.any()):
                update.metrics[f"kl/{policy.name}"] = math.nan  # nothing measured it
            if update.applied:
                policy.publish(WeightRole.STUDENT)
            if policy.skipped_in_a_row >= self.settings.max_skipped_updates:
                raise WorkflowRLError(
                    f"stage {policy.name!r}: {policy.skipped_in_a_row} updates in a row were not "
                    "finite; lower its learning rate or max_grad_norm, or use float32"
                )
            updates[policy.name] = update
        return updates

    def _metrics(self, updates: Mapping[str, StageUpdate]) -> dict[str, float]:
        if self.last is None:
            raise RuntimeError("there was no iteration")
        stages = [policy.name for policy in self.policies]
        self._components |= dict.fromkeys(self.last.scores.components)
        metrics = reward_metrics(self.last.scores, list(self._components))
        metrics |= contribution_metrics(self.last.contributions, stages)
        metrics |= variance_split(self.last.rewards, stages)
        for output in self.last.outputs:
            metrics[f"samples/{output.stage.name}"] = len(output.requests)
        for policy, level in zip(self.policies, self.last.credit.levels, strict=True):
            metrics[f"groups_skipped/{policy.name}"] = level.groups_skipped
            metrics[f"groups_flat/{policy.name}"] = level.groups_flat
            metrics[f"{policy.name}_weights_version"] = policy.version
        for update in updates.values():
            metrics |= update.metrics
        ratios = [update.ratio_mean for update in updates.values()]
        metrics["ppo_ratio_mean"] = sum(ratios) / len(ratios) if ratios else 1.0
        return metrics

    def get_grad_clip_targets(self) -> dict[str, nn.Module]:
        return {
            name: module
            for policy in self._trained()
            for name, module in policy.grad_clip_targets().items()
        }

    def state_tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for policy in self._trained():
            masters = policy.masters
            tensors |= {f"{policy.name}/weights/{n}": p.detach() for n, p in masters.items()}
            if policy.optimizer is not None:
                states = optimizer_tensors(policy.optimizer, masters)
                tensors |= {f"{policy.name}/{key}": value for key, value in states.items()}
            if policy.ema is not None:
                average = policy.ema.average
                tensors |= {f"{policy.name}/ema/{name}": value for name, value in average.items()}
        return tensors

    def state_values(self) -> dict[str, Any]:
        return {COMPONENTS: list(self._components)} | {
            policy.name: {
                "versions": policy.student.versions(),
                "ema_updates": policy.ema.num_updates if policy.ema is not None else 0,
                "skipped_in_a_row": policy.skipped_in_a_row,
                "skipped_total": policy.skipped_total,
                "versions_issued": policy.versions_issued,
            }
            for policy in self.policies
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        # Checkpoints written before it was kept lack it.
        self._components = dict.fromkeys(values.get(COMPONENTS, ()))
        for policy in self.policies:
            state = values[policy.name]
            for component, version in state["versions"].items():
                policy.student.set_weights_version(component, version)
            policy.skipped_in_a_row = state["skipped_in_a_row"]
            # Checkpoints written before these two were kept lack them.
            policy.skipped_total = state.get("skipped_total", 0)
            policy.versions_issued = state.get("versions_issued", policy.version)
            if not policy.settings.freeze:
                _load_policy(policy, tensors, state["ema_updates"])


def _load_policy(
    policy: StagePolicy, tensors: Mapping[str, torch.Tensor], ema_updates: int
) -> None:
    prefix = f"{policy.name}/"
    own = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    for name, master in policy.masters.items():
        master.copy_(own[f"weights/{name}"])
    policy.lower_masters()
    if policy.optimizer is not None:
        load_optimizer_tensors(policy.optimizer, policy.masters, own)
    if policy.ema is not None:
        policy.ema.num_updates = ema_updates
        for name, average in policy.ema.average.items():
            average.copy_(own[f"ema/{name}"])
