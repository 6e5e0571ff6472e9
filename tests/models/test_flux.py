"""The FLUX adapter against the stock pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline

from tests.tiny_models import save_flux
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_card, build_flux_t2i_card
from workflow_rl.request import TaskType, make_request
from workflow_rl.training.rollout import rollout_loop

PROMPTS = ["a red circle moving left", "a blue square moving up"]


@pytest.fixture(scope="module", params=["dev", "schnell"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dev = request.param == "dev"
    path = tmp_path_factory.mktemp(request.param) / f"flux-{request.param}"
    return save_flux(path, guidance_embeds=dev, dynamic_shift=dev)


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load_card(build_flux_t2i_card(folder))


def _serve(instance: ModelInstance, latents: torch.Tensor, **fields: Any) -> torch.Tensor:
    requests = [
        make_request("t2i", prompt, latents=row, num_inference_steps=3, **fields)
        for prompt, row in zip(PROMPTS, latents, strict=True)
    ]
    media, record = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    assert record is None
    return media


@pytest.mark.parametrize("guidance", [None, 2.5])
def test_serve_equals_the_stock_pipeline(
    folder: Path, instance: ModelInstance, guidance: float | None
) -> None:
    latents = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    stock = FluxPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {}
    if guidance is not None and stock.transformer.config.guidance_embeds:
        options = {"guidance_scale": guidance}
    elif guidance is not None:
        options = {"true_cfg_scale": guidance, "negative_prompt": [""] * 2}
    expected = stock(
        PROMPTS,
        latents=latents,
        height=32,
        width=32,
        num_inference_steps=3,
        max_sequence_length=16,
        output_type="pt",
        **options,
    ).images
    ours = _serve(instance, latents, guidance_scale=guidance)
    assert ours.shape == (2, 3, 32, 32)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_prompt_and_latents_change_the_image(instance: ModelInstance) -> None:
    latents = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(3))
    images = _serve(instance, latents)
    swapped = _serve(instance, latents.flip(0))
    assert (images - swapped.flip(0)).abs().max() > 1e-4


def test_size_off_the_grid_is_refused(instance: ModelInstance) -> None:
    request = make_request("t2i", PROMPTS[0], height=36, width=32)
    with pytest.raises(UserError, match="height 36: give a positive multiple of 8"):
        rollout_loop(instance, "denoise", request)


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
    with pytest.raises(UserError, match="cannot load"):
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
