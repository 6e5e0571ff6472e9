"""One update of one stage from a behaviour record: the C2 gate, the loss, the optimiser step."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace

import torch
from torch.nn.utils import clip_grad_norm_

from workflow_rl.errors import WorkflowRLError
from workflow_rl.evaluation.finite import finite_record
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.loop.sampler import gaussian_log_ratio
from workflow_rl.training.objective import STEP_WEIGHTINGS, gaussian_kl, ppo_clip_loss
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import recompute
from workflow_rl.training.weight_sync import weights_checksum


class C2Error(WorkflowRLError):
    """Recomputed log-probs differ from the captured ones: the update would be off-policy."""


class TrainsNothingError(WorkflowRLError):
    """The first update left the served model as it was: the run would train nothing."""


@dataclass
class LargestLogRatio:
    """The C2 gate's figure: the largest |log-ratio| before the first update, and where it was."""

    value: float = 0.0
    step: int | None = None
    sample: str | None = None

    def see(
        self, log_ratio: torch.Tensor, step: int, record: BehaviourRecord, finite: torch.Tensor
    ) -> None:
        """Take in the log-ratios [B] of one step, of the samples that are ``finite`` [B]."""
        log_ratio = torch.where(finite, log_ratio, 0.0)
        row = int(log_ratio.abs().nan_to_num(nan=math.inf).argmax())
        found = abs(float(log_ratio[row]))
        if math.isnan(found) or found > self.value:
            self.value, self.step, self.sample = found, step, str(record.samples[row])

    def check(self, tolerance: float, stage: str) -> None:
        """Raise C2Error if the largest value is past ``tolerance``."""
        if self.value <= tolerance:
            return
        raise C2Error(
            f"stage {stage!r}, step {self.step}, sample {self.sample}: the log-prob recomputed for "
            f"training differs from the rollout's by {self.value:.3g} (c2_tolerance "
            f"{tolerance:g}); use the same batch size in both (micro_batch_size: null) or raise "
            "the tolerance"
        )


@dataclass
class StepStatistics:
    """Sums over the active samples and steps of one pass."""

    count: int = 0
    loss: float = 0.0
    kl: float = 0.0
    clipped: int = 0
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf

    def add(
        self, loss: torch.Tensor, kl: torch.Tensor, ratio: torch.Tensor, ppo_clip: float
    ) -> None:
        """Take in per-sample values [B] of one step."""
        self.count += len(ratio)
        self.loss += float(loss.sum())
        self.kl += float(kl.sum())
        self.clipped += int(((ratio - 1).abs() > ppo_clip).sum())
        self.ratio_sum += float(ratio.sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))

    def means(self) -> tuple[float, float]:
        """Return the mean loss and the mean ratio: 0 and 1 where no sample was active."""
        if self.count == 0:
            return 0.0, 1.0
        return self.loss / self.count, self.ratio_sum / self.count


@dataclass
class StageUpdate:
    """What an update did. ``metrics`` are keyed ``name/stage``; the keys are always the same."""

    pg_loss: float = 0.0
    ratio_mean: float = 1.0
    applied: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


def update_stage(
    policy: StagePolicy,
    record: BehaviourRecord,
    advantages: torch.Tensor,
    active: torch.Tensor,
    *,
    iteration: int,
    num_updates: int,
    c2_tolerance: float,
) -> StageUpdate:
    """Train one stage on one iteration's record.

    Parameters
    ----------
    record
        N samples, rolled out with the current weights.
    advantages, active
        [N]. Samples that are not active enter no loss (their group gives no credit); if none is,
        nothing is updated and not one bit moves. Samples that are not finite are never active,
        and the C2 gate does not see them.
    num_updates
        Optimiser steps on this record; the ratio is 1 in the first.
    c2_tolerance
        Largest |log-ratio| allowed before the first update.

    Raises
    ------
    C2Error
        Before any update, if the recomputed log-probs differ by more than the tolerance.
    TrainsNothingError
        If no weight that trains acts on a step's output; after the first update of a component in
        a run, if it trained nothing.
    """
    name = policy.name
    result = StageUpdate(metrics=_metrics(StepStatistics(), 0.0, name))
    result.metrics[f"c2_max_log_ratio/{name}"] = 0.0
    finite = finite_record(record)
    for update in range(num_updates if bool(finite.any()) else 0):
        gate = LargestLogRatio()
        statistics = accumulate_gradients(policy, record, advantages, active, finite, gate)
        if update == 0:
            result.metrics[f"c2_max_log_ratio/{name}"] = gate.value
            gate.check(c2_tolerance, name)
        if statistics.count == 0:
            break
        unseen = {step.component for step in record.steps} - policy.updated_components
        grad_norm = apply_gradients(policy, statistics, unseen, iteration)
        if unseen & policy.updated_components:
            check_output_changed(policy, record, finite, unseen)
        result.applied |= policy.skipped_in_a_row == 0
        result.pg_loss, result.ratio_mean = statistics.means()
        result.metrics |= _metrics(statistics, grad_norm, name)
    result.metrics[f"lr/{name}"] = policy.settings.optimizer.lr_at(iteration)
    result.metrics[f"skipped_updates/{name}"] = policy.skipped_in_a_row
    result.metrics[f"skipped_updates_total/{name}"] = policy.skipped_total
    return result


