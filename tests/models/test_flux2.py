"""The FLUX.2 klein adapter against the stock pipeline."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline

from tests.models.case import PROMPTS
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models.flux2 import save_flux2
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.schedule import euler_sigmas
from workflow_rl.models import build_card
from workflow_rl.models.flux2 import build_flux2_t2i_card
from workflow_rl.request import TaskType, make_request


def _stock(call: StockCall) -> torch.Tensor:
    """Return what the stock pipeline makes; a negative prompt goes in as its embeddings."""
    length = call.params.max_sequence_length
    negative = None
    if call.negative_prompt is not None:
        negative, _ = call.pipeline.encode_prompt(call.negative_prompt, max_sequence_length=length)
    image: torch.Tensor = call.pipeline(
        prompt=call.prompt,
        negative_prompt_embeds=negative,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_inference_steps=call.params.num_inference_steps,
        guidance_scale=call.params.guidance_scale,
        max_sequence_length=length,
        output_type="pt",
    ).images[0]
    return image


class TestFlux2KleinBase(FamilyContract, LoRAContract):
    """Not distilled: classifier-free guidance. Not square, so that rows and columns differ."""

    case = FamilyCase(
        name="flux2-klein-base",
        task="t2i",
        save=partial(save_flux2, is_distilled=False),
        pipeline_class=Flux2KleinPipeline,
        stock=_stock,
        width=48,
        guidances=(
            {},
            {"guidance_scale": 4.0},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
    )
    # One double block: 8 projections of attention, 4 of feed-forward; one single block: 2.
    lora_layers = 14


class TestFlux2KleinDistilled(FamilyContract):
    case = FamilyCase(
        name="flux2-klein",
        task="t2i",
        save=partial(save_flux2, is_distilled=True),
        pipeline_class=Flux2KleinPipeline,
        stock=_stock,
    )


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder = tmp_path_factory.mktemp("flux2") / "flux2-klein"
    return load_card(build_flux2_t2i_card(save_flux2(folder, is_distilled=True)))


@pytest.mark.parametrize(
    ("tokens", "steps", "expected"),
    [
        (64, 4, [1.0, 0.96738, 0.90814, 0.76720, 0.0]),
        (32, 4, [1.0, 0.95809, 0.88398, 0.71750, 0.0]),
        (64, 50, [1.0, 0.99731, 0.99452]),
        (64, 50, [0.23963, 0.13372, 0.0]),
    ],
)
def test_schedule_of_full_size_images(
    distilled: ModelInstance, tokens: int, steps: int, expected: list[float]
) -> None:
    """1024 and 512 px have 64 and 32 tokens a side; values of the published scheduler."""
    adapter = distilled.adapter
    side = tokens * adapter.grid.height
    request = make_request("t2i", PROMPTS[0], height=side, width=side, num_inference_steps=steps)
    sigmas = euler_sigmas(adapter.schedule(adapter.resolve(request)), steps).tolist()
    part = sigmas[: len(expected)] if expected[0] == 1 else sigmas[-len(expected) :]
    assert part == pytest.approx(expected, abs=6e-6)


def test_a_size_is_the_stock_pipelines_where_none_is_asked_for(distilled: ModelInstance) -> None:
    pipeline = distilled.adapter.pipeline
    params = distilled.adapter.resolve(make_request("t2i", PROMPTS[0]))
    side = pipeline.default_sample_size * pipeline.vae_scale_factor
    assert (params.height, params.width) == (side, side)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance_scale": 4.0}, r"has no cfg guidance \(it has none\)"),
        ({"negative_prompt": "blurry"}, "would ignore negative_prompt"),
    ],
)
def test_guidance_that_a_distilled_model_would_ignore_is_refused(
    distilled: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        distilled.adapter.resolve(make_request("t2i", PROMPTS[0], **fields))


def test_the_class_names_of_published_folders_load(tmp_path: Path) -> None:
    """Published under transformers 4, whose tokenizer had a class for its fast version."""
    folder = save_flux2(tmp_path / "klein", is_distilled=True)
    index_file = folder / "model_index.json"
    index = json.loads(index_file.read_text())
    index["tokenizer"] = ["transformers", "Qwen2TokenizerFast"]
    index_file.write_text(json.dumps(index))
    instance = load_card(build_card(folder, TaskType.T2I))
    request = make_request("t2i", PROMPTS[0])
    (row,) = instance.adapter.encode(instance, [request])
    assert row["prompt_embeds"].isfinite().all()


def test_other_flux2_pipelines_are_one_line(tmp_path: Path) -> None:
    """FLUX.2-dev, of another text encoder, has a class of its own."""
    (tmp_path / "model_index.json").write_text('{"_class_name": "Flux2Pipeline"}')
    with pytest.raises(UserError, match="Flux2Pipeline, which is not supported"):
        build_card(tmp_path, TaskType.T2I)
    with pytest.raises(UserError, match="expected a Flux2KleinPipeline"):
        build_flux2_t2i_card(tmp_path)
