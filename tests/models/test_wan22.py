"""Wan 2.2 I2V-A14B: two experts, each a policy of its own."""

from __future__ import annotations

from functools import partial

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline

from tests.models.contract import FamilyCase, FamilyContract
from tests.models.lora_contract import LoRAContract
from tests.models.test_wan import FRAMES, stock_wan
from tests.tiny_models.wan import save_wan, uni_pc
from workflow_rl.card import ModelCard
from workflow_rl.instance import ModelInstance
from workflow_rl.request import DiffusionParams

EXPERTS = ("transformer", "transformer_2")


class TestWanA14B(FamilyContract, LoRAContract):
    """Euler steps at 1000, 857, 602 and 9 of 1000, UniPC's at 999, 900, 750 and 500."""

    case = FamilyCase(
        name="wan-2.2-a14b",
        task="i2v",
        save=partial(save_wan, image_encoder=False, scheduler=uni_pc(), boundary_ratio=0.9),
        pipeline_class=WanImageToVideoPipeline,
        stock=stock_wan,
        num_frames=FRAMES,
        guidances=(
            {},
            {"guidance_scale": 3.0},
            {"guidance_scale": 2.0, "guidance_scale_2": 3.5, "negative_prompt": "a cat"},
        ),
        euler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    lora_layers = 20

    def test_both_experts_are_policies(self, card: ModelCard) -> None:
        assert card.policies == EXPERTS

    @pytest.mark.parametrize(
        ("timestep", "expert"), [(1000.0, 0), (900.0, 0), (899.9, 1), (0.0, 1)]
    )
    def test_the_first_expert_works_down_to_the_boundary(
        self, instance: ModelInstance, timestep: float, expert: int
    ) -> None:
        assert instance.adapter.policy_at(timestep, DiffusionParams()) == EXPERTS[expert]
