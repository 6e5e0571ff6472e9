"""The shipped folders are stock checkpoints, small, and show what they are told."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxPipeline, WanImageToVideoPipeline

from workflow_rl.embedded import pretrain, quality, world

IMAGE_DIR, VIDEO_DIR = (
    pretrain.CHECKPOINTS / pretrain.IMAGE_FOLDER,
    pretrain.CHECKPOINTS / pretrain.VIDEO_FOLDER,
)
STEPS = 6


@pytest.fixture(scope="module")
def image_pipeline() -> FluxPipeline:
    pipeline = FluxPipeline.from_pretrained(IMAGE_DIR)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def video_pipeline() -> WanImageToVideoPipeline:
    pipeline = WanImageToVideoPipeline.from_pretrained(VIDEO_DIR)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_folders_are_at_most_twelve_megabytes() -> None:
    files = [path for path in pretrain.CHECKPOINTS.rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) <= 12_000_000
    assert not [path for path in files if path.suffix in (".bin", ".pt", ".pkl", ".ckpt")]
    for folder in (IMAGE_DIR, VIDEO_DIR):
        assert (folder / "README.md").is_file()
    assert not [p for p in files if p.suffix == ".json" and "_name_or_path" in p.read_text()]


def test_weights_are_float32(
    image_pipeline: FluxPipeline, video_pipeline: WanImageToVideoPipeline
) -> None:
    for pipeline in (image_pipeline, video_pipeline):
        for component in (pipeline.transformer, pipeline.vae, pipeline.text_encoder):
            assert {p.dtype for p in component.parameters()} == {torch.float32}


def test_chain_of_stock_pipelines_shows_the_captions(
    image_pipeline: FluxPipeline, video_pipeline: WanImageToVideoPipeline
) -> None:
    captions = list(world.held_out_captions())
    prompts = [str(caption) for caption in captions]
    size = {"height": world.SIZE, "width": world.SIZE, "guidance_scale": 1.0}
    shared = {**size, "num_inference_steps": STEPS, "max_sequence_length": 16, "output_type": "pt"}
    images = image_pipeline(prompts, generator=torch.Generator().manual_seed(0), **shared).images
    assert images.shape == (12, 3, world.SIZE, world.SIZE)
    generator = torch.Generator().manual_seed(1)
    videos = [
        video_pipeline(
            image.unsqueeze(0),
            prompt,
            num_frames=world.NUM_FRAMES,
            generator=generator,
            **shared,
        ).frames
        for image, prompt in zip(images, prompts, strict=True)
    ]
    assert videos[0].shape == (1, world.NUM_FRAMES, 3, world.SIZE, world.SIZE)
    result = quality.measure(torch.cat(videos), captions)
    assert result.colour >= 0.75
    assert result.shape >= 0.6
    assert result.direction >= 0.6
