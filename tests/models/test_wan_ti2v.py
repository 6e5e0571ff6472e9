"""Wan 2.2 TI2V: a given first latent frame, and a timestep per token."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline

from tests.models.contract import FamilyCase, FamilyContract
from tests.models.given_contract import GivenLatentsContract
from tests.models.lora_contract import LoRAContract
from tests.models.test_wan import stock_wan
from tests.tiny_models.wan import save_wan_ti2v, uni_pc
from workflow_rl.instance import ModelInstance
from workflow_rl.models.common import collate


class TestWanTI2V(FamilyContract, LoRAContract, GivenLatentsContract):
    """Three latent frames of 2x4, so 2 tokens each: the frames' sides and number all differ."""

    case = FamilyCase(
        name="wan-2.2-ti2v",
        task="i2v",
        save=partial(save_wan_ti2v, scheduler=uni_pc(5.0)),
        pipeline_class=WanImageToVideoPipeline,
        stock=stock_wan,
        width=64,
        num_frames=9,
        guidances=(
            {},
            {"guidance_scale": 5.0},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
        euler=FlowMatchEulerDiscreteScheduler(shift=5.0),
    )
    lora_layers = 20

    def test_a_published_folder_names_wan_pipeline(self, folder: Path) -> None:
        index = json.loads((folder / "model_index.json").read_text())
        assert (index["_class_name"], index["expand_timesteps"]) == ("WanPipeline", True)

    def test_tokens_of_the_first_frame_are_at_time_zero(self, instance: ModelInstance) -> None:
        adapter = instance.adapter
        latents = torch.zeros(2, 6, 3, 2, 4)
        timesteps = adapter.transformer_timestep("transformer", latents, 750.0)
        assert timesteps.tolist() == [[0, 0, 750, 750, 750, 750]] * 2

    def test_the_first_latent_frame_is_the_image(self, instance: ModelInstance) -> None:
        """As the VAE encodes it alone, whatever the noise was."""
        adapter = instance.adapter
        request = self.case.requests()[0]
        params = adapter.resolve(request)
        batch = collate(adapter.encode(instance, [request]))
        latents = torch.randn(1, *adapter.latent_shape(params))
        given = adapter.with_given(latents, batch, params)
        mask = adapter.sampled_mask(params)
        assert torch.equal(given[:, :, :1], batch["condition"])
        assert torch.equal(given[mask.expand_as(given)], latents[mask.expand_as(latents)])
        assert mask.expand_as(latents).float().mean() == pytest.approx(2 / 3)
