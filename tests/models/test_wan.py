"""The Wan adapter against the stock pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanImageToVideoPipeline
from PIL import Image

from tests.tiny_models import save_wan
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_wan_i2v_card
from workflow_rl.request import make_request
from workflow_rl.training.rollout import rollout_loop

PROMPT = "a red circle moving left"
FRAMES = 5


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


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_serve_equals_the_stock_pipeline(
    folder: Path, instance: ModelInstance, guidance: float
) -> None:
    """Two images in one batch here, one call of the stock pipeline for each."""
    latents = torch.randn(2, 4, 2, 4, 4, generator=torch.Generator().manual_seed(3))
    images = _images(2)
    stock = WanImageToVideoPipeline.from_pretrained(folder)
    stock.set_progress_bar_config(disable=True)
    expected = [
        stock(
            image=Image.fromarray((image * 255).byte().permute(1, 2, 0).numpy()),
            prompt=PROMPT,
            latents=row[None],
            height=32,
            width=32,
            num_frames=FRAMES,
            num_inference_steps=3,
            guidance_scale=guidance,
            max_sequence_length=16,
            output_type="pt",
        ).frames[0]
        for image, row in zip(images, latents, strict=True)
    ]
    requests = [
        make_request(
            "i2v",
            PROMPT,
            image=image,
            latents=row,
            num_frames=FRAMES,
            num_inference_steps=3,
            guidance_scale=guidance,
        )
        for image, row in zip(images, latents, strict=True)
    ]
    media, _ = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    assert media.shape == (2, 3, FRAMES, 32, 32)
    for ours, theirs in zip(media, expected, strict=True):
        torch.testing.assert_close(ours, theirs.transpose(0, 1), atol=1e-5, rtol=0)


def test_the_image_conditions_the_video(instance: ModelInstance) -> None:
    first, second = _images(2)
    fields: dict[str, Any] = {"num_frames": FRAMES, "num_inference_steps": 2}
    media, _ = rollout_loop(
        instance,
        "denoise",
        [make_request("i2v", PROMPT, image=image, **fields) for image in (first, second)],
        profile=ExecutionProfile.SERVE,
    )
    assert (media[0] - media[1]).abs().max() > 1e-4


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_frames": 6}, "cannot make 6 frames: give a multiple of 4 plus 1"),
        ({"height": 40, "width": 32}, "height 40: give a positive multiple of 16"),
    ],
)
def test_what_the_model_cannot_make_is_refused(
    instance: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    request = make_request("i2v", PROMPT, image=_images(1)[0], **({"num_frames": 5} | fields))
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


def test_wan_2_2_is_refused_by_its_card(tmp_path: Path) -> None:
    index = {"_class_name": "WanImageToVideoPipeline", "boundary_ratio": 0.9}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"a Wan 2\.2 checkpoint"):
        build_wan_i2v_card(tmp_path)
