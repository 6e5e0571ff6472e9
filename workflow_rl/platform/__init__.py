"""Interchangeable kernels: one operation, several implementations, chosen by device or by name.

Importing this package does not import PyTorch.
"""

from workflow_rl.platform.flow_sde_step import FLOW_SDE_STEP, FlowSDEStepResult
from workflow_rl.platform.registry import (
    Availability,
    Kernel,
    KernelOp,
    KernelRegistry,
    KernelRow,
    kernels,
)

__all__ = [
    "FLOW_SDE_STEP",
    "Availability",
    "FlowSDEStepResult",
    "Kernel",
    "KernelOp",
    "KernelRegistry",
    "KernelRow",
    "kernels",
]
