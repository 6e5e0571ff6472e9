"""The kernel registry: which implementations of an operation exist, and which one to use here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workflow_rl.errors import UserError


class Availability(NamedTuple):
    """Whether a kernel can run on a device of this machine; ``reason`` says why not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class KernelOp:
    """An operation that several kernels implement with the same signature and the same result.

    ``reference`` names the kernel that all others are compared with.
    """

    name: str
    reference: str


@dataclass(frozen=True)
class Kernel:
    """One implementation of an operation.

    Parameters
    ----------
    name
        What the config and the behaviour record call it.
    op
        The operation it implements.
    priorities
        Device type (``"cpu"``, ``"cuda"``) to priority, for the devices it supports. The available
        kernel of the highest priority is a device's default.
    availability
        Says whether the kernel can run on a device type of this machine; cheap, builds nothing.
    build
        Imports what the kernel needs and returns its function; called once, on first use.
    """

    name: str
    op: KernelOp
    priorities: Mapping[str, int]
    availability: Callable[[str], Availability]
    build: Callable[[], Callable[..., Any]]

    def available_on(self, device: str) -> Availability:
        """Say whether the kernel can run on ``device`` here."""
        if device not in self.priorities:
            return Availability(False, f"has no {device} implementation")
        return self.availability(device)


class SelectedKernel(NamedTuple):
    """A kernel that is available on the device it was selected for, ready to be called."""

    name: str
    function: Callable[..., Any]


class KernelRow(NamedTuple):
    """One line of the listing: a kernel on a device type, and whether it runs here."""

    op: str
    kernel: str
    device: str
    available: bool
    default: bool
    reason: str


@dataclass
class KernelRegistry:
    """All kernels of all operations."""

    _kernels: dict[KernelOp, dict[str, Kernel]] = field(default_factory=dict)
    _built: dict[tuple[KernelOp, str], Callable[..., Any]] = field(default_factory=dict)

    def register(self, kernel: Kernel) -> None:
        """Add a kernel.

        Raises
        ------
        ValueError
            If the operation has a kernel of that name, or if two of its kernels have the same
            priority on a device (the default would depend on the order of registration).
        """
        known = self._kernels.setdefault(kernel.op, {})
        if kernel.name in known:
            raise ValueError(f"{kernel.op.name} already has a kernel {kernel.name!r}")
        for other in known.values():
            for device, priority in kernel.priorities.items():
                if other.priorities.get(device) == priority:
                    raise ValueError(
                        f"{kernel.op.name} kernels {other.name!r} and {kernel.name!r} both have "
                        f"priority {priority} on {device}"
                    )
        known[kernel.name] = kernel

    def names(self, op: KernelOp) -> tuple[str, ...]:
        """Return the names of the operation's kernels, whether or not they can run here."""
        return tuple(self._kernels.get(op, {}))

    def select(self, op: KernelOp, device: str, name: str | None = None) -> SelectedKernel:
        """Return the kernel ``name``, or without a name the device's default.

        Parameters
        ----------
        device
            Device type: ``"cpu"``, ``"cuda"``.

        Raises
        ------
        UserError
            If there is no kernel of that name, it cannot run here, or none can.
        """
        known = self._kernels.get(op, {})
        if name is None:
            kernel = self._default(op, device)
            if kernel is None:
                supported = sorted({d for k in known.values() for d in k.priorities})
                raise UserError(
                    f"no kernel of {op.name} runs on device {device!r} here; "
                    f"use one of {', '.join(supported)}, or see `workflow-rl kernels`"
                )
        else:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UserError(
                    f"unknown kernel {name!r} for {op.name}, known are {', '.join(known)}{hint}"
                )
            kernel = known[name]
            available = kernel.available_on(device)
            if not available.ok:
                raise UserError(
                    f"kernel {name!r} of {op.name} cannot run on {device}: {available.reason}; "
                    "choose another, see `workflow-rl kernels`"
                )
        return SelectedKernel(kernel.name, self._function(kernel))

    def list(self) -> list[KernelRow]:
        """Return a row per kernel and device type; unavailable ones say why."""
        rows = []
        for op, known in self._kernels.items():
            devices = sorted({device for kernel in known.values() for device in kernel.priorities})
            defaults = {device: self._default(op, device) for device in devices}
            for kernel in known.values():
                for device in sorted(kernel.priorities):
                    ok, reason = kernel.available_on(device)
                    is_default = defaults[device] is kernel
                    rows.append(KernelRow(op.name, kernel.name, device, ok, is_default, reason))
        return rows

    def _default(self, op: KernelOp, device: str) -> Kernel | None:
        able = [k for k in self._kernels.get(op, {}).values() if k.available_on(device).ok]
        return max(able, key=lambda kernel: kernel.priorities[device], default=None)

    def _function(self, kernel: Kernel) -> Callable[..., Any]:
        key = (kernel.op, kernel.name)
        if key not in self._built:
            self._built[key] = kernel.build()
        return self._built[key]


kernels = KernelRegistry()
