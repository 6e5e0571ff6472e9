"""The Z-Image adapter against the stock pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline

from tests.models.case import PROMPTS, PublishedSchedule
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models.z_image import save_z_image
from workflow_rl.enums import GuidanceMode
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models.z_image import build_z_image_t2i_card
from workflow_rl.request import make_request
from workflow_rl.training.rollout import rollout_loop

LONG = PROMPTS[0]


def _stock(call: StockCall) -> torch.Tensor:
    image: torch.Tensor = call.pipeline(
        prompt=call.prompt,
        negative_prompt=call.negative_prompt,
        cfg_normalization=call.params.cfg_normalization or False,
        cfg_truncation=1.0 if call.params.cfg_truncation is None else call.params.cfg_truncation,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_inference_steps=call.params.num_inference_steps,
        guidance_scale=call.params.guidance_scale,
        max_sequence_length=call.params.max_sequence_length,
        output_type="pt",
    ).images[0]
    return image


class TestZImage(FamilyContract, LoRAContract):
    """The two prompts of a batch differ in length. Not square: rows and columns differ."""

    case = FamilyCase(
        name="z-image",
        task="t2i",
        save=partial(save_z_image, shift=6.0),
        pipeline_class=ZImagePipeline,
        stock=_stock,
        width=48,
        guidances=(
            {},
            {"guidance_scale": 4.0},
            {"guidance_scale": 0.5, "negative_prompt": "a cat"},
            {"guidance_scale": 4.0, "cfg_normalization": 0.9, "cfg_truncation": 0.3},
        ),
        defaults={"height": 1024, "width": 1024},
        # Static, whatever the size.
        schedules=tuple(
            PublishedSchedule(
                {"height": side, "width": side, "num_inference_steps": 50},
                (1.0, 0.99661, 0.99310),
                (0.2, 0.10909, 0.0),
            )
            for side in (512, 1024)
        ),
    )
    # Three blocks: two refiners and a layer, each with 4 projections and a feed-forward of 3.
    lora_layers = 21


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder = tmp_path_factory.mktemp("z_image") / "z-image"
    return load_card(build_z_image_t2i_card(save_z_image(folder, shift=6.0)))


def test_the_published_schedule_of_turbo(tmp_path: Path) -> None:
    instance = load_card(build_z_image_t2i_card(save_z_image(tmp_path / "turbo", shift=3.0)))
    request = make_request("t2i", LONG, num_inference_steps=8)
    PublishedSchedule({}, (1.0, 0.95455, 0.9), (0.5, 0.3, 0.0)).check(instance, request)


@pytest.mark.parametrize(
    ("scale", "mode"),
    [(None, GuidanceMode.NONE), (0.0, GuidanceMode.NONE), (0.5, GuidanceMode.CFG)],
)
def test_guidance_begins_above_zero(
    instance: ModelInstance, scale: float | None, mode: GuidanceMode
) -> None:
    request = make_request("t2i", LONG, guidance_scale=scale)
    assert instance.adapter.guidance(instance.adapter.resolve(request)).mode is mode


def test_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(UserError, match="expected a ZImagePipeline"):
        build_z_image_t2i_card(tmp_path)


def test_the_cap_and_the_truncation_change_the_image(instance: ModelInstance) -> None:
    """Each alone; and the record names the cap."""
    fields: dict[str, Any] = {
        "height": 32,
        "width": 32,
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
    }
    images: list[torch.Tensor] = []
    extras: tuple[dict[str, Any], ...] = ({}, {"cfg_normalization": 0.9}, {"cfg_truncation": 0.05})
    for extra in extras:
        request = make_request("t2i", LONG, sde_steps=(0,), **fields, **extra)
        media, record = rollout_loop(instance, "denoise", request)
        assert record is not None
        capped = "cfg_normalization" in extra
        assert record.guidance == "cfg_from_positive" + "_cap_0.9" * capped
        images.append(media)
    assert all((images[i] - images[j]).abs().max() > 1e-4 for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cfg_normalization": 1.0}, "would ignore cfg_normalization"),
        ({"cfg_truncation": 0.5}, "would ignore cfg_truncation"),
        ({"negative_prompt": "blurry"}, "set guidance_scale > 0 or leave negative_prompt out"),
    ],
)
def test_what_needs_guidance_is_refused_without_it(
    instance: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        instance.adapter.resolve(make_request("t2i", LONG, **fields))


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="cfg_normalization is 0; give a number above 0"):
        make_request("t2i", LONG, cfg_normalization=0)
