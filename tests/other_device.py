"""A second device, so that what mixes devices fails on a machine without a GPU.

A tensor on :data:`OTHER` holds a CPU tensor that computes for it. As on CUDA, an operation whose
tensors are on two devices raises, unless it moves one, a lone value is combined with a tensor of
the device, or a tensor of the device is indexed by one of the CPU. Nothing reaches numpy or a list
of numbers without being asked for. Not simulated: streams, kernels, precision, checkpointed
gradients (the recomputation runs in a thread that knows nothing of this), and ``tensor.data = ``.

Autograd needs a device that PyTorch knows. ``import`` registers one, which
``torch.accelerator`` does not count as available.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from workflow_rl.platform import FLOW_SDE_STEP
from workflow_rl.platform.registry import Availability, Kernel, kernels

NAME = "other"
aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)
FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)


class _Unavailable(_DummyBackendModule):
    def is_available(self) -> bool:
        return False


_setup_privateuseone_for_python_backend(NAME, backend_module=_Unavailable())
OTHER = torch.device(NAME, 0)


class OtherTensor(torch.Tensor):
    """A tensor on :data:`OTHER`; ``held``, on the CPU, has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OtherTensor:
        self: OtherTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=OTHER,
        )
        self.held = held
        return self

    def __init__(self, held: torch.Tensor) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OtherTensor({self.held})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {OTHER} device type tensor to numpy; use Tensor.cpu() first"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without func
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Have tensors made on :data:`OTHER`, and the eager kernel run there."""
    eager = kernels.select(FLOW_SDE_STEP, "cpu").function
    kernel = Kernel(NAME, FLOW_SDE_STEP, {NAME: 0}, lambda _: Availability(True), lambda: eager)
    known = kernels._kernels[FLOW_SDE_STEP]
    known[NAME] = kernel
    try:
        with ExitStack() as modes:
            modes.enter_context(_Made())
            modes.enter_context(_MadeOfValues())
            yield OTHER
    finally:
        del known[NAME]


class _Made(TorchDispatchMode):
    """Makes what is asked for on the other device there: ``torch.zeros(2, device=OTHER)``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if _is_other(options.get("device")) or _others(args, options):
            return _run(func, args, options)
        return func(*args, **options)


class _MadeOfValues(TorchFunctionMode):
    """Makes tensors and indices of Python's numbers: PyTorch does it in C++."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        make: Callable[..., torch.Tensor] = func
        there = func in FROM_VALUES and _is_other(options.get("device"))
        if func is torch.Tensor.new_tensor and isinstance(args[0], OtherTensor):
            there, make = "device" not in options, torch.tensor
            options = {"dtype": args[0].dtype} | options
            args = args[1:]
        if func is torch.Tensor.__getitem__ and isinstance(args[0], OtherTensor):
            args = (args[0], tree_map(_as_index, args[1], is_leaf=lambda x: isinstance(x, list)))
        if not there:
            return make(*args, **options)
        options.pop("device", None)
        return make(*args, **options).to(OTHER)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation on the CPU tensors that are held; its results are where they belong."""
    others = _others(args, kwargs)
    if func not in MOVES:
        _refuse_mixed(func, args, kwargs)
    device = kwargs.get("device")
    there = bool(others) if device is None else _is_other(device)
    if func is aten.copy_.default:
        there = isinstance(args[0], OtherTensor)
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    if "pin_memory" in kwargs:
        kwargs["pin_memory"] = False
    held_args, held_kwargs = tree_map(
        lambda value: value.held if isinstance(value, OtherTensor) else value, (args, kwargs)
    )
    by_held = {id(tensor.held): tensor for tensor in others}

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in by_held:  # in place: the argument is the result
            return by_held[id(value)]
        # A lazy conjugate is a mark on the tensor, which its wrapper would not have.
        return OtherTensor(value.resolve_conj().resolve_neg()) if there else value

    return tree_map(place, func(*held_args, **held_kwargs))


def _refuse_mixed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise where CUDA would."""
    if func in INDEXED and isinstance(args[0], OtherTensor):
        args = (args[0], *args[2:])  # without the indices
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    others = [tensor for tensor in tensors if isinstance(tensor, OtherTensor)]
    cpu = [t for t in tensors if not isinstance(t, OtherTensor) and t.dim() > 0]
    if others and cpu:
        raise RuntimeError(
            f"{func}: expected all tensors to be on the same device, but found {OTHER} "
            f"({[tuple(t.shape) for t in others]}) and cpu ({[tuple(t.shape) for t in cpu]})"
        )


def _others(args: Any, kwargs: Mapping[str, Any]) -> list[OtherTensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OtherTensor)]


def _as_index(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, list) else value


def _is_other(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME
