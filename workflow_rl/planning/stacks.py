"""Counting a deep transformer from a shallow one: of equal blocks each costs the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from workflow_rl.planning.measure import Cost

DEPTH = 3
"""Blocks that are counted of a longer stack of equal ones."""


def cost_of_stacks(module: nn.Module, count: Callable[[], Cost]) -> Cost:
    """Return ``count()``, the cost of a pass through ``module``, without passing every block.

    Each stack of more than `DEPTH` equal blocks is cut to that many; what one block more adds is
    the difference to a stack one shorter. FLOPs and what autograd keeps are exact. The peak grows
    by what is kept: exact if it lies in a block, above the truth if it lies outside.
    """
    stacks = equal_stacks(module)
    if not stacks:
        return count()
    depths = dict.fromkeys(stacks, DEPTH)
    with _cut(module, depths):
        base = count()
    flops, kept, peak = base.flops, base.kept, base.peak
    for name, blocks in stacks.items():
        with _cut(module, depths | {name: DEPTH - 1}):
            fewer = count()
        more = len(blocks) - DEPTH
        flops += more * (base.flops - fewer.flops)
        kept += more * (base.kept - fewer.kept)
        peak += more * (base.kept - fewer.kept)
    return Cost(flops, kept, peak)


def equal_stacks(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the lists of more than `DEPTH` blocks, alike in class and parameters, by name."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList)
        and len(child) > DEPTH
        and len({_signature(block) for block in child}) == 1
    }


def _signature(block: nn.Module) -> tuple[object, ...]:
    parameters = tuple(
        (name, p.shape, p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    return type(block), parameters


@contextmanager
def _cut(module: nn.Module, depths: Mapping[str, int]) -> Iterator[None]:
    whole = {name: module.get_submodule(name) for name in depths}
    try:
        for name, depth in depths.items():
            blocks = list(whole[name].children())
            setattr(module, name, nn.ModuleList(blocks[:depth]))
        yield
    finally:
        for name, blocks_ in whole.items():
            setattr(module, name, blocks_)
