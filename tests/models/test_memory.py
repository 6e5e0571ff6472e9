"""Needing less memory changes no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fake_models import fake_instance
from tests.tiny_models import save_flux, save_wan
from workflow_rl.card import ModelCard
from workflow_rl.config.memory import MemoryConfig
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.models.memory import (
    apply_memory,
    check_attention_backend,
    use_attention_backend,
)
from workflow_rl.request import DiffusionParams, SampleId, TaskType, make_request
from workflow_rl.training.rollout import recompute, rollout_loop

CPU = torch.device("cpu")
FAMILIES = ["flux", "wan"]


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelCard]:
    folder = tmp_path_factory.mktemp("memory")
    return {
        "flux": build_flux_t2i_card(
            save_flux(folder / "flux", guidance_embeds=False, dynamic_shift=False)
        ),
        "wan": build_wan_i2v_card(save_wan(folder / "wan", image_encoder=False)),
    }


def _load(card: ModelCard, **memory: Any) -> ModelInstance:
    instance = load_card(card)
    apply_memory(instance, MemoryConfig(**memory))
    return instance


def _rollout(instance: ModelInstance, samples: int = 2) -> tuple[torch.Tensor, BehaviourRecord]:
    """Return the media and the record of ``samples`` samples in three steps."""
    is_video = instance.card.task is TaskType.I2V
    params = DiffusionParams(
        num_inference_steps=3, sde_steps=(0, 1), sde_kind="cps", num_frames=5 if is_video else None
    )
    image = torch.linspace(0, 1, 3 * 32 * 32).reshape(3, 32, 32) if is_video else None
    requests = [
        make_request(
            instance.card.task,
            "a red circle",
            sample=SampleId(0, "a red circle", (index,)),
            params=params,
            image=image,
        )
        for index in range(samples)
    ]
    media, record = rollout_loop(
        instance, "denoise", requests, profile=ExecutionProfile.ROLLOUT, slots=samples
    )
    assert record is not None
    return media, record


def _gradients(
    instance: ModelInstance, record: BehaviourRecord
) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients of a loss on the recomputed means, and the largest log-prob error."""
    transformer = instance.component("transformer")
    transformer.requires_grad_(True)
    worst = 0.0
    for recorded, now in recompute(instance, record):
        now.mean.square().mean().backward()
        difference = now.log_prob.detach() - recorded.sde_logprob
        worst = max(worst, float(difference.abs().max()))
    gradients = {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}
    return gradients, worst


def _count_runs(instance: ModelInstance, block: str) -> list[int]:
    """Count the forward passes of the transformer's blocks of a kind.

    They are counted where they start: a recomputation stops once it has what was not kept.
    """
    runs: list[int] = []
    for module in instance.component("transformer").modules():
        if type(module).__name__ == block:
            module.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


@pytest.mark.parametrize(
    ("family", "block", "blocks"),
    [("flux", "FluxTransformerBlock", 1), ("wan", "WanTransformerBlock", 2)],
)
def test_checkpointed_gradients_are_equal_and_blocks_run_twice(
    cards: dict[str, ModelCard], family: str, block: str, blocks: int
) -> None:
    plain, checkpointed = (
        _load(cards[family], gradient_checkpointing=asked) for asked in (False, True)
    )
    _, record = _rollout(plain)
    counts = []
    found = []
    for instance in (plain, checkpointed):
        runs = _count_runs(instance, block)
        gradients, log_prob_error = _gradients(instance, record)
        counts.append(len(runs))
        found.append(gradients)
        assert log_prob_error == 0.0
    steps = len(record.steps)
    assert counts == [blocks * steps, 2 * blocks * steps]
    assert found[0].keys() == found[1].keys()
    assert any(gradient.abs().max() > 0 for gradient in found[0].values())
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=0, atol=1e-7), name


def test_checkpointing_leaves_passes_without_gradient_alone(cards: dict[str, ModelCard]) -> None:
    instance = _load(cards["wan"], gradient_checkpointing=True)
    runs = _count_runs(instance, "WanTransformerBlock")
    media, _ = _rollout(instance)
    assert len(runs) == 2 * 3
    assert torch.equal(media, _rollout(_load(cards["wan"]))[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sliced_vae_makes_the_same_one_sample_at_a_time(
    cards: dict[str, ModelCard], family: str
) -> None:
    sliced = _load(cards[family], vae_slicing=True)
    batches: list[int] = []
    decoder: Any = sliced.component("vae").decoder
    decoder.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    media, _ = _rollout(sliced, samples=3)
    expected, _ = _rollout(_load(cards[family]), samples=3)
    assert set(batches) == {1}
    assert torch.allclose(media, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiling_changes_nothing_up_to_the_tile_size(
    cards: dict[str, ModelCard], family: str
) -> None:
    tiled = _load(cards[family], vae_tiling=True)
    assert tiled.adapter.modules["vae"].use_tiling
    assert torch.equal(_rollout(tiled)[0], _rollout(_load(cards[family]))[0])


@pytest.mark.parametrize("what", ["slicing", "tiling"])
def test_a_vae_that_cannot_is_one_line(what: str) -> None:
    instance = fake_instance(TaskType.T2I)
    instance._versions["vae"] = 0
    instance.adapter.modules = {"vae": torch.nn.Identity()}
    with pytest.raises(UserError, match=rf"\(Identity\) has no {what}; set memory.vae_{what}: fal"):
        apply_memory(instance, MemoryConfig.model_validate({f"vae_{what}": True}))


def test_a_transformer_that_cannot_checkpoint_is_one_line(cards: dict[str, ModelCard]) -> None:
    instance = load_card(cards["flux"])
    transformer: Any = instance.component("transformer")
    transformer._supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"cannot checkpoint gradients .* does not support"):
        apply_memory(instance, MemoryConfig(gradient_checkpointing=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_native_attention_is_the_default_and_another_comes_close(
    cards: dict[str, ModelCard], family: str
) -> None:
    expected = _rollout(_load(cards[family]))[0]
    assert torch.equal(_rollout(_load(cards[family], attention_backend="native"))[0], expected)
    math = _load(cards[family], attention_backend="_native_math")
    layers: list[Any] = list(math.component("transformer").modules())
    backends = {
        layer.processor._attention_backend.value for layer in layers if hasattr(layer, "processor")
    }
    assert backends == {"_native_math"}
    assert torch.allclose(_rollout(math)[0], expected, rtol=0, atol=1e-4)


def test_a_backend_is_its_model_s_alone(cards: dict[str, ModelCard]) -> None:
    """diffusers makes the backend set last the default of every model that has none."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before = _AttentionBackendRegistry.get_active_backend()
    use_attention_backend(load_card(cards["flux"]), "_native_math")
    assert _AttentionBackendRegistry.get_active_backend() == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flesh", "none that diffusers knows; choose one of .*flash"),
        ("sage", "does not work here on cpu in torch.float32 .*sageattention"),
        ("_native_cudnn", "does not work here on cpu .*; choose another of .*native"),
        ("flex", "does not support backward on CPU"),
    ],
)
def test_a_backend_that_is_not_there_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_attention_backend(name, CPU, torch.float32, needs_gradient=True)


def test_trying_a_backend_that_works_says_nothing() -> None:
    check_attention_backend("native", CPU, torch.bfloat16, needs_gradient=True)