def accumulate_gradients(
    policy: StagePolicy,
    record: BehaviourRecord,
    advantages: torch.Tensor,
    active: torch.Tensor,
    finite: torch.Tensor,
    gate: LargestLogRatio,
) -> StepStatistics:
    """Add the gradient of the mean loss over active samples and steps, micro-batch by micro-batch.

    The result does not depend on the micro-batch size: each sample's loss is divided by the total
    count. Batches keep their inactive samples, with weight 0, so that shapes match the rollout's.
    At least one of ``finite`` [N] must be True: it stands in for those that are not, because in a
    backward pass 0 * NaN is NaN.
    """
    settings = policy.settings
    size = settings.micro_batch_size or settings.plan.slots
    record, active = with_stand_ins(record, finite), active & finite
    total = int(active.sum()) * len(record.steps)
    statistics = StepStatistics()
    for parameter in policy.parameters().values():
        parameter.grad = None
    for start in range(0, len(record), size):
        rows = record.rows(start, start + size)
        part = slice(start, start + size)
        _accumulate_rows(
            policy, rows, advantages[part], active[part], finite[part], total, gate, statistics
        )
    return statistics


def with_stand_ins(record: BehaviourRecord, finite: torch.Tensor) -> BehaviourRecord:
    """Return the record with the first finite sample in place of each that is not.

    With all of ``finite`` [N] True it is the record itself.
    """
    if bool(finite.all()):
        return record
    source = torch.where(finite, torch.arange(len(finite)), int(finite.int().argmax()))
    return replace(
        record,
        conditioning=tuple(record.conditioning[row] for row in source.tolist()),
        steps=tuple(
            replace(
                step,
                prev=step.prev[source],
                sample=step.sample[source],
                mean=step.mean[source],
                std=step.std[source],
                sde_logprob=step.sde_logprob[source],
            )
            for step in record.steps
        ),
    )


def _accumulate_rows(
    policy: StagePolicy,
    rows: BehaviourRecord,
    advantages: torch.Tensor,
    active: torch.Tensor,
    finite: torch.Tensor,
    total: int,
    gate: LargestLogRatio,
    statistics: StepStatistics,
) -> None:
    settings = policy.settings
    device = policy.student.platform.device
    weigh = STEP_WEIGHTINGS[settings.step_weighting]
    advantage, mask, trusted = advantages.to(device), active.to(device), finite.to(device)
    trains = bool(active.any())
    sampled = None if rows.mask is None else rows.mask.to(device)
    reference_means = _reference_means(policy, rows) if trains else []
    with torch.set_grad_enabled(trains):
        for index, (recorded, now) in enumerate(recompute(policy.student, rows)):
            mean_old, std = recorded.mean.to(device), recorded.std.to(device)
            sample = recorded.sample.to(device)
            log_ratio = gaussian_log_ratio(now.mean, mean_old, sample, std, mask=sampled)
            gate.see(log_ratio.detach(), recorded.index, rows, trusted)
            if not trains:
                continue
            weight = weigh(std)
            loss, ratio = ppo_clip_loss(weight * log_ratio, advantage, settings.ppo_clip)
            kl = torch.zeros_like(loss)
            if reference_means:
                kl = gaussian_kl(now.mean, reference_means[index], std, sampled)
            objective = loss + settings.kl_weight * weight * kl
            if not objective.requires_grad:
                raise TrainsNothingError(
                    f"stage {policy.name!r}: no weight of {recorded.component} that trains acts on "
                    f"its output; name other layers in {_trained_key(policy)}"
                )
            (objective[mask].sum() / total).backward()
            loss, kl, ratio = (values.detach()[mask] for values in (loss, kl, ratio))
            statistics.add(loss, kl, ratio, settings.ppo_clip)


@torch.no_grad()
def _reference_means(policy: StagePolicy, rows: BehaviourRecord) -> list[torch.Tensor]:
    """Return the reference's mean of each step; empty where the KL has no weight."""
    if policy.settings.kl_weight == 0:
        return []
    with policy.as_reference() as reference:
        return [now.mean for _, now in recompute(reference, rows)]


