"""What this machine can compute on and with, tried before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from workflow_rl.config import StageConfig
from workflow_rl.errors import UserError

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(asked: str | None) -> torch.device:
    """Return the device that the configuration names; None: CUDA where there is one.

    Raises
    ------
    UserError
        If torch cannot put a tensor there and read it back.
    """
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=asked)
        probe.item()
    except (RuntimeError, AssertionError):  # an unknown name, an absent device, no support for it
        here = ", ".join(available_devices())
        raise UserError(
            f"training.device is {asked!r}, which this machine lacks; it has {here}: use one of "
            "these, or null for the first"
        ) from None
    return probe.device


def available_devices() -> list[str]:
    """Return the names of this machine's devices, the one that null chooses first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    count = torch.accelerator.device_count()
    return [f"{accelerator.type}:{index}" for index in range(count)] + ["cpu"]


def check_attention(stages: Mapping[str, StageConfig], device: torch.device) -> None:
    """Try the attention backends that the stages name.

    Raises
    ------
    UserError
        If one is unknown or does not work here.
    """
    asked = {
        name: stage for name, stage in stages.items() if stage.memory.attention_backend is not None
    }
    if not asked:
        return
    from workflow_rl.models.memory import check_attention_backend  # imports diffusers

    for name, stage in asked.items():
        check_attention_backend(
            str(stage.memory.attention_backend),
            device,
            DTYPES[stage.dtype],
            needs_gradient=not stage.freeze,
            key=f"stages.{name}.memory.attention_backend",
        )
