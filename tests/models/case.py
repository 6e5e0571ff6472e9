"""One tiny checkpoint of a family, and what the contracts do with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from workflow_rl.instance import ModelInstance
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.loop.schedule import euler_sigmas
from workflow_rl.request import DiffusionParams, Request, SampleId, TaskType, make_request
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.settings import OptimizerSettings, StageSettings
from workflow_rl.training.update import StageUpdate, update_stage
from workflow_rl.workflow import StagePlan, WorkflowStage

PROMPTS = ("a red circle moving left", "a blue square")
STEPS = 4
TOLERANCE = 1e-5
TRAINED: Mapping[str, Any] = {"sde_kind": "cps", "sde_steps": tuple(range(STEPS - 1))}
"""Request fields of what is trained on."""


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
class PublishedSchedule:
    """Ends of a published schedule: of the request ``fields``, to 6e-6."""

    fields: Mapping[str, Any]
    first: tuple[float, ...]
    last: tuple[float, ...]

    def check(self, instance: ModelInstance, request: Request) -> None:
        """Hold the adapter's sigmas to it; ``request`` has ``fields``."""
        params = instance.adapter.resolve(request)
        sigmas = euler_sigmas(instance.adapter.schedule(params), params.num_inference_steps)
        found = sigmas.tolist()
        assert found[: len(self.first)] == pytest.approx(self.first, abs=6e-6)
        assert found[len(found) - len(self.last) :] == pytest.approx(self.last, abs=6e-6)


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
        The largest |log-ratio| on-policy in bfloat16, of three SDEs.
    tolerance
        Largest difference to the stock pipeline, in float32.
    params
        Further request fields of every test, such as ``max_sequence_length``.
    defaults
        What the parameters of a request that asks for nothing become.
    schedules
        Published schedules that the tiny checkpoint has too.
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    schedules: tuple[PublishedSchedule, ...] = ()

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


def stage_policy(
    instance: ModelInstance,
    case: FamilyCase,
    *,
    lr: float = 1e-3,
    reference: ModelInstance | None = None,
    **settings: Any,
) -> StagePolicy:
    """Return the stage that trains on :func:`roll_out`'s records; without KL unless given."""
    card = instance.card
    plan = StagePlan(case.requests(**TRAINED)[0].params, samples=2, slots=2)
    options = OptimizerSettings(lr=lr)
    stage = WorkflowStage(card.task.value, card.task)
    return StagePolicy(
        StageSettings(stage, plan, options, **{"kl_weight": 0.0} | settings), instance, reference
    )


def roll_out(instance: ModelInstance, case: FamilyCase, **fields: Any) -> BehaviourRecord:
    """Roll out two samples; every step but the last is stochastic: each expert made some."""
    _, record = rollout_loop(instance, "denoise", case.requests(**dict(TRAINED) | fields))
    assert record is not None
    return record


def update(policy: StagePolicy, record: BehaviourRecord, c2_tolerance: float = 0.0) -> StageUpdate:
    """Take one optimiser step on two samples, of which the first was the better one."""
    return update_stage(
        policy,
        record,
        torch.tensor([1.0, -1.0]),
        torch.tensor([True, True]),
        iteration=0,
        num_updates=1,
        c2_tolerance=c2_tolerance,
    )
