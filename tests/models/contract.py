"""What every model family is held to: a family's test file states a case and inherits the tests.

.. code-block:: python

    class TestFluxDev(FamilyContract):
        case = FamilyCase(name="flux-dev", task="t2i", ...)
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.models.case import (
    PROMPTS,
    STEPS,
    FamilyCase,
    StockCall,
    random_latents,
)
from tests.models.memory_contract import MemoryContract
from tests.models.training_contract import TrainingContract
from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config.families import FAMILIES
from workflow_rl.enums import ExecutionProfile, GuidanceMode, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_card
from workflow_rl.models.common import Conditioning, collate
from workflow_rl.request import DiffusionParams, TaskType, make_request
from workflow_rl.training.rollout import rollout_loop

TESTS = Path(__file__).parent


def family_cases() -> dict[str, FamilyCase]:
    """Return the case of every contract in ``tests/models``, by name, in the order of the files."""
    cases = {}
    for path in sorted(TESTS.glob("test_*.py")):
        if "FamilyContract" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(f"tests.models.{path.stem}")
        for held in vars(module).values():
            if isinstance(held, type) and issubclass(held, FamilyContract) and "case" in vars(held):
                cases[held.case.name] = held.case
    return cases


class FamilyContract(TrainingContract, MemoryContract):
    """The tests. A class of a family's test file sets ``case``."""

    case: ClassVar[FamilyCase]

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("family") / cls.case.name
        cls.case.save(path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def card(cls, folder: Path) -> ModelCard:
        return build_card(folder, TaskType(cls.case.task))

    @pytest.fixture(scope="class")
    @classmethod
    def instance(cls, card: ModelCard) -> ModelInstance:
        """A resident instance that no test trains."""
        return load_card(card)

    def _stock(self, folder: Path, sampler: str) -> Any:
        pipeline = self.case.pipeline_class.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        if sampler == "euler" and self.case.euler is not None:
            pipeline.scheduler = self.case.euler
        return pipeline

    @pytest.mark.parametrize("sampler", ["euler", "checkpoint"])
    def test_serve_equals_the_stock_pipeline(
        self, folder: Path, instance: ModelInstance, sampler: str
    ) -> None:
        """A batch of two here, one call of the stock pipeline for each; each kind of guidance."""
        pipeline = self._stock(folder, sampler)
        latents = random_latents(instance, self.case.requests()[0])
        for guidance in self.case.guidances:
            requests = self.case.requests(latents, sampler=sampler, **guidance)
            ours, record = rollout_loop(
                instance, "denoise", requests, profile=ExecutionProfile.SERVE
            )
            assert record is None
            for request, row, media in zip(requests, latents, ours, strict=True):
                params = instance.adapter.resolve(request)
                expected = self.case.stock(
                    StockCall(
                        pipeline,
                        request.prompt,
                        row,
                        request.image_CHW,
                        params,
                        request.negative_prompt,
                    )
                )
                assert media.shape == expected.shape
                difference = float((media - expected).abs().max())
                assert difference <= self.case.tolerance, f"{sampler}, {guidance}: {difference:g}"

    def test_prompt_image_and_guidance_count(self, instance: ModelInstance) -> None:
        one = random_latents(instance, self.case.requests()[0])[0]
        latents = torch.stack([one, one])
        media, _ = rollout_loop(
            instance, "denoise", self.case.requests(latents), profile=ExecutionProfile.SERVE
        )
        assert (media[0] - media[1]).abs().max() > 1e-4
        for guidance in self.case.guidances:
            if guidance:
                guided, _ = rollout_loop(
                    instance,
                    "denoise",
                    self.case.requests(latents, **guidance),
                    profile=ExecutionProfile.SERVE,
                )
                assert (guided - media).abs().max() > 1e-5

    def test_padding_of_a_batch_is_not_text(self, instance: ModelInstance) -> None:
        """Texts of two lengths are padded beside each other, and a mask hides that."""
        adapter, requests = instance.adapter, self.case.requests()
        params = adapter.resolve(requests[0])
        rows = adapter.encode(instance, requests)
        batch, latents = collate(rows), random_latents(instance, requests[0])

        def velocity(latents: torch.Tensor, rows: Conditioning) -> torch.Tensor:
            with torch.no_grad():
                result: torch.Tensor = adapter.velocity("transformer", latents, 700.0, rows, params)
            return result

        together = velocity(latents, batch)
        for index in range(len(rows)):
            alone = velocity(latents[index : index + 1], collate(rows[index : index + 1]))
            torch.testing.assert_close(alone[0], together[index], atol=self.case.tolerance, rtol=0)
        masks = [tensor for name, tensor in batch.items() if name.endswith("_mask")]
        if not masks:
            assert len({len(row["prompt_embeds"]) for row in rows}) == 1
            return
        (mask,) = masks
        assert not mask.all()
        batch["prompt_embeds"][~mask.bool()] = 9.0
        assert torch.equal(velocity(latents, batch), together)

    def test_given_latents_stay_as_they_are(self, instance: ModelInstance) -> None:
        requests = self.case.requests(sde_steps=tuple(range(STEPS - 1)))
        mask = instance.adapter.sampled_mask(instance.adapter.resolve(requests[0]))
        _, record = rollout_loop(instance, "denoise", requests)
        assert record is not None
        assert (record.mask is None) == (mask is None)
        if mask is None:
            return
        given = (~mask).expand(record.steps[0].prev.shape)
        assert given.any()
        first = record.steps[0].prev[given]
        assert not torch.equal(first, torch.zeros_like(first))
        for step in record.steps:
            assert torch.equal(step.sample[given], first)
            assert torch.equal(step.mean[given], first)
            assert not torch.equal(step.sample[~given], step.prev[~given])

    def test_published_schedules(self, instance: ModelInstance) -> None:
        for published in self.case.schedules:
            published.check(instance, self.case.requests(**published.fields)[0])

    def test_defaults_are_the_stock_pipelines(self, instance: ModelInstance) -> None:
        request = make_request(self.case.task, PROMPTS[0], image=self.case.image(0))
        params = instance.adapter.resolve(request)
        assert {name: getattr(params, name) for name in self.case.defaults} == self.case.defaults

    def test_a_text_may_be_as_long_as_the_stock_pipeline_takes(
        self, instance: ModelInstance
    ) -> None:
        """Whatever the tokenizer allows where nothing is asked for."""
        adapter = instance.adapter
        most = adapter.max_text_tokens
        request = self.case.requests(max_sequence_length=most)[0]
        assert adapter.resolve(request).max_sequence_length == most
        for odd in (0, most + 1):
            with pytest.raises(UserError, match=f"max_sequence_length is {odd}; give 1 to {most}"):
                adapter.resolve(self.case.requests(max_sequence_length=odd)[0])

    def test_what_is_off_the_grid_is_one_line(self, instance: ModelInstance) -> None:
        adapter = instance.adapter
        odd: list[tuple[str, Mapping[str, Any]]] = [
            ("cannot make height", {"height": self.case.height + 1}),
            ("cannot make width", {"width": self.case.width + 1}),
        ]
        if adapter.media_kind is MediaKind.VIDEO:
            odd.append(
                ("frames: give a multiple of", {"num_frames": (self.case.num_frames or 1) + 1})
            )
        for message, fields in odd:
            with pytest.raises(UserError, match=message) as caught:
                adapter.resolve(self.case.requests(**fields)[0])
            assert "\n" not in str(caught.value)

    def test_one_step_is_made_or_is_one_line(self, instance: ModelInstance) -> None:
        requests = self.case.requests(num_inference_steps=1)
        if instance.adapter.scheduler.config.get("shift_terminal"):
            with pytest.raises(UserError, match="cannot sample in 1 step"):
                instance.adapter.resolve(requests[0])
            return
        media, _ = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
        assert media.isfinite().all()

    def test_guidance_is_known_before_loading(self, folder: Path, instance: ModelInstance) -> None:
        """The JSON of a folder tells what the loaded model has."""
        family = FAMILIES[read_model_index(folder)["_class_name"]]
        told = family.guidances(lambda path: json.loads((folder / path).read_text()))
        assert set(told) == set(instance.adapter.guidances)
        assert family.cfg_above == instance.adapter.cfg_above
        assert family.shapes_cfg == instance.adapter.shapes_cfg

    def test_defaults_are_known_before_loading(self, folder: Path, instance: ModelInstance) -> None:
        family = FAMILIES[read_model_index(folder)["_class_name"]]
        adapter = instance.adapter
        assert family.max_text_tokens == adapter.max_text_tokens
        assert family.num_frames == adapter.default_num_frames
        adapter.pipeline.components[adapter.tokenizer].model_max_length = 10_000
        most = family.text_tokens or family.max_text_tokens
        assert adapter.text_length(DiffusionParams()) == most

    def test_guidance_that_the_model_lacks_is_one_line(self, instance: ModelInstance) -> None:
        lacking = set(GuidanceMode) - set(instance.adapter.guidances)
        assert lacking, "no model has them all"
        for mode in lacking:
            request = self.case.requests(guidance=mode, guidance_scale=3.0)[0]
            with pytest.raises(UserError, match=f"has no {mode} guidance"):
                instance.adapter.resolve(request)
