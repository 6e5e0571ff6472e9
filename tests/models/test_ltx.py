"""The LTX-Video adapters against the stock pipelines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTXConditionPipeline, LTXImageToVideoPipeline, LTXPipeline
from diffusers import LTXVideoTransformer3DModel as Transformer
from torch import nn

from tests.models.case import PROMPTS, TOLERANCE
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.given_contract import GivenLatentsContract
from tests.models.lora_contract import LoRAContract
from tests.tiny_models.ltx import CHANNELS, Version, save_ltx
from workflow_rl.config import StageConfig
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import lora_layout
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.loop.schedule import euler_sigmas
from workflow_rl.models import build_card
from workflow_rl.models.ltx import DECODE_NOISE_SCALE, DECODE_TIMESTEP, VAE_SEED
from workflow_rl.request import Request, TaskType, make_request
from workflow_rl.training.build import stage_plan
from workflow_rl.training.rollout import rollout_loop

FRAMES, HEIGHT, WIDTH = 17, 32, 64
GIVEN = 2
"""Tokens of the first latent frame, of 3 x 1 x 2."""


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(VAE_SEED)


def _options(call: StockCall) -> dict[str, Any]:
    """Return what both stock pipelines take alike, the VAE's noise at its seed."""
    torch.manual_seed(VAE_SEED)  # a decoder with noise between its layers has no other source
    return {
        "prompt": call.prompt,
        "negative_prompt": call.negative_prompt,
        "height": call.params.height,
        "width": call.params.width,
        "num_frames": call.params.num_frames,
        "frame_rate": call.params.fps,
        "num_inference_steps": call.params.num_inference_steps,
        "guidance_scale": call.params.guidance_scale,
        "max_sequence_length": call.params.max_sequence_length,
        "decode_timestep": DECODE_TIMESTEP,
        "decode_noise_scale": DECODE_NOISE_SCALE,
        "generator": _generator(),
        "output_type": "pt",
    }


def _first_frame(call: StockCall) -> torch.Tensor:
    """Return the packed latents of the image, as the stock pipeline prepares them."""
    pixels = call.pipeline.video_processor.preprocess(call.image, height=HEIGHT, width=WIDTH)
    latents, mask = call.pipeline.prepare_latents(
        pixels, 1, CHANNELS, HEIGHT, WIDTH, FRAMES, torch.float32, "cpu", _generator()
    )
    first: torch.Tensor = latents[0][mask[0] == 1]
    return first


def _stock(call: StockCall) -> torch.Tensor:
    """Return what the image-to-video pipeline makes: given latents are to hold the image's."""
    latents = torch.cat([_first_frame(call), call.latents[GIVEN:]])
    frames_TCHW: torch.Tensor = call.pipeline(
        image=call.image, latents=latents[None], **_options(call)
    ).frames[0]
    return frames_TCHW.transpose(0, 1)


def _stock_condition(call: StockCall) -> torch.Tensor:
    """Return what the condition pipeline makes.

    It draws its noise itself, before the image's latents: both are replaced in what it prepares,
    so that the noise is the call's and the image's latents those of a generator at its start.
    """
    pipe, prepare = call.pipeline, call.pipeline.prepare_latents

    def prepare_ours(conditions: Any, *args: Any, **options: Any) -> Any:
        prepared, *rest = prepare(conditions, *args, **options | {"generator": _generator()})
        assert prepared.shape == (1, *call.latents.shape)
        image = pipe.vae.encode(conditions[0]).latent_dist.sample(_generator())
        first = pipe._normalize_latents(image, pipe.vae.latents_mean, pipe.vae.latents_std)
        return torch.cat([pipe._pack_latents(first), call.latents[None, GIVEN:]], 1), *rest

    pipe.prepare_latents = prepare_ours
    try:
        frames_TCHW: torch.Tensor = pipe(
            image=call.image, image_cond_noise_scale=0.0, **_options(call)
        ).frames[0]
    finally:
        del pipe.prepare_latents
    return frames_TCHW.transpose(0, 1)


LTX = FamilyCase(
    name="ltx",
    task="i2v",
    save=partial(save_ltx, version="0.9.1"),
    pipeline_class=LTXImageToVideoPipeline,
    stock=_stock,
    height=HEIGHT,
    width=WIDTH,
    num_frames=FRAMES,
    guidances=(
        {},
        {"guidance_scale": 3.0},
        {"guidance_scale": 2.0, "negative_prompt": "a cat"},
    ),
    params={"fps": 10.0},
)


class TestLTX(FamilyContract, LoRAContract, GivenLatentsContract):
    """0.9.1, whose decoder is conditioned on a timestep and adds noise."""

    case = LTX
    # Two blocks of two attention layers of four projections.
    lora_layers = 16


