"""Publishing weights: which role, which components, into which instance, and was it whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from workflow_rl.errors import WorkflowRLError
from workflow_rl.instance import ModelInstance

Weights = Mapping[str, torch.Tensor]


class WeightRole(StrEnum):
    """Whose weights are published.

    ``STUDENT``: the trained policy. ``EMA``: its moving average. ``OLD_POLICY``: what the last
    rollout was made with. ``REFERENCE``: the frozen start.
    """

    STUDENT = "student"
    EMA = "ema"
    OLD_POLICY = "old_policy"
    REFERENCE = "reference"


@dataclass(frozen=True)
class WeightSyncPlan:
    """Publish ``components`` of ``role``; only their versions and caches are touched."""

    role: WeightRole
    components: tuple[str, ...] = ("transformer",)


@dataclass(frozen=True)
class Publication:
    """What a publication did. ``checksum`` is equal on both sides."""

    role: WeightRole
    components: tuple[str, ...]
    version: int
    num_tensors: int
    checksum: str


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""Integer type through which a tensor's bits are read, by element size in bytes."""


def weights_checksum(weights: Weights) -> str:
    """Return a digest of names, dtypes, shapes and every bit of the values.

    Each tensor contributes the sum of its words and a position-weighted sum (a Fletcher checksum),
    computed where the tensor lives, so that only two integers per tensor leave the device.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        words = tensor.reshape(-1).view(_WORDS[tensor.element_size()]).to(torch.int64)
        position = torch.arange(words.numel(), device=words.device) % 65521 + 1
        plain, weighted = int(words.sum()), int((words * position).sum())
        shape = tuple(tensor.shape)
        digest.update(f"{name}|{tensor.dtype}|{shape}|{plain}|{weighted}\n".encode())
    return digest.hexdigest()


@torch.no_grad()
def publish(
    plan: WeightSyncPlan,
    source: Mapping[str, Weights],
    target: ModelInstance,
    version: int | None = None,
) -> Publication:
    """Bind the weights of ``plan`` in ``target`` and give them a new version.

    Where source and target are the same tensors (training in place) nothing is copied.

    Parameters
    ----------
    source
        Component name to named tensors; names are those of the target component's parameters. A
        component may give a part of them (adapters).
    target
        The instance that serves.
    version
        Version to declare; None: one more than the target's highest among the components.

    Raises
    ------
    WorkflowRLError
        If no tensor of a component was bound, a name or a shape does not fit, or the checksum of
        what arrived differs from what was sent. The target keeps its weights and its version in
        every such case.
    """
    sent: dict[str, torch.Tensor] = {}
    received: dict[str, torch.Tensor] = {}
    for component in plan.components:
        weights = source.get(component, {})
        if not weights:
            raise WorkflowRLError(
                f"publication of {plan.role} bound no tensor of {component!r}; refused"
            )
        slots = dict(target.component(component).named_parameters())
        for name, tensor in weights.items():
            slot = _slot_for(component, name, tensor, slots)
            sent[f"{component}.{name}"] = tensor
            received[f"{component}.{name}"] = slot
    if not sent:
        raise WorkflowRLError(f"publication of {plan.role} names no component; refused")
    sent_sum = weights_checksum(sent)
    _transfer(sent, received, sent_sum, f"publication of {plan.role} to {target.card.model_id}")
    if version is None:
        version = 1 + max(target.version_of(component) for component in plan.components)
    for component in plan.components:
        target.set_weights_version(component, version)
    return Publication(plan.role, plan.components, version, len(sent), sent_sum)


def _transfer(sent: Weights, received: Weights, sent_sum: str, what: str) -> None:
    """Copy what is not the same memory; put everything back if it does not arrive whole."""
    moved = [key for key in sent if sent[key].data_ptr() != received[key].data_ptr()]
    kept = {key: received[key].detach().clone() for key in moved}
    try:
        for key in moved:
            received[key].copy_(sent[key])
        if moved and weights_checksum(received) != sent_sum:
            raise WorkflowRLError(
                f"{what}: the checksum of what arrived differs from what was sent; refused, "
                "weights and version are unchanged"
            )
    except (RuntimeError, WorkflowRLError):
        for key, before in kept.items():
            received[key].detach().copy_(before)
        raise


def _slot_for(
    component: str, name: str, tensor: torch.Tensor, slots: Mapping[str, torch.nn.Parameter]
) -> torch.nn.Parameter:
    slot = slots.get(name)
    if slot is None:
        raise WorkflowRLError(f"publication names {component}.{name}, which the target lacks")
    if slot.shape != tensor.shape or slot.dtype != tensor.dtype:
        raise WorkflowRLError(
            f"publication of {component}.{name}: sent {list(tensor.shape)} {tensor.dtype}, "
            f"the target holds {list(slot.shape)} {slot.dtype}"
        )
    return slot
