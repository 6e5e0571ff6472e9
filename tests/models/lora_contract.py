"""What the default LoRA of every family is held to, beside ``FamilyContract``.

A class of a family's test file inherits both and sets ``lora_layers``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from peft import get_peft_model_state_dict

from tests.models.case import (
    PROMPTS,
    FamilyCase,
    StockCall,
    module_weights,
    moved_components,
    random_latents,
    roll_out,
    stage_policy,
    update,
)
from tests.models.training_contract import embedded_chain
from workflow_rl.card import ModelCard
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.memory import MemoryConfig
from workflow_rl.enums import ExecutionProfile, GuidanceMode
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.models.adapter import SECOND_EXPERT
from workflow_rl.models.lora import attach_lora, lora_parameters
from workflow_rl.models.memory import apply_memory
from workflow_rl.training.rollout import recompute, rollout_loop

RANK = 2
EXACT_TIMES = (1000.0, 500.0, 250.0)
"""Exact in bfloat16, also as fractions. Stock pipelines round others (flux, flux2, qwen_image), and
random time embeddings tell 0.4 % of a time from nothing at all: that is no error of a gradient."""
BFLOAT16_GRADIENT = 0.03
"""Largest relative distance of the adapters' gradient to that of a float32 base; 0.005 to 0.016 is
what was measured."""


def _named_weights(instance: ModelInstance) -> dict[str, torch.Tensor]:
    """Return a copy of every tensor of every module, by ``component.name``."""
    return {
        f"{component}.{name}": tensor
        for component, tensors in module_weights(instance).items()
        for name, tensor in tensors.items()
    }


def _with_adapters(card: ModelCard, dtype: torch.dtype) -> ModelInstance:
    """Return a model whose blocks are checkpointed, with adapters that act on the output."""
    instance = load_card(card, dtype=dtype)
    apply_memory(instance, MemoryConfig(gradient_checkpointing=True))
    attach_lora(instance, LoRAConfig(rank=RANK))
    generator = torch.Generator().manual_seed(0)
    for component in card.policies:
        for name, parameter in lora_parameters(instance.component(component)).items():
            parameter.requires_grad_(True)
            if ".lora_B." in name:
                parameter.data.normal_(0, 0.1, generator=generator)
    return instance


def _adapter_gradient(instance: ModelInstance, record: BehaviourRecord) -> torch.Tensor:
    """Return the gradient of a loss on the recomputed means, of all adapters in one row."""
    for _, now in recompute(instance, record):
        now.mean.square().mean().backward()
    rows = []
    for component in instance.card.policies:
        for parameter in lora_parameters(instance.component(component)).values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert gradient.dtype == torch.float32
            rows.append(gradient.flatten())
            parameter.grad = None
    return torch.cat(rows)


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
        policy = stage_policy(instance, cls.case, lr=1e-2)
        for _ in range(2):
            assert update(policy, roll_out(instance, cls.case)).applied
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

    def test_a_guided_chain_trains_the_adapters_of_both_stages_alone(self, card: ModelCard) -> None:
        """Each stage guided: C2 stays exact, and the first update moves B."""
        own = {k: v for k, v in self.case.guidances[-1].items() if k != "negative_prompt"}
        method = embedded_chain(
            self.case, card, lora=LoRAConfig(rank=RANK), own=own, partner={"guidance_scale": 2.0}
        )
        before = [_named_weights(policy.student) for policy in method.policies]
        _, metrics = method.managed_train_step({"prompts": [PROMPTS[0]], "seeds": [0]}, 0)
        assert method.last is not None
        for index, (policy, weights) in enumerate(zip(method.policies, before, strict=True)):
            record = method.last.outputs[index].record
            assert record is not None
            assert record.guidance != "none"
            assert metrics[f"c2_max_log_ratio/{policy.name}"] == 0.0
            assert metrics[f"grad_norm/{policy.name}"] > 0
            after = _named_weights(policy.student)
            moved = {n for n, tensor in after.items() if not torch.equal(tensor, weights[n])}
            assert moved
            assert all(".lora_B." in name for name in moved)
            assert {n.partition(".")[0] for n in moved} == set(policy.student.card.policies)

    def test_float32_adapters_beside_a_bfloat16_base(self, card: ModelCard) -> None:
        """With checkpointed gradients, which are near those of a float32 base."""
        whole, half = (_with_adapters(card, dtype) for dtype in (torch.float32, torch.bfloat16))
        embedded = GuidanceMode.EMBEDDED in half.adapter.guidances
        record = roll_out(half, self.case, **{"guidance_scale": 2.0} if embedded else {})
        times = zip(record.steps, EXACT_TIMES, strict=True)
        steps = tuple(replace(step, timestep=time) for step, time in times)
        record = replace(record, steps=steps)
        expected, found = (_adapter_gradient(instance, record) for instance in (whole, half))
        assert found.isfinite().all()
        assert (found - expected).norm() / expected.norm() <= BFLOAT16_GRADIENT

        policy = stage_policy(half, self.case, lr=1e-2)
        before = _named_weights(half)
        assert update(policy, roll_out(half, self.case)).applied
        assert policy.optimizer is not None
        states = [t for state in policy.optimizer.state.values() for t in state.values()]
        assert states
        assert {tensor.dtype for tensor in states} == {torch.float32}
        after = _named_weights(half)
        for name, tensor in after.items():
            if ".lora_" in name:
                assert tensor.dtype == torch.float32
                continue
            assert torch.equal(tensor, before[name]), name
        moved = {n for n, tensor in after.items() if not torch.equal(tensor, before[n])}
        assert {n.partition(".")[0] for n in moved} == {step.component for step in record.steps}