class TestLTXCondition(FamilyContract, GivenLatentsContract):
    case = replace(
        LTX,
        name="ltx-condition",
        save=partial(save_ltx, version="0.9.5"),
        pipeline_class=LTXConditionPipeline,
        stock=_stock_condition,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.9.0, as its hub folder is: under the text-to-video pipeline."""
    path = tmp_path_factory.mktemp("ltx") / "ltx"
    return save_ltx(path, version="0.9.0", pipeline_class=LTXPipeline)


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load_card(build_card(folder, TaskType.I2V))


@pytest.fixture(scope="module", params=["0.9.1", "0.9.5"])
def noisy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The adapter of a model whose decoder is given noise."""
    path = tmp_path_factory.mktemp("ltx") / request.param
    version: Version = request.param
    return load_card(build_card(save_ltx(path, version=version), TaskType.I2V)).adapter


def _request(**fields: Any) -> Request:
    sizes: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "num_frames": FRAMES}
    image = LTX.image(5)
    return make_request("i2v", PROMPTS[0], image=image, **sizes | fields)


def test_one_generator_of_the_stock_pipeline_gives_the_same(
    folder: Path, instance: ModelInstance
) -> None:
    """No latents are passed: the stock pipeline draws the image's, then the noise."""
    pipeline = LTXImageToVideoPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    generator = _generator()
    torch.randn(1, CHANNELS, 1, 1, 2, generator=generator)  # the image's
    noise = pipeline._pack_latents(torch.randn(1, CHANNELS, 3, 1, 2, generator=generator))
    request = _request(latents=noise[0], guidance_scale=3.0, num_inference_steps=4)
    ours, _ = rollout_loop(instance, "denoise", [request], profile=ExecutionProfile.SERVE)
    params = instance.adapter.resolve(request)
    call = StockCall(pipeline, request.prompt, noise[0], request.image_CHW, params, None)
    stock = pipeline(image=call.image, **_options(call)).frames[0]
    torch.testing.assert_close(ours[0], stock.transpose(0, 1), atol=TOLERANCE, rtol=0)


def test_decoding_is_a_function_of_the_latents_alone(noisy: Any) -> None:
    params = noisy.resolve(_request())
    latents = torch.randn(2, *noisy.latent_shape(params), generator=_generator())
    with torch.no_grad():
        both = noisy.decode(latents, params)
        torch.manual_seed(123)
        state = torch.random.get_rng_state()
        second = noisy.decode(latents[1:], params)
    assert torch.equal(second[0], both[1])
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_image_has_one_encoding(instance: ModelInstance) -> None:
    adapter = instance.adapter
    params = adapter.resolve(_request())
    images = torch.stack([image for seed in (1, 2) if (image := LTX.image(seed)) is not None])
    with torch.no_grad():
        both = adapter.encode_images(images, params)
        torch.manual_seed(123)
        (second,) = adapter.encode_images(images[1:], params)
    torch.testing.assert_close(second["first_frame"], both[1]["first_frame"], rtol=0, atol=0)
    assert not torch.equal(both[0]["first_frame"], both[1]["first_frame"])


def test_schedule_of_the_published_size(instance: ModelInstance) -> None:
    """512 x 704 px, 161 frames, 50 steps; values of the published scheduler."""
    request = _request(height=512, width=704, num_frames=None, num_inference_steps=50)
    params = instance.adapter.resolve(request)
    assert params.num_frames == 161
    sigmas = euler_sigmas(instance.adapter.schedule(params), 50).tolist()
    assert sigmas[:3] == pytest.approx([1.0, 0.99890, 0.99776], abs=6e-6)
    assert sigmas[-3:] == pytest.approx([0.33558, 0.1, 0.0], abs=6e-6)


def test_a_stage_tells_the_model_its_frame_rate(instance: ModelInstance) -> None:
    """The key reaches the positions in time, and the videos that are written."""
    scales = {}
    for fps in (None, 10.0):
        asked = stage_plan(StageConfig(task="i2v", fps=fps)).params
        params = instance.adapter.resolve(replace(_request(), params=asked))
        positions = instance.adapter.positions(torch.zeros(1), params)
        scales[params.fps] = positions["rope_interpolation_scale"][0]
    assert scales == {25.0: 8 / 25, 10.0: 8 / 10}


THIRTEEN_B = {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48}
"""What differs in the transformer of 0.9.7; that of the 2B models has the class's defaults."""


@pytest.mark.parametrize(
    ("shape", "size", "adapted", "layers"),
    [({}, 1_923_385_472, 224, 287), (THIRTEEN_B, 13_042_569_344, 384, 487)],
)
def test_the_default_lora_of_the_published_architectures(
    shape: dict[str, int], size: int, adapted: int, layers: int
) -> None:
    with torch.device("meta"):
        transformer = Transformer(**shape)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == size
    linears = {
        name: tuple(layer.weight.shape)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    targets = FAMILIES["LTXImageToVideoPipeline"].lora_targets
    policies = ("transformer",)
    layout = lora_layout(LoRAConfig(), linears, targets, "transformer", policies, "lora")
    assert (len(layout.modules), len(linears)) == (adapted, layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 16}, "cannot make height 16: give a positive multiple of 32 pixels"),
        ({"num_frames": 16}, "cannot make 16 frames: give a multiple of 8 plus 1"),
        ({"max_sequence_length": 129}, "max_sequence_length is 129; give 1 to 128"),
        ({"guidance": "embedded"}, "has no embedded guidance"),
    ],
)
def test_what_the_model_cannot_do_is_one_line(
    instance: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        instance.adapter.resolve(_request(**fields))
