"""What takes less memory or time gives the same: held for every family, through ``FamilyContract``.

``tests/models/test_memory.py`` tests the options themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from tests.models.case import FamilyCase, roll_out
from workflow_rl.card import ModelCard
from workflow_rl.config.memory import MemoryConfig
from workflow_rl.enums import ExecutionProfile, GuidanceMode
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.models.memory import apply_memory
from workflow_rl.training.rollout import recompute, rollout_loop

GRADIENT_TOLERANCE = 1e-6


def _load(card: ModelCard, **memory: Any) -> ModelInstance:
    """Return a model whose policies are trained whole."""
    instance = load_card(card)
    apply_memory(instance, MemoryConfig(**memory))
    for component in card.policies:
        instance.component(component).requires_grad_(True)
    return instance


def _gradients(
    instance: ModelInstance, record: BehaviourRecord, *, exact: bool = True
) -> dict[str, torch.Tensor]:
    """Return the gradients of a loss on the recomputed means.

    If ``exact``, means and log-probs must be those of the record to the bit (C2).
    """
    parameters = {
        f"{component}.{name}": parameter
        for component in instance.card.policies
        for name, parameter in instance.component(component).named_parameters()
    }
    for parameter in parameters.values():
        parameter.grad = None
    for recorded, now in recompute(instance, record):
        if exact:
            assert torch.equal(now.mean, recorded.mean)
            assert torch.equal(now.log_prob, recorded.sde_logprob)
        now.mean.square().mean().backward()
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _assert_equal_gradients(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
    for name, gradient in expected.items():
        difference = float((found[name] - gradient).abs().max())
        assert difference <= GRADIENT_TOLERANCE, f"{name}: {difference:g}"


def _count_passes(instance: ModelInstance) -> list[int]:
    """Note every forward pass of a linear layer of the policies."""
    passes: list[int] = []
    for component in instance.card.policies:
        for module in instance.component(component).modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


def _set_tile(vae: Any, pixels: int) -> None:
    """Set the side of a VAE's tiles; those of videos and of Qwen-Image then do not overlap."""
    if hasattr(vae, "tile_sample_min_size"):
        latents = pixels * vae.tile_latent_min_size // vae.tile_sample_min_size
        vae.tile_sample_min_size, vae.tile_latent_min_size = pixels, latents
        return
    vae.tile_sample_min_height = vae.tile_sample_min_width = pixels
    vae.tile_sample_stride_height = vae.tile_sample_stride_width = pixels


class MemoryContract:
    """The tests."""

    case: ClassVar[FamilyCase]

    def _guided(self, instance: ModelInstance) -> Iterator[Mapping[str, Any]]:
        """Give the case's classifier-free guidances."""
        for guidance in self.case.guidances:
            params = instance.adapter.resolve(self.case.requests(**guidance)[0])
            if instance.adapter.guidance(params).mode is GuidanceMode.CFG:
                yield guidance

    def test_guidance_in_one_double_batch_is_the_same(self, instance: ModelInstance) -> None:
        for guidance in self._guided(instance):
            media = [
                rollout_loop(
                    instance,
                    "denoise",
                    self.case.requests(cfg_batching=batching, **guidance),
                    profile=ExecutionProfile.SERVE,
                )[0]
                for batching in ("sequential", "batched")
            ]
            torch.testing.assert_close(media[0], media[1], atol=self.case.tolerance, rtol=0)

    def test_guidance_in_one_double_batch_trains_the_same(self, card: ModelCard) -> None:
        """C2 is exact in it, and gradients equal those of two passes."""
        instance = _load(card)
        for guidance in self._guided(instance):
            batched = roll_out(instance, self.case, cfg_batching="batched", **guidance)
            found = _gradients(instance, batched)
            params = replace(batched.params, cfg_batching="sequential")
            expected = _gradients(instance, replace(batched, params=params), exact=False)
            _assert_equal_gradients(found, expected)

    def test_checkpointed_gradients_are_equal(self, card: ModelCard) -> None:
        """Blocks of every policy run twice, and nothing else changes."""
        plain, checkpointed = _load(card), _load(card, gradient_checkpointing=True)
        record = roll_out(plain, self.case, **self.case.guidances[-1])
        expected = _gradients(plain, record)
        assert {name.partition(".")[0] for name in expected} == set(card.policies)
        for component in card.policies:
            assert checkpointed.component(component).is_gradient_checkpointing
        passes = [_count_passes(instance) for instance in (plain, checkpointed)]
        _gradients(plain, record)
        _assert_equal_gradients(_gradients(checkpointed, record), expected)
        assert len(passes[1]) > len(passes[0])

    def test_a_sliced_vae_makes_the_same_one_sample_at_a_time(
        self, card: ModelCard, instance: ModelInstance
    ) -> None:
        sliced = _load(card, vae_slicing=True)
        batches: list[int] = []
        decoder: Any = sliced.component("vae").decoder
        decoder.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
        media, expected = (
            rollout_loop(
                model,
                "denoise",
                self.case.requests(num_inference_steps=2),
                profile=ExecutionProfile.SERVE,
            )[0]
            for model in (sliced, instance)
        )
        assert set(batches) == {1}
        torch.testing.assert_close(media, expected, atol=self.case.tolerance, rtol=0)

    def test_a_tiled_vae_decodes_no_more_than_a_tile_at_a_time(
        self, card: ModelCard, instance: ModelInstance
    ) -> None:
        """And with tiles of the whole size it makes the same bits; of trained ones elsewhere."""
        tiled = _load(card, vae_tiling=True)
        vae: Any = tiled.component("vae")
        assert vae.use_tiling
        largest: list[int] = []
        vae.decoder.register_forward_pre_hook(
            lambda _, args: largest.append(max(args[0].shape[-2:]))
        )
        side = max(self.case.height, self.case.width)

        def served(model: ModelInstance) -> torch.Tensor:
            requests = self.case.requests(num_inference_steps=2)
            return rollout_loop(model, "denoise", requests, profile=ExecutionProfile.SERVE)[0]

        expected = served(instance)
        _set_tile(vae, side)
        assert torch.equal(served(tiled), expected)
        whole = max(largest)
        largest.clear()
        tile = 16 if side < 64 else 32
        _set_tile(vae, tile)
        assert served(tiled).shape == expected.shape
        assert max(largest) == whole * tile // side
