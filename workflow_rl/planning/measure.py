"""FLOPs and memory of a computation, counted operation by operation on any device.

On the meta device nothing is computed and nothing is stored, but every operation still has its
shapes, so the figures are those of the real run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

aten = torch.ops.aten


def _attention_flops(
    query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kwargs: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(
    grad: torch.Size, query: torch.Size, key: torch.Size, value: torch.Size, *args: Any, **kw: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


ATTENTION_FLOPS: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(_attention_flops),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        _attention_backward_flops
    ),
}
"""What PyTorch's table lacks: the fused attention of the CPU, which meta runs too."""

FLOPS: Mapping[Any, Callable[..., int]] = {**flop_registry, **ATTENTION_FLOPS}
"""Operation → its FLOPs: matrix products, convolutions and attention, 2 per multiply-add."""


@contextmanager
def fused_attention() -> Iterator[None]:
    """Run scaled dot-product attention as the fused kernels do, which keep no attention matrix.

    PyTorch has no fused attention on the meta device and would build the matrix there, in shapes
    that no GPU run has. The function itself is exchanged, because a mode does not reach what
    gradient checkpointing recomputes inside the backward pass.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _fused_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    output: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return output


class Meter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of tensors that are made inside and still alive.

    Parameters, inputs and anything else made before are not counted. Views count once. The FLOPs
    are those of ``torch.utils.flop_counter.FlopCounterMode``, without its hooks on modules, which
    would keep tensors alive.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.now = 0
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {_key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in FLOPS:
            self.flops += FLOPS[packet](*args, **kwargs, out_val=result)
        self.take(tensor for tensor in _tensors(result) if _key(tensor) not in before)
        return result

    def take(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count ``tensors`` too, such as weights that a thread has loaded: a mode is a thread's."""
        for tensor in tensors:
            if _key(tensor) not in self._alive:
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def freed(_: Any) -> None:
            self.now -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _key(tensor: torch.Tensor) -> int:
    """Return what a tensor and all views of it have in common."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


@dataclass(frozen=True)
class Cost:
    """What one call costs.

    ``flops`` counts a multiply-add as 2. ``kept`` are bytes still held at the end of the forward
    pass (what autograd keeps for the backward pass, and the output), ``peak`` the most bytes alive
    at a time. Weights, inputs and gradients of weights are in neither.
    """

    flops: int = 0
    kept: int = 0
    peak: int = 0

    def twice(self) -> Cost:
        """Return the cost of two such passes in a row whose outputs, and graphs, live together."""
        return Cost(2 * self.flops, 2 * self.kept, self.kept + self.peak)


@contextmanager
def metered() -> Iterator[Meter]:
    """Count what is computed inside, with fused attention."""
    with fused_attention(), Meter() as meter:
        yield meter


def cost_without_grad(call: Callable[[], torch.Tensor]) -> Cost:
    """Return the cost of a call that keeps nothing for a backward pass."""
    with torch.no_grad(), metered() as meter:
        output = call()
        kept = meter.now
        del output
    return Cost(meter.flops, kept, meter.peak)


def cost_with_grad(
    call: Callable[[], torch.Tensor], parameters: Iterable[torch.nn.Parameter]
) -> Cost:
    """Return the cost of a call's forward and backward pass.

    Gradients of ``parameters`` are added to, as in every micro-batch but the first, and left None.
    """
    trained = list(parameters)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with metered() as meter:
        output = call()
        kept = meter.now
        torch.autograd.backward(output, torch.ones_like(output))
        del output
    for parameter in trained:
        parameter.grad = None
    return Cost(meter.flops, kept, meter.peak)
