"""``FLOW_SDE_STEP``: one affine Gaussian step and its log-prob. The contract and its kernels.

With per-sample coefficients, every sampler step of this project is

    mean     = a x + b velocity
    sample   = mean + s noise                  (rounded to x's dtype)
    log_prob = -w <(sample - mean)^2> - c      (<> is the mean over a sample's elements)

The log-prob is that of the sample as a constant: its gradient is the policy gradient's. ``sample``
and ``mean`` are differentiable as they stand.
A Gaussian has w = 1 / (2 s^2) and c = log s + log(2 pi) / 2.

A kernel is a function with the signature of :class:`FlowSDEStep`.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

from workflow_rl.platform.registry import Availability, Kernel, KernelOp, kernels

if TYPE_CHECKING:
    import torch

FLOW_SDE_STEP = KernelOp(name="flow_sde_step", reference="numpy_reference")


class FlowSDEStepResult(NamedTuple):
    """``sample`` [B, ...] in x's dtype; ``log_prob`` [B] and ``mean`` [B, ...] in float32, or
    in float64 when an input is."""

    sample: torch.Tensor
    log_prob: torch.Tensor
    mean: torch.Tensor


class FlowSDEStep(Protocol):
    """Signature of a kernel.

    Parameters
    ----------
    x_t, velocity
        State and velocity, [B, ...], any floating dtype: both are first cast to float32 or better.
    x_coef_B, velocity_coef_B, std_B
        a, b and s of each sample, [B].
    weight_B, offset_B
        w and c of each sample, [B]. Both 0: no log-prob (0, with gradient 0).
    noise
        Standard normal noise [B, ...]. None, as well as ``prev_sample``: the sample is the mean.
    prev_sample
        The sample whose log-prob is asked for, [B, ...]; it is returned as it is.
    mask
        Boolean, [B, ...]: True where the latent is sampled, False where it is given. Given ones
        keep x's value (in ``mean`` too), get no noise and stay out of the log-prob, which is 0
        where none is left.
    """

    def __call__(
        self,
        x_t: torch.Tensor,
        velocity: torch.Tensor,
        x_coef_B: torch.Tensor,
        velocity_coef_B: torch.Tensor,
        std_B: torch.Tensor,
        weight_B: torch.Tensor,
        offset_B: torch.Tensor,
        noise: torch.Tensor | None,
        prev_sample: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> FlowSDEStepResult: ...


def _reference_availability(device: str) -> Availability:
    return Availability(True)


def _torch_availability(device: str) -> Availability:
    if find_spec("torch") is None:
        return Availability(False, "PyTorch is not installed")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            return Availability(False, "PyTorch sees no CUDA device")
    return Availability(True)


def _compile_availability(device: str) -> Availability:
    """Probe for the compiler that ``torch.compile`` would call; compiles nothing."""
    usable = _torch_availability(device)
    if not usable.ok:
        return usable
    if device == "cuda":
        if find_spec("triton") is None:
            return Availability(False, "torch.compile needs triton, which is not installed")
        return Availability(True)
    from torch._inductor import config

    chosen = config.cpp.cxx
    candidates = [chosen] if isinstance(chosen, str) else [name for name in chosen if name]
    if any(shutil.which(name) for name in candidates):
        return Availability(True)
    return Availability(
        False, f"torch.compile needs a C++ compiler, none of {', '.join(candidates)} is on PATH"
    )


def _build_reference() -> FlowSDEStep:
    from workflow_rl.platform.flow_sde_reference import flow_sde_step

    return flow_sde_step


def _build_eager() -> FlowSDEStep:
    from workflow_rl.platform.flow_sde_torch import eager_kernel

    return eager_kernel()


def _build_compiled() -> FlowSDEStep:
    from workflow_rl.platform.flow_sde_torch import compiled_kernel

    return compiled_kernel()


kernels.register(
    Kernel(
        name="numpy_reference",
        op=FLOW_SDE_STEP,
        priorities={"cpu": 0},
        availability=_reference_availability,
        build=_build_reference,
    )
)
kernels.register(
    Kernel(
        name="torch_eager",
        op=FLOW_SDE_STEP,
        priorities={"cpu": 20, "cuda": 10},
        availability=_torch_availability,
        build=_build_eager,
    )
)
kernels.register(
    Kernel(
        name="torch_compile",
        op=FLOW_SDE_STEP,
        priorities={"cpu": 10, "cuda": 20},
        availability=_compile_availability,
        build=_build_compiled,
    )
)
