"""The FLUX adapter against the stock pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

from tests.models.case import PROMPTS
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models import save_flux
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.schedule import euler_sigmas
from workflow_rl.models import build_card, build_flux_t2i_card
from workflow_rl.request import TaskType, make_request


def _stock(call: StockCall) -> torch.Tensor:
    scale = call.params.guidance_scale
    options: dict[str, Any] = {"guidance_scale": scale}
    if not call.pipeline.transformer.config.guidance_embeds:
        options = {"true_cfg_scale": scale, "negative_prompt": call.negative_prompt or ""}
    image: torch.Tensor = call.pipeline(
        call.prompt,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_inference_steps=call.params.num_inference_steps,
        max_sequence_length=call.params.max_sequence_length,
        output_type="pt",
        **options,
    ).images[0]
    return image


LORA_LAYERS = 15
"""One double block: 8 projections of attention, 4 of feed-forward; one single block: 3."""


class TestFluxDev(FamilyContract, LoRAContract):
    """Embedded guidance, dynamic shift. Not square, so that rows and columns differ."""

    lora_layers = LORA_LAYERS
    case = FamilyCase(
        name="flux-dev",
        task="t2i",
        save=partial(save_flux, guidance_embeds=True, dynamic_shift=True),
        pipeline_class=FluxPipeline,
        stock=_stock,
        width=48,
        guidances=({}, {"guidance_scale": 2.5}),
    )


class TestFluxSchnell(FamilyContract, LoRAContract):
    """No guidance input, static shift of 1; classifier-free guidance is the pipeline's true_cfg."""

    lora_layers = LORA_LAYERS
    case = FamilyCase(
        name="flux-schnell",
        task="t2i",
        save=partial(save_flux, guidance_embeds=False, dynamic_shift=False),
        pipeline_class=FluxPipeline,
        stock=_stock,
        guidances=(
            {},
            {"guidance_scale": 2.5},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
    )


@pytest.fixture(scope="module", params=["dev", "schnell"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dev = request.param == "dev"
    path = tmp_path_factory.mktemp(request.param) / f"flux-{request.param}"
    return save_flux(path, guidance_embeds=dev, dynamic_shift=dev)


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load_card(build_flux_t2i_card(folder))


def test_schedule_of_a_1024_px_image(instance: ModelInstance) -> None:
    """Which has 64 tokens a side; values of the published schedulers."""
    adapter = instance.adapter
    dev = adapter.modules["transformer"].config.guidance_embeds
    steps = 28 if dev else 4
    side = 64 * adapter.grid.height
    request = make_request("t2i", PROMPTS[0], height=side, width=side, num_inference_steps=steps)
    sigmas = euler_sigmas(adapter.schedule(adapter.resolve(request)), steps).tolist()
    assert sigmas[:2] == pytest.approx([1.0, 0.98841] if dev else [1.0, 0.75], abs=6e-6)
    assert sigmas[-3:] == pytest.approx(
        [0.19545, 0.10472, 0.0] if dev else [0.5, 0.25, 0.0], abs=6e-6
    )


def test_embedded_guidance_is_the_published_scale_where_none_is_asked_for(
    instance: ModelInstance,
) -> None:
    dev = instance.adapter.modules["transformer"].config.guidance_embeds
    params = instance.adapter.resolve(make_request("t2i", PROMPTS[0]))
    assert params.guidance_scale == (3.5 if dev else 1.0)


def test_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(UserError, match="StableDiffusionPipeline, which is not supported"):
        build_card(tmp_path, TaskType.T2I)
    with pytest.raises(UserError, match="expected a FluxPipeline"):
        build_flux_t2i_card(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        build_card(tmp_path / "missing", TaskType.T2I)


def test_missing_weights_are_one_line(tmp_path: Path) -> None:
    folder = save_flux(tmp_path / "flux", guidance_embeds=False, dynamic_shift=False)
    next((folder / "transformer").glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="holds no weights in safetensors"):
        load_card(build_flux_t2i_card(folder))


def test_a_negative_prompt_that_would_be_ignored_is_refused(instance: ModelInstance) -> None:
    embedded = instance.adapter.modules["transformer"].config.guidance_embeds
    message = "its guidance is embedded" if embedded else "set guidance_scale > 1"
    request = make_request("t2i", PROMPTS[0], negative_prompt="blurry")
    with pytest.raises(UserError, match=message):
        instance.adapter.resolve(request)
    if not embedded:
        guided = make_request("t2i", PROMPTS[0], negative_prompt="blurry", guidance_scale=2.0)
        assert instance.adapter.resolve(guided).guidance_scale == 2.0


def test_too_many_text_tokens_are_refused(instance: ModelInstance) -> None:
    with pytest.raises(UserError, match="max_sequence_length is 513; give 1 to 512"):
        instance.adapter.resolve(make_request("t2i", PROMPTS[0], max_sequence_length=513))


def test_a_relative_folder_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert build_flux_t2i_card(".").model_id == folder.name
