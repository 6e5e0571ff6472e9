"""The Wan adapter against the stock pipeline."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline

from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models import save_wan
from tests.tiny_models.wan import uni_pc
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_wan_i2v_card
from workflow_rl.request import make_request
from workflow_rl.training.rollout import rollout_loop

PROMPT = "a red circle moving left"
FRAMES = 5


def stock_wan(call: StockCall) -> torch.Tensor:
    """Return what the stock pipeline makes."""
    frames_TCHW: torch.Tensor = call.pipeline(
        image=call.image,
        prompt=call.prompt,
        negative_prompt=call.negative_prompt,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_frames=call.params.num_frames,
        num_inference_steps=call.params.num_inference_steps,
        guidance_scale=call.params.guidance_scale,
        guidance_scale_2=call.params.guidance_scale_2,
        max_sequence_length=call.params.max_sequence_length,
        output_type="pt",
    ).frames[0]
    return frames_TCHW.transpose(0, 1)


class TestWan21(FamilyContract, LoRAContract):
    """With an image encoder and, as published, a UniPC scheduler.

    The default LoRA leaves the image projections out; the stock loader fills them in with zeros.
    """

    case = FamilyCase(
        name="wan-2.1",
        task="i2v",
        save=partial(save_wan, image_encoder=True, scheduler=uni_pc()),
        pipeline_class=WanImageToVideoPipeline,
        stock=stock_wan,
        num_frames=FRAMES,
        guidances=(
            {},
            {"guidance_scale": 3.0},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
        euler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    lora_layers = 20


class TestWanWithoutImageEncoder(FamilyContract):
    case = FamilyCase(
        name="wan-plain",
        task="i2v",
        save=partial(save_wan, image_encoder=False),
        pipeline_class=WanImageToVideoPipeline,
        stock=stock_wan,
        num_frames=FRAMES,
        guidances=(
            {},
            {"guidance_scale": 3.0},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
    )


@pytest.fixture(scope="module", params=["clip", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / f"wan-{request.param}"
    return save_wan(path, image_encoder=request.param == "clip")


@pytest.fixture(scope="module")
def instance(folder: Path) -> ModelInstance:
    return load_card(build_wan_i2v_card(folder))


def _images(count: int) -> torch.Tensor:
    """Random images on the 8-bit grid, so that PIL and tensors say the same."""
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    return pixels / 255


def test_an_image_of_a_group_is_encoded_once(
    instance: ModelInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae: Any = instance.component("vae")
    encoded: list[int] = []
    encode = vae.encode

    def counting(frames: torch.Tensor) -> object:
        encoded.append(len(frames))
        return encode(frames)

    monkeypatch.setattr(vae, "encode", counting)
    image = _images(1)[0]
    requests = [
        make_request("i2v", PROMPT, image=image, num_frames=FRAMES, num_inference_steps=1)
        for _ in range(3)
    ]
    rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    assert encoded == [1]


def test_another_scheduler_cannot_roll_out(tmp_path: Path) -> None:
    save_wan(tmp_path / "wan", image_encoder=False, scheduler=uni_pc())
    instance = load_card(build_wan_i2v_card(tmp_path / "wan"))
    fields: dict[str, Any] = {"num_frames": FRAMES, "sampler": "checkpoint"}
    request = make_request("i2v", PROMPT, image=_images(1)[0], **fields)
    message = "cannot be rolled out with sampler: checkpoint, whose UniPCMultistepScheduler"
    with pytest.raises(UserError, match=message):
        rollout_loop(instance, "denoise", request)


def test_an_image_is_needed() -> None:
    with pytest.raises(UserError, match="needs an image"):
        make_request("i2v", PROMPT)


def test_images_of_two_sizes_in_one_batch_are_refused(instance: ModelInstance) -> None:
    image = _images(1)[0]
    options: dict[str, Any] = {"num_frames": FRAMES, "height": 32, "width": 32}
    requests = [
        make_request("i2v", PROMPT, image=each, **options) for each in (image, image[:, :16])
    ]
    with pytest.raises(UserError, match="images of one batch differ in size"):
        rollout_loop(instance, "denoise", requests)


def test_a_negative_prompt_that_would_be_ignored_is_refused(instance: ModelInstance) -> None:
    request = make_request("i2v", PROMPT, image=_images(1)[0], negative_prompt="blurry")
    with pytest.raises(UserError, match="set guidance_scale > 1"):
        instance.adapter.resolve(request)


def test_another_scheduler_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(scheduler: str) -> list[str]:
        caplog.clear()
        index = {
            "_class_name": "WanImageToVideoPipeline",
            "scheduler": ["diffusers", scheduler],
        }
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        build_wan_i2v_card(tmp_path)
        return [record.getMessage() for record in caplog.records]

    assert build("FlowMatchEulerDiscreteScheduler") == []
    (message,) = build("UniPCMultistepScheduler")
    assert "UniPCMultistepScheduler; it is served with Euler steps" in message
    assert "sampler: checkpoint" in message
