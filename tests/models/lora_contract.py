"""What the default LoRA of every family is held to, beside ``FamilyContract``.

A class of a family's test file inherits both and sets ``lora_layers``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import get_peft_model_state_dict

from tests.models.contract import (
    STEPS,
    FamilyCase,
    StockCall,
    module_weights,
    moved_components,
    random_latents,
)
from workflow_rl.card import ModelCard
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.enums import ExecutionProfile
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models.adapter import SECOND_EXPERT
from workflow_rl.models.lora import attach_lora, lora_parameters
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.training.update import update_stage
from workflow_rl.workflow import StagePlan, WorkflowStage

RANK = 2


def _step(instance: ModelInstance, case: FamilyCase) -> None:
    """Roll out two samples, and take one optimiser step on them."""
    requests = case.requests(sde_kind="cps", sde_steps=tuple(range(STEPS - 1)))
    card = instance.card
    policy = StagePolicy(
        StageSettings(
            WorkflowStage(card.task.value, card.task),
            StagePlan(requests[0].params, samples=2, slots=2),
            OptimizerSettings(lr=1e-2),
            kl_weight=0.0,
        ),
        instance,
        None,
    )
    _, record = rollout_loop(instance, "denoise", requests)
    assert record is not None
    assert update_stage(
        policy,
        record,
        torch.tensor([1.0, -1.0]),
        torch.tensor([True, True]),
        iteration=0,
        num_updates=1,
        c2_tolerance=0.0,
    ).applied


class LoRAContract:
    """The tests."""

    case: ClassVar[FamilyCase]
    lora_layers: ClassVar[int]
    """Linear layers of each policy of the tiny checkpoint that get an adapter by default."""
    lora_idle: ClassVar[frozenset[str]] = frozenset()
    """Those of them that no output depends on: their adapters stay as they are."""

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, card: ModelCard) -> ModelInstance:
        """A default LoRA after two steps: in the first A has no gradient, since B is 0."""
        instance = load_card(card)
        attach_lora(instance, LoRAConfig(rank=RANK))
        for _ in range(2):
            _step(instance, cls.case)
        return instance

    def test_the_default_lora_trains_all_its_layers_and_no_other_weight(
        self, card: ModelCard, instance: ModelInstance, trained: ModelInstance
    ) -> None:
        fresh = load_card(card)
        attach_lora(fresh, LoRAConfig(rank=RANK))
        base = module_weights(instance)
        for policy in card.policies:
            before, after = (lora_parameters(i.component(policy)) for i in (fresh, trained))
            assert len(after) == 2 * self.lora_layers
            still = {name for name in after if torch.equal(before[name], after[name])}
            assert {name.partition(".lora_")[0] for name in still} == self.lora_idle
            assert len(still) == 2 * len(self.lora_idle)
            named = {
                name.replace(".base_layer.", "."): tensor
                for name, tensor in trained.component(policy).state_dict().items()
                if ".lora_" not in name
            }
            own = base.pop(policy)
            assert all(torch.equal(named[name], tensor) for name, tensor in own.items())
        assert moved_components(base, trained) == set()

    def test_the_stock_pipeline_loads_the_lora(
        self, folder: Path, trained: ModelInstance, tmp_path: Path
    ) -> None:
        """It makes what the trained model serves, from a file per policy and the untouched folder.

        A second expert's keys are named as the first's: where they belong is said in loading.
        """
        for policy in trained.card.policies:
            transformer: Any = trained.component(policy)
            self.case.pipeline_class.save_lora_weights(
                tmp_path / policy,
                transformer_lora_layers=get_peft_model_state_dict(transformer),
                transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
            )
        pipeline = self.case.pipeline_class.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.scheduler = self.case.euler or pipeline.scheduler
        latents = random_latents(trained, self.case.requests()[0])
        requests = self.case.requests(latents)[:1]  # alone, as there: batches round differently
        media, _ = rollout_loop(trained, "denoise", requests, profile=ExecutionProfile.SERVE)
        params = trained.adapter.resolve(requests[0])
        call = StockCall(
            pipeline, requests[0].prompt, latents[0], requests[0].image_CHW, params, None
        )
        plain = self.case.stock(call)
        for policy in trained.card.policies:
            second = {"load_into_transformer_2": True} if policy == SECOND_EXPERT else {}
            pipeline.load_lora_weights(tmp_path / policy, **second)
        assert (self.case.stock(call) - media[0]).abs().max() <= self.case.tolerance
        assert (plain - media[0]).abs().max() > 10 * self.case.tolerance
