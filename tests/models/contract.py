"""What every model family is held to: a family's test file states a case and inherits the tests.

.. code-block:: python

    class TestFluxDev(FamilyContract):
        case = FamilyCase(name="flux-dev", task="t2i", ...)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from tests.models.memory_contract import MemoryContract
from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config.families import FAMILIES
from workflow_rl.enums import ExecutionProfile, GuidanceMode, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.sampler import gaussian_log_ratio
from workflow_rl.models import build_card, build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.request import DiffusionParams, Request, SampleId, TaskType, make_request
from workflow_rl.rewards.registry import build_rewards
from workflow_rl.training.methods.workflow_rl import build_workflow_rl
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import recompute, rollout_loop
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.training.update import update_stage
from workflow_rl.workflow import StagePlan, WorkflowStage

PROMPTS = ("a red circle moving left", "a blue square")
SDE_KINDS = ("flow_sde", "cps", "dance_sde")
STEPS = 4
TOLERANCE = 1e-5


@dataclass(frozen=True)
class StockCall:
    """One sample for the stock pipeline: ``image_CHW`` in [0, 1] on the 8-bit grid (I2V).

    ``params`` are resolved; ``negative_prompt`` None is the family's default.
    """

    pipeline: Any
    prompt: str
    latents: torch.Tensor
    image_CHW: torch.Tensor | None
    params: DiffusionParams
    negative_prompt: str | None

    @property
    def image(self) -> Image.Image:
        """The image for a pipeline."""
        assert self.image_CHW is not None
        pixels_HWC = (self.image_CHW * 255).round().byte().permute(1, 2, 0)
        return Image.fromarray(pixels_HWC.numpy())


@dataclass(frozen=True)
class FamilyCase:
    """One tiny checkpoint of a family, and how the stock pipeline makes a sample with it.

    Parameters
    ----------
    name
        Name of the folder.
    task
        ``t2i`` or ``i2v``.
    save
        Saves the checkpoint, random weights of the real classes, in a folder that it is given.
    pipeline_class
        The stock pipeline.
    stock
        Calls it for one sample, with the given latents [*latent_shape], and returns its media in
        [0, 1]: [3, H, W] or [3, T, H, W].
    height, width, num_frames
        Of the samples; ``num_frames`` for ``i2v``.
    guidances
        Request fields of guidance to try, such as ``{"guidance_scale": 3.0, "negative_prompt":
        "blurry"}``; ``{}`` is the neutral value.
    euler
        The stock Euler scheduler over the same sigmas, where the folder's is another; None: the
        folder's own.
    c2_bfloat16
        Largest |log-ratio| on-policy in bfloat16.
    tolerance
        Largest difference to the stock pipeline, in float32.
    params
        Further request fields of every test, such as ``max_sequence_length``.
    """

    name: str
    task: str
    save: Callable[[Path], object]
    pipeline_class: Any
    stock: Callable[[StockCall], torch.Tensor]
    height: int = 32
    width: int = 32
    num_frames: int | None = None
    guidances: tuple[Mapping[str, Any], ...] = ({},)
    euler: FlowMatchEulerDiscreteScheduler | None = None
    c2_bfloat16: float = 0.0
    tolerance: float = TOLERANCE
    params: Mapping[str, Any] = field(default_factory=dict)

    def fields(self, **fields: Any) -> dict[str, Any]:
        """Return the parameters of a request."""
        size = {"height": self.height, "width": self.width, "num_frames": self.num_frames}
        return size | {"num_inference_steps": STEPS} | dict(self.params) | fields

    def image(self, seed: int) -> torch.Tensor | None:
        """Return a random image [3, H, W] on the 8-bit grid, where PIL and tensors agree."""
        if self.task != TaskType.I2V:
            return None
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (3, self.height, self.width), generator=generator) / 255

    def requests(self, latents: torch.Tensor | None = None, **fields: Any) -> list[Request]:
        """Return a batch of two, of two prompts and two images, sampled alike."""
        negative = fields.pop("negative_prompt", None)
        return [
            make_request(
                self.task,
                prompt,
                sample=SampleId(7, prompt, (index,)),
                image=self.image(index),
                latents=None if latents is None else latents[index],
                negative_prompt=negative,
                **self.fields(**fields),
            )
            for index, prompt in enumerate(PROMPTS)
        ]


def random_latents(instance: ModelInstance, request: Request) -> torch.Tensor:
    """Return latents [2, *latent_shape] for both sides."""
    adapter = instance.adapter
    shape = adapter.latent_shape(adapter.resolve(request))
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(3))


def module_weights(instance: ModelInstance) -> dict[str, dict[str, torch.Tensor]]:
    """Return a copy of every module's tensors, by component."""
    return {
        component: {name: tensor.clone() for name, tensor in module.state_dict().items()}
        for component, module in instance.adapter.modules.items()
    }


