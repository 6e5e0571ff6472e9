"""What makes a resident model smaller: gradient checkpointing, the VAE in parts, attention.

None of it changes what a model computes, but for the rounding that the docstrings tell of.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from workflow_rl.config.memory import MemoryConfig
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance

VAE = "vae"
_PROBE_SHAPE = (1, 16, 2, 64)
"""Batch, tokens, heads, head dimension of the attention that a backend is tried on."""


def apply_memory(instance: ModelInstance, memory: MemoryConfig) -> None:
    """Apply what ``memory`` asks of a loaded model.

    Raises
    ------
    UserError
        If the model cannot do it.
    """
    if memory.gradient_checkpointing:
        checkpoint_gradients(instance)
    if memory.vae_slicing:
        slice_vae(instance)
    if memory.vae_tiling:
        tile_vae(instance)
    if memory.attention_backend is not None:
        use_attention_backend(instance, memory.attention_backend)


def checkpoint_gradients(instance: ModelInstance) -> None:
    """Keep only the inputs of the policies' blocks for the backward pass (Chen et al. 2016).

    The blocks run a second time in the backward pass, with the same operations on the same inputs:
    gradients are equal. Forward passes without gradient are untouched, so rollout and recomputed
    log-probs stay equal to the bit.
    """
    for name in instance.card.policies:
        module: Any = instance.component(name)
        try:
            module.enable_gradient_checkpointing()
        except ValueError as error:
            raise UserError(
                f"{name} of {instance.card.model_id} cannot checkpoint gradients "
                f"({_one_line(error)}); set memory.gradient_checkpointing: false"
            ) from None


def slice_vae(instance: ModelInstance) -> None:
    """Encode and decode one sample at a time."""
    _enable(instance, "slicing")


def tile_vae(instance: ModelInstance) -> None:
    """Encode and decode in overlapping tiles.

    Up to the VAE's tile size the result is the same; above it, tiles see no further than their own
    edge and are blended where they overlap, which comes close.
    """
    _enable(instance, "tiling")


def _enable(instance: ModelInstance, what: Literal["slicing", "tiling"]) -> None:
    vae: Any = instance.component(VAE)
    refusal = UserError(
        f"the VAE of {instance.card.model_id} ({type(vae).__name__}) has no {what}; "
        f"set memory.vae_{what}: false"
    )
    try:
        if what == "slicing":
            vae.enable_slicing()
        else:
            vae.enable_tiling()
    except (AttributeError, NotImplementedError):
        raise refusal from None


def use_attention_backend(instance: ModelInstance, name: str) -> None:
    """Compute the attention of the policies with diffusers' backend ``name``.

    Raises
    ------
    UserError
        If diffusers knows no such backend, or it does not work on this machine.
    """
    from diffusers.models.attention_dispatch import attention_backend

    platform = instance.platform
    check_attention_backend(name, platform.device, platform.dtype, needs_gradient=False)
    for component in instance.card.policies:
        # Setting a module's backend also sets the process's default: that stays as it was, for
        # the models that did not ask for one.
        with attention_backend():
            module: Any = instance.component(component)
            module.set_attention_backend(name)


def check_attention_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    needs_gradient: bool,
    key: str = "attention_backend",
) -> None:
    """Try a backend on a small attention, before a model is loaded.

    Parameters
    ----------
    name
        As diffusers has it.
    device, dtype
        What the model will compute on and in.
    needs_gradient
        Try the backward pass too, which some backends lack.
    key
        Key of the configuration that names it, for messages.

    Raises
    ------
    UserError
        If diffusers knows no such backend, the package behind it is missing, it does not run on
        this device in this dtype, or it has no gradient where one is needed.
    """
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        attention_backend,
        dispatch_attention_fn,
    )

    known = sorted(backend.value for backend in AttentionBackendName)
    if name not in known:
        raise UserError(
            f"{key} {name!r} is none that diffusers knows; choose one of {', '.join(known)}"
        )
    query = torch.ones(_PROBE_SHAPE, device=device, dtype=dtype, requires_grad=needs_gradient)
    try:
        with attention_backend(name), torch.enable_grad():
            total = dispatch_attention_fn(query, query, query).sum()
            if needs_gradient:
                total.backward()
    except (RuntimeError, ValueError, TypeError, ImportError, OSError, AssertionError) as error:
        raise UserError(
            f"{key} {name!r} does not work here on {device} in {dtype} "
            f"({_one_line(error)}); choose another of {', '.join(known)}, or null"
        ) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
