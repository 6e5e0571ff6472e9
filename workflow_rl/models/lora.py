"""LoRA adapters on a resident model, through peft: attaching, counting, switching off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import (
    LoRALayout,
    check_lora,
    lora_layout,
    module_of,
    usable_alpha,
)
from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.instance import ModelInstance

ADAPTER_NAME = "default"
"""Name of the adapter in peft; also what diffusers' saving helpers expect."""


def check_card_lora(card: ModelCard, lora: LoRAConfig, where: str) -> None:
    """Raise a UserError if ``lora`` does not fit the model, before its weights are loaded."""
    index = read_model_index(card.source)
    defaults = FAMILIES[index["_class_name"]].lora_targets
    check_lora(card.source, index, defaults, lora, where)


def attach_lora(
    instance: ModelInstance, lora: LoRAConfig, *, where: str = "lora", seed: int = 0
) -> None:
    """Put adapters beside linear layers of every policy component of ``instance``.

    The base weights keep their dtype and stay frozen. The adapters are float32 whatever the base
    is; peft's layer computes ``base(x) + (alpha / rank) B A x`` in float32 and returns the base's
    dtype. A new adapter has B = 0, so the model's output does not change.

    Parameters
    ----------
    lora
        Rank, alpha, layers, and the LoRA to start from.
    where
        Configuration key, for messages.
    seed
        Seed of A's initial values, which are drawn on the CPU: the same on every device.

    Raises
    ------
    UserError
        If the targets name no linear layer, or ``lora.init`` is not a LoRA for this model or has
        another rank.
    """
    index = read_model_index(instance.card.source)
    defaults = FAMILIES[index["_class_name"]].lora_targets
    policies = instance.card.policies
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for component in policies:
            module = instance.component(component)
            linears = {
                name: tuple(layer.weight.shape)
                for name, layer in module.named_modules()
                if isinstance(layer, nn.Linear)
            }
            layout = lora_layout(lora, linears, defaults, component, policies, where)
            _inject(module, layout, where)


def _inject(module: Any, layout: LoRALayout, where: str) -> None:
    """Attach the adapters of ``layout`` to a diffusers transformer, fill them, and count them."""
    from peft import LoraConfig

    start = start_of(layout)
    module.add_adapter(
        LoraConfig(
            r=layout.rank,
            lora_alpha=alpha_of(layout, start, where),
            target_modules=list(layout.modules),
            init_lora_weights="gaussian",
        ),
        adapter_name=ADAPTER_NAME,
    )
    parameters = lora_parameters(module)
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    adapted = {name.rpartition(".lora_")[0] for name in parameters}
    if adapted != set(layout.modules):
        raise WorkflowRLError(
            f"{where}: {len(layout.modules)} layers were to get an adapter and {len(adapted)} have "
            "one; name them by longer endings in targets"
        )
    if layout.file is not None:
        _fill(parameters, start, f"{where}.init: {layout.file}")
    module.eval().requires_grad_(False)


def start_of(layout: LoRALayout) -> dict[str, torch.Tensor]:
    """Return the tensors that the adapters start from, by the names in their file; none: {}."""
    return {} if layout.file is None else load_file(str(layout.file))


def alpha_of(layout: LoRALayout, start: Mapping[str, torch.Tensor], where: str) -> float:
    """Return alpha as diffusers reads it: the header's, the ``alpha`` tensors', else the rank.

    Raises
    ------
    UserError
        If the file that the adapters start from has several, or one that no adapter works with.
    """
    what = f"{where}.init: {layout.file}"
    alphas = [
        usable_alpha(tensor.squeeze().tolist(), what)
        for key, tensor in start.items()
        if key.endswith(".alpha")
    ]
    found = set(alphas)
    if 0 < len(alphas) < len(layout.modules):
        found.add(float(layout.rank))
    if layout.alpha is not None:
        found.add(layout.alpha)
    if len(found) > 1:
        raise UserError(
            f"{what} has several alphas "
            f"({', '.join(f'{alpha:g}' for alpha in sorted(found))}); use a LoRA with one"
        )
    return found.pop() if found else float(layout.rank)


def _fill(
    parameters: Mapping[str, nn.Parameter], start: Mapping[str, torch.Tensor], what: str
) -> None:
    """Copy a file's A and B into the adapters; layers and shapes have been found equal."""
    filled = set()
    for key, tensor in start.items():
        layer_and_part = module_of(key)
        if layer_and_part is None or layer_and_part[1] == "alpha":
            continue
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{what}: {key} is not finite; use another file")
        layer, part = layer_and_part
        name = f"{layer}.{part.removesuffix('.weight')}.{ADAPTER_NAME}.weight"
        parameters[name].data.copy_(tensor)
        filled.add(name)
    if filled != parameters.keys():
        raise WorkflowRLError(f"{what} filled {len(filled)} of {len(parameters)} adapter tensors")


def lora_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapters' A and B by name; empty where ``module`` has none."""
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if ".lora_A." in name or ".lora_B." in name
    }


def has_lora(module: nn.Module) -> bool:
    """Say whether ``module`` has adapters."""
    return bool(lora_parameters(module))


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return what training may move: the adapters alone where there are any, else everything."""
    return lora_parameters(module) or dict(module.named_parameters())


def base_as_lora(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return adapter weights with which ``module`` is its base model: A as it is, B = 0."""
    return {
        name: torch.zeros_like(parameter) if ".lora_B." in name else parameter
        for name, parameter in lora_parameters(module).items()
    }


def active_adapters(module: nn.Module) -> str:
    """Return the name of the adapter that acts in ``module``, part of cache keys; "" for none."""
    from diffusers.loaders import PeftAdapterMixin

    if not isinstance(module, PeftAdapterMixin) or not lora_parameters(module):
        return ""
    from peft.tuners.lora import LoraLayer

    layer = next(layer for layer in module.modules() if isinstance(layer, LoraLayer))
    if layer.disable_adapters:
        return ""
    return f"{ADAPTER_NAME}(rank={layer.r[ADAPTER_NAME]},alpha={layer.lora_alpha[ADAPTER_NAME]:g})"


@contextmanager
def adapters_off(modules: Sequence[Any]) -> Iterator[None]:
    """Switch the adapters of ``modules`` off for a while: the outputs are the base model's.

    No weight is touched, so both ways are exact to the bit.
    """
    with ExitStack() as stack:
        for module in modules:
            module.disable_adapters()
            stack.callback(module.enable_adapters)
        yield
