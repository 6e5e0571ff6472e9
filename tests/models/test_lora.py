"""LoRA on random tiny models: what is adapted, where it starts, and that off is the base."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tiny_models import save_flux, save_wan
from workflow_rl.card import ModelCard
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import LORA_FILE
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.models.lora import (
    active_adapters,
    adapters_off,
    attach_lora,
    base_as_lora,
    check_card_lora,
    lora_parameters,
    trainable_parameters,
)
from workflow_rl.request import DiffusionParams, TaskType, make_request
from workflow_rl.training.rollout import rollout_loop

RANK = 4


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("lora") / "flux"
    return build_flux_t2i_card(save_flux(folder, guidance_embeds=False, dynamic_shift=False))


def _adapted(card: ModelCard, seed: int = 0, **options: Any) -> ModelInstance:
    instance = load_card(card)
    attach_lora(instance, LoRAConfig(**({"rank": RANK} | options)), seed=seed)
    return instance


def _shake(instance: ModelInstance) -> None:
    """Give B values, as training does."""
    torch.manual_seed(5)
    for parameter in lora_parameters(instance.component("transformer")).values():
        parameter.data.normal_(0, 0.3)


def _image(instance: ModelInstance) -> torch.Tensor:
    request = make_request(TaskType.T2I, "a red circle", params=DiffusionParams(2))
    return rollout_loop(instance, "denoise", request, profile=ExecutionProfile.SERVE)[0]


@pytest.fixture(scope="module")
def saved(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelInstance]:
    """A LoRA of alpha 12 as the stock pipeline saves it, and the instance that it came from."""
    instance = _adapted(card, alpha=12.0)
    _shake(instance)
    transformer: Any = instance.component("transformer")
    folder = tmp_path_factory.mktemp("saved")
    FluxPipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
    )
    return folder, instance


def test_default_layers_of_flux(card: ModelCard) -> None:
    """One double block: 8 projections of attention, 4 of feed-forward; one single block: 3."""
    parameters = lora_parameters(_adapted(card).component("transformer"))
    assert len(parameters) == 2 * 15
    assert all(parameter.dtype is torch.float32 for parameter in parameters.values())


def test_default_layers_of_wan(tmp_path: Path) -> None:
    """Two blocks, each with two attentions of 4 projections and a feed-forward of 2."""
    instance = load_card(build_wan_i2v_card(save_wan(tmp_path / "wan", image_encoder=True)))
    attach_lora(instance, LoRAConfig(rank=2))
    assert len(lora_parameters(instance.component("transformer"))) == 2 * 20


def test_all_linear(card: ModelCard) -> None:
    linear = sum(
        isinstance(m, nn.Linear) for m in load_card(card).component("transformer").modules()
    )
    instance = _adapted(card, targets="all-linear")
    assert len(lora_parameters(instance.component("transformer"))) == 2 * linear


def test_a_new_lora_changes_nothing_and_off_is_the_base_to_the_bit(card: ModelCard) -> None:
    base = _image(load_card(card))
    instance = _adapted(card)
    assert torch.equal(_image(instance), base)
    _shake(instance)
    adapted = _image(instance)
    assert not torch.equal(adapted, base)
    with adapters_off([instance.component("transformer")]):
        assert torch.equal(_image(instance), base)
    assert torch.equal(_image(instance), adapted)
    with torch.no_grad():
        for name, tensor in base_as_lora(instance.component("transformer")).items():
            instance.component("transformer").get_parameter(name).copy_(tensor)
    assert torch.equal(_image(instance), base)


def test_adapters_are_on_again_after_an_error(card: ModelCard) -> None:
    instance = _adapted(card)
    transformer = instance.component("transformer")
    with pytest.raises(ZeroDivisionError), adapters_off([transformer]):
        raise ZeroDivisionError
    assert active_adapters(transformer) != ""


def test_only_the_adapters_may_train(card: ModelCard) -> None:
    transformer = load_card(card).component("transformer")
    assert trainable_parameters(transformer).keys() == dict(transformer.named_parameters()).keys()
    transformer = _adapted(card).component("transformer")
    assert trainable_parameters(transformer).keys() == lora_parameters(transformer).keys()
    assert not any(parameter.requires_grad for parameter in transformer.parameters())


def test_the_seed_alone_draws_a(card: ModelCard) -> None:
    state = torch.random.get_rng_state()
    drawn = []
    for global_seed, seed in ((1, 0), (2, 0), (2, 1)):
        torch.manual_seed(global_seed)
        parameters = lora_parameters(_adapted(card, seed).component("transformer"))
        drawn.append(torch.cat([parameter.flatten() for parameter in parameters.values()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[1], drawn[2])
    torch.random.set_rng_state(state)
    attach_lora(load_card(card), LoRAConfig())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_bfloat16_base_has_float32_adapters(card: ModelCard) -> None:
    instance = load_card(card, dtype=torch.bfloat16)
    attach_lora(instance, LoRAConfig(rank=RANK, targets="all-linear"))
    _shake(instance)
    transformer: Any = instance.component("transformer")
    adapters = lora_parameters(transformer)
    assert {parameter.dtype for parameter in adapters.values()} == {torch.float32}
    assert transformer.dtype is torch.bfloat16
    assert bool(_image(instance).isfinite().all())


def test_the_adapter_enters_the_cache_key(card: ModelCard) -> None:
    plain, adapted = load_card(card), _adapted(card, alpha=6.0)
    for instance, name in ((plain, ""), (adapted, "default(rank=4,alpha=6)")):
        assert instance.cache_key(("text_encoder", "transformer"), "x").adapters == ("", name)
    with adapters_off([adapted.component("transformer")]):
        assert adapted.adapter.active_adapters("transformer") == ""


def test_starting_from_what_the_stock_pipeline_saved(
    card: ModelCard, saved: tuple[Path, ModelInstance]
) -> None:
    folder, source = saved
    expected = _image(source)
    ours = _adapted(card, init=folder)
    assert torch.equal(_image(ours), expected)
    stock = load_card(card)
    stock.adapter.pipeline.load_lora_weights(folder)
    assert torch.allclose(_image(stock), expected, atol=1e-5)


def test_alpha_tensors_scale_as_the_stock_pipeline_scales(
    card: ModelCard, saved: tuple[Path, ModelInstance], tmp_path: Path
) -> None:
    tensors = load_file(saved[0] / LORA_FILE)
    alphas = {
        key.replace("lora_A.weight", "alpha"): torch.tensor(2.0, dtype=torch.bfloat16)
        for key in tensors
        if "lora_A" in key
    }
    save_file(tensors | alphas, tmp_path / LORA_FILE)
    ours, stock = _adapted(card, init=tmp_path), load_card(card)
    stock.adapter.pipeline.load_lora_weights(tmp_path)
    assert torch.allclose(_image(ours), _image(stock), atol=1e-5)
    save_file(tensors, tmp_path / LORA_FILE)
    as_rank = _adapted(card, init=tmp_path)
    assert active_adapters(as_rank.component("transformer")) == "default(rank=4,alpha=4)"
    alphas[next(iter(alphas))] = torch.tensor(3.0)
    save_file(tensors | alphas, tmp_path / LORA_FILE)
    with pytest.raises(UserError, match=r"has several alphas \(2, 3\)"):
        _adapted(card, init=tmp_path)
    for bad in (torch.tensor(math.nan), torch.tensor(0.0), torch.ones(2)):
        save_file(tensors | {key: bad.clone() for key in alphas}, tmp_path / LORA_FILE)
        with pytest.raises(UserError, match=r"has the alpha .*, expected a number above 0"):
            _adapted(card, init=tmp_path)


def test_a_value_that_is_not_finite_is_refused(
    card: ModelCard, saved: tuple[Path, ModelInstance], tmp_path: Path
) -> None:
    tensors = load_file(saved[0] / LORA_FILE)
    name = next(iter(tensors))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, tmp_path / LORA_FILE)
    with pytest.raises(UserError, match=f"{name} is not finite"):
        _adapted(card, init=tmp_path)


def test_a_fault_shows_before_weights_are_loaded(
    card: ModelCard, saved: tuple[Path, ModelInstance]
) -> None:
    check_card_lora(card, LoRAConfig(rank=RANK, init=saved[0]), "lora")
    with pytest.raises(UserError, match="set rank: 4"):
        check_card_lora(card, LoRAConfig(rank=RANK + 1, init=saved[0]), "lora")
    with pytest.raises(UserError, match="'ffn' names no linear layer"):
        check_card_lora(card, LoRAConfig(targets=("ffn",)), "lora")
    with pytest.raises(UserError, match="'ffn' names no linear layer"):
        attach_lora(load_card(card), LoRAConfig(targets=("ffn",)))


def test_every_policy_component_gets_adapters(card: ModelCard) -> None:
    adapter = load_card(card).adapter
    adapter.modules["transformer_2"] = load_card(card).component("transformer")
    policies = ("transformer", "transformer_2")
    both = replace(card, policies=policies, components=(*card.components, "transformer_2"))
    instance = ModelInstance(both, adapter, load_card(card).platform)
    attach_lora(instance, LoRAConfig(rank=RANK))
    first, second = (lora_parameters(instance.component(name)) for name in policies)
    assert len(first) == len(second) == 2 * 15
    assert not any(torch.equal(first[name], second[name]) for name in first if "lora_A" in name)
    with adapters_off([instance.component(name) for name in policies]):
        assert [adapter.active_adapters(name) for name in policies] == ["", ""]
    assert all(adapter.active_adapters(name) for name in policies)
