"""A model's modules without their weights: the stock classes on the meta device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import lora_layout
from workflow_rl.config.stage import StageConfig
from workflow_rl.config.train_modules import check_parts, has_part
from workflow_rl.errors import UserError
from workflow_rl.planning.architecture import Architecture

META = torch.device("meta")
POLICIES = ("transformer", "transformer_2")
"""Components that training may move, of those that a model has."""


def build_modules(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Return every module of a pipeline on the meta device, in the dtypes that loading gives.

    Raises
    ------
    UserError
        If an installed library lacks a class.
    """
    modules = {}
    for name, (library, class_name) in architecture.classes().items():
        if library not in ("diffusers", "transformers"):
            continue
        module_class = getattr(importlib.import_module(library), class_name, None)
        if module_class is None:
            raise UserError(
                f"{name} of {architecture.source} is a {class_name}, which the installed "
                f"{library} does not have; install a newer {library}"
            )
        if issubclass(module_class, nn.Module):
            modules[name] = _build(module_class, architecture.read(f"{name}/config.json"), dtype)
    return modules


def _build(module_class: Any, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    with META:
        if module_class.__module__.startswith("diffusers."):
            module = module_class.from_config(dict(config))
            kept = set(module_class._keep_in_fp32_modules or ())
        else:
            module = module_class(module_class.config_class.from_dict(dict(config)))
            # For bfloat16 transformers keeps these alone.
            kept = set(module_class._keep_in_fp32_modules_strict or ())
    persistent = module.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    module.eval().requires_grad_(False)
    built: nn.Module = module
    return built


def num_parameters(module: nn.Module) -> int:
    """Return how many numbers the parameters of ``module`` are; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of the tensors that ``module`` holds; shared ones count once.

    Some are neither parameters nor buffers: Qwen-Image keeps its table of positions as attributes,
    because a buffer would lose the imaginary part.
    """
    found = {
        id(leaf): leaf
        for part in module.modules()
        for leaf in tree_iter({k: v for k, v in vars(part).items() if k != "_modules"})
        if isinstance(leaf, torch.Tensor)
    }
    return sum(t.numel() * t.element_size() for t in found.values())


def policies_of(modules: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return the modules that training may move, by component."""
    return {name: modules[name] for name in POLICIES if name in modules}


def select_trained(
    policies: Mapping[str, nn.Module],
    stage: StageConfig,
    lora_targets: tuple[str, ...],
    where: str,
) -> dict[str, nn.Parameter]:
    """Return what the stage trains, as ``component.parameter``; attaches its LoRA if it has one.

    The parameters require a gradient, all others don't.

    Raises
    ------
    UserError
        If ``lora.targets`` or ``train_modules`` name nothing.
    """
    if stage.lora is not None:
        for component, module in policies.items():
            _attach_lora(module, stage.lora, lora_targets, component, tuple(policies), where)
    if stage.freeze:
        return {}
    every = {f"{c}.{n}": p for c, m in policies.items() for n, p in m.named_parameters()}
    if stage.lora is not None:
        trained = {n: p for n, p in every.items() if ".lora_A." in n or ".lora_B." in n}
    else:
        parts = stage.train_modules
        check_parts(every, parts, f"{where}.train_modules")
        trained = {
            n: p for n, p in every.items() if not parts or any(has_part(n, x) for x in parts)
        }
    for parameter in trained.values():
        parameter.requires_grad_(True)
    return trained


def _attach_lora(
    module: Any,
    lora: LoRAConfig,
    defaults: tuple[str, ...],
    component: str,
    components: tuple[str, ...],
    where: str,
) -> None:
    """Add adapters to the layers that training would give them: float32, as in training."""
    from peft import LoraConfig

    linears = {
        name: tuple(layer.weight.shape)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    }
    layout = lora_layout(lora, linears, defaults, component, components, f"{where}.lora")
    module.add_adapter(LoraConfig(r=layout.rank, target_modules=list(layout.modules)))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(False)
        if ".lora_" in name:
            parameter.data = parameter.data.float()
