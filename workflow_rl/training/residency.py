"""Which stage's tensors are on the computing device: while one works, the others sleep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from workflow_rl.instance import ModelInstance
from workflow_rl.training.policy import StagePolicy

STEP = "step"
"""Optimiser state that torch keeps on the CPU whatever the parameter's device."""


class StageSwap:
    """Keeps one stage awake on the computing device; the others sleep in the CPU's memory.

    Everything of a stage moves: student, reference, float32 masters, optimiser states, averages.
    The bits are copied and the tensor objects stay, so that optimisers, caches and versions know
    nothing of it. Embeddings that are cached stay where they are.

    Parameters
    ----------
    policies
        The stages, awake or asleep.
    sleep_device
        Where they sleep.
    """

    def __init__(self, policies: Sequence[StagePolicy], sleep_device: str = "cpu") -> None:
        self._policies = {policy.name: policy for policy in policies}
        self._sleep_device = torch.device(sleep_device)
        self._awake: str | None = None
        for policy in policies:
            send_to_sleep(policy, self._sleep_device)

    @property
    def awake(self) -> str | None:
        """Name of the stage that is on the computing device."""
        return self._awake

    def wake(self, name: str) -> None:
        """Have stage ``name`` on its device, and every other asleep."""
        if name == self._awake:
            return
        if self._awake is not None:
            send_to_sleep(self._policies[self._awake], self._sleep_device)
            self._awake = None
        policy = self._policies[name]
        _move(policy, policy.student.platform.device)
        self._awake = name


def send_to_sleep(policy: StagePolicy, device: torch.device | str = "cpu") -> None:
    """Move everything that a stage holds to ``device``."""
    _move(policy, torch.device(device))


@torch.no_grad()
def _move(policy: StagePolicy, device: torch.device) -> None:
    """Give every tensor of a stage a copy of its values on ``device``; objects stay the same.

    Copies to and from a GPU go through page-locked memory, whose allocator keeps it for the next
    time.
    """
    pinned = device.type == "cpu" and policy.student.platform.device.type == "cuda"
    for tensor in _tensors(policy):
        if pinned:
            there = torch.empty_like(tensor, device=device, pin_memory=True)
            tensor.data = there.copy_(tensor, non_blocking=True)
        else:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)
    if policy.student.platform.device.type == "cuda":
        torch.cuda.synchronize(policy.student.platform.device)


def _tensors(policy: StagePolicy) -> list[torch.Tensor]:
    """Return every tensor that a stage holds, each object once."""
    held = [*_weights(policy.student), *policy.masters.values()]
    if policy.reference is not None:
        held += _weights(policy.reference)
    if policy.ema is not None:
        held += policy.ema.average.values()
    if policy.old_policy is not None:
        held += policy.old_policy.values()
    if policy.optimizer is not None:
        for state in policy.optimizer.state.values():
            held += [t for name, t in state.items() if name != STEP]
    grads = [tensor.grad for tensor in held if tensor.grad is not None]
    return list({id(tensor): tensor for tensor in [*held, *grads]}.values())


def _weights(instance: ModelInstance) -> Iterator[torch.Tensor]:
    for module in instance.adapter.modules.values():
        yield from module.parameters()
        yield from module.buffers()