def moved_components(
    before: Mapping[str, Mapping[str, torch.Tensor]], instance: ModelInstance
) -> set[str]:
    """Return the components of which one bit differs from ``before``."""
    after = module_weights(instance)
    return {
        component
        for component, tensors in before.items()
        if any(not torch.equal(t, after[component][name]) for name, t in tensors.items())
    }


class FamilyContract(MemoryContract):
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

    def _log_ratios(self, instance: ModelInstance, kind: str, guidance: Mapping[str, Any]) -> float:
        """Return the largest |log-ratio| of a rollout, recomputed under the same weights."""
        requests = self.case.requests(sde_kind=kind, sde_steps=tuple(range(STEPS - 1)), **guidance)
        _, record = rollout_loop(instance, "denoise", requests)
        assert record is not None
        assert len(record.steps) == STEPS - 1
        largest = 0.0
        for recorded, now in recompute(instance, record):
            ratio = gaussian_log_ratio(
                now.mean, recorded.mean, recorded.sample, recorded.std, mask=record.mask
            )
            assert ratio.isfinite().all()
            assert recorded.std.min() > 0
            largest = max(largest, float(ratio.detach().abs().max()))
        return largest

    @pytest.mark.parametrize("kind", SDE_KINDS)
    def test_c2_is_exact_in_float32(self, card: ModelCard, kind: str) -> None:
        """With gradient, as training recomputes it."""
        instance = load_card(card)
        for component in card.policies:
            instance.component(component).requires_grad_(True)
        for guidance in self.case.guidances:
            assert self._log_ratios(instance, kind, guidance) == 0.0

    def test_c2_in_bfloat16_is_shown(self, card: ModelCard) -> None:
        half = load_card(card, dtype=torch.bfloat16)
        for component in card.policies:
            half.component(component).requires_grad_(True)
        for kind in SDE_KINDS:
            largest = self._log_ratios(half, kind, self.case.guidances[-1])
            print(f"{self.case.name} {kind}: |log-ratio| in bfloat16 at most {largest:g}")  # noqa: T201
            assert largest <= self.case.c2_bfloat16

    def test_a_training_step_moves_the_policies_alone(self, card: ModelCard) -> None:
        student = load_card(card)
        requests = self.case.requests(sde_kind="cps", sde_steps=tuple(range(STEPS - 1)))
        stage = WorkflowStage(card.task.value, card.task)
        policy = StagePolicy(
            StageSettings(
                stage,
                StagePlan(requests[0].params, samples=2, slots=2),
                OptimizerSettings(lr=1e-3),
                kl_weight=0.0,
            ),
            student,
            None,
        )
        _, record = rollout_loop(student, "denoise", requests)
        assert record is not None
        before = module_weights(student)
        update = update_stage(
            policy,
            record,
            torch.tensor([1.0, -1.0]),
            torch.tensor([True, True]),
            iteration=0,
            num_updates=1,
            c2_tolerance=0.0,
        )
        assert update.applied
        assert moved_components(before, student) == {step.component for step in record.steps}

    def test_a_chain_with_the_embedded_partner_trains(self, card: ModelCard) -> None:
        image_stage = self.case.task == TaskType.T2I
        cards = (card, build_wan_i2v_card()) if image_stage else (build_flux_t2i_card(), card)
        own = DiffusionParams(
            height=self.case.height, width=self.case.width, num_frames=self.case.num_frames
        )
        method = build_workflow_rl(
            *cards,
            reward=build_rewards([{"name": "frame_change"}]),
            num_samples_per_prompt=2,
            num_videos_per_image=2,
            rollout_steps=3,
            beta=0.01,
            t2i_lr=1e-4,
            i2v_lr=1e-4,
            t2i_params=own if image_stage else None,
            i2v_params=None if image_stage else own,
        )
        before = [module_weights(policy.student) for policy in method.policies]
        losses, metrics = method.managed_train_step({"prompts": [PROMPTS[0]], "seeds": [0]}, 0)
        assert set(losses) >= {"t2i_pg_loss", "i2v_pg_loss"}
        assert metrics["grad_norm/t2i"] > 0
        assert metrics["grad_norm/i2v"] > 0
        for policy, weights in zip(method.policies, before, strict=True):
            moved = moved_components(weights, policy.student)
            assert moved
            assert moved <= set(policy.student.card.policies)

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