def apply_gradients(
    policy: StagePolicy, statistics: StepStatistics, unseen: Set[str], iteration: int
) -> float:
    """Clip, then step the optimiser and the EMA; skip and count if anything is not finite.

    Parameters
    ----------
    unseen
        Components that made the samples and have had no update in this run.

    Returns
    -------
    float
        The gradient norm before clipping.

    Raises
    ------
    TrainsNothingError
        After a component's first step, if it trained nothing: see :func:`check_first_update`.
    """
    if policy.optimizer is None:
        raise RuntimeError(f"stage {policy.name!r} is frozen")
    policy.raise_gradients()
    norms = {
        component: float(clip_grad_norm_(masters, policy.settings.max_grad_norm))
        for component, masters in policy.masters_by_component().items()
    }
    norm = math.hypot(*norms.values())
    if not (math.isfinite(norm) and math.isfinite(statistics.loss + statistics.kl)):
        policy.skipped_in_a_row += 1
        policy.skipped_total += 1
        policy.drop_gradients()
        return norm
    policy.skipped_in_a_row = 0
    before = {component: _checksum(policy, component) for component in unseen}
    for group in policy.optimizer.param_groups:
        group["lr"] = policy.settings.optimizer.lr_at(iteration)
    policy.optimizer.step()
    policy.drop_gradients()
    policy.lower_masters()
    for component, checksum in before.items():
        check_first_update(policy, component, norms[component], checksum)
        policy.updated_components.add(component)
    if policy.ema is not None:
        policy.ema.update(policy.masters)
    return norm


def _checksum(policy: StagePolicy, component: str) -> str:
    """Return the checksum of what trains of a component."""
    parameters = policy.parameters().items()
    return weights_checksum({k: p for k, p in parameters if k.partition(".")[0] == component})


def check_first_update(policy: StagePolicy, component: str, norm: float, before: str) -> None:
    """Fail a run that trains nothing at a component's first update: later nobody would notice.

    Of a new LoRA's gradient only B's part is not 0, because B = 0.

    Parameters
    ----------
    norm
        Gradient norm of the component, which made some of the samples.
    before
        Checksum of its served weights before the update.

    Raises
    ------
    TrainsNothingError
        If the component got no gradient, or not one bit of its served weights changed.
    """
    if norm == 0:
        raise TrainsNothingError(
            f"stage {policy.name!r}: the first update gave {component} a gradient of 0, so it "
            f"trains nothing; name layers in {_trained_key(policy)} that act on its output"
        )
    if _checksum(policy, component) == before:
        raise TrainsNothingError(
            f"stage {policy.name!r}: the first update changed no weight of {component} that is "
            f"served, with learning rate {policy.settings.optimizer.lr:g}; raise optimizer.lr"
        )


@torch.no_grad()
def check_output_changed(
    policy: StagePolicy, record: BehaviourRecord, finite: torch.Tensor, components: Set[str]
) -> None:
    """Fail a run if a component's first update leaves the served model's output as it was.

    Parameters
    ----------
    record, finite
        What the weights before the update made, and which samples [N] of it are finite.
    components
        Those that had their first update.

    Raises
    ------
    TrainsNothingError
        If not one step mean that a component has a part in, of the rollout's first batch, is
        another.
    """
    rows = with_stand_ins(record, finite).rows(0, policy.settings.plan.slots)
    unchanged = set(components)
    for recorded, now in recompute(policy.student, rows):
        if not torch.equal(now.mean.to(recorded.mean.device), recorded.mean):
            unchanged.discard(recorded.component)
        if not unchanged:
            return
    raise TrainsNothingError(
        f"stage {policy.name!r}: the first update changed weights of {min(unchanged)}, but not "
        f"the output of the model that is served, with learning rate "
        f"{policy.settings.optimizer.lr:g}; raise optimizer.lr, or name layers in "
        f"{_trained_key(policy)} that act on the output"
    )


def _trained_key(policy: StagePolicy) -> str:
    """Return the configuration key that chooses what trains."""
    return "lora.targets" if policy.has_lora else "train_modules"


def _metrics(sums: StepStatistics, grad_norm: float, name: str) -> dict[str, float]:
    """Return one pass's metrics; with no active sample: no loss, no gradient, ratios of 1."""
    loss, ratio_mean = sums.means()
    count = max(1, sums.count)
    return {
        f"loss/{name}": loss,
        f"kl/{name}": sums.kl / count,
        f"clip_fraction/{name}": sums.clipped / count,
        f"ratio_min/{name}": sums.ratio_min if sums.count else 1.0,
        f"ratio_mean/{name}": ratio_mean,
        f"ratio_max/{name}": sums.ratio_max if sums.count else 1.0,
        f"grad_norm/{name}": grad_norm,
    }
