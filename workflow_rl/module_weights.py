"""Weights of a module that was just loaded: all finite, and in memory of their own."""

from __future__ import annotations

import math
from itertools import chain
from typing import TypeVar

import torch
from torch import nn

from workflow_rl.errors import UserError

Module = TypeVar("Module", bound=nn.Module)


def check_finite(module: nn.Module, source: object) -> None:
    """Raise a UserError, naming the first, if a weight of ``module`` is NaN or infinite.

    Smallest and largest value tell: one pass over each tensor where it lies, without a copy.
    """
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.numel():
            smallest, largest = torch.aminmax(tensor)
            if not (math.isfinite(smallest) and math.isfinite(largest)):
                raise UserError(
                    f"{source}: the weight {name} holds NaN or infinity; download the model again, "
                    "or use another checkpoint"
                )


def own_memory(module: Module) -> Module:
    """Copy the weights that lie on the CPU, one tensor after the other, and return ``module``.

    What safetensors reads is a view of the file: without a copy, a file that is written again while
    the model is in use changes its weights, and one that gets shorter kills the process. A single
    tensor that was not cast also keeps the whole file in memory. And a view lies at any address:
    on some processors (an AMD EPYC was seen) a matrix at a multiple of 4 bytes, not of 16, gives
    other last bits than its copy, so that a stage that slept and woke would differ.
    """
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return module
