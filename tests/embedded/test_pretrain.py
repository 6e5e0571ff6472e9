"""The whole pre-training, at a thousandth of its length."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, WanImageToVideoPipeline

from workflow_rl.embedded import train_transformer, train_vae, world
from workflow_rl.embedded.optimise import Recipe, learning_rate_factor, optimise
from workflow_rl.embedded.pretrain import CHECKPOINTS, VIDEO_FOLDER, pretrain
from workflow_rl.embedded.records import PretrainRecipe
from workflow_rl.errors import UserError

SHORT = Recipe(steps=1, batch_size=2, learning_rate=1e-3)
SMALL = PretrainRecipe(SHORT, SHORT, SHORT, SHORT, SHORT, SHORT, image_pool=2, video_pool=2)


def test_pretrain_end_to_end_then_resumes_and_refuses_another_recipe(tmp_path: Path) -> None:
    lines: list[str] = []
    image_dir, video_dir = pretrain(tmp_path, seed=3, recipe=SMALL, log=lines.append)
    image = FluxPipeline.from_pretrained(image_dir)
    video = WanImageToVideoPipeline.from_pretrained(video_dir)
    assert image.vae.config.scaling_factor != 1.0
    assert video.vae.config.latents_std != [1.0] * 16
    for folder in (image_dir, video_dir):
        assert not [f for f in folder.rglob("*.json") if str(tmp_path) in f.read_text()]
        readme = (folder / "README.md").read_text(encoding="utf-8")
        assert "seed 3" in readme
        assert "| video decoder | 1 |" in readme

    stage = tmp_path / "stages" / "video-transformer.json"
    before = stage.stat().st_mtime_ns
    pretrain(tmp_path, seed=3, recipe=SMALL, log=lines.append)
    assert stage.stat().st_mtime_ns == before
    assert lines.count("video-transformer: already there") == 1
    assert json.loads(stage.read_text(encoding="utf-8"))["losses"]["video transformer"] > 0

    with pytest.raises(UserError, match="another seed or recipe"):
        pretrain(tmp_path, seed=4, recipe=SMALL, log=lines.append)


def test_scaled_recipe_keeps_everything_but_the_amounts() -> None:
    recipe = PretrainRecipe()
    half = recipe.scaled(0.5)
    assert half.video_pool == recipe.video_pool // 2
    for name, part in recipe.parts().items():
        assert half.parts()[name].steps == part.steps // 2
        assert half.parts()[name].learning_rate == part.learning_rate


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [learning_rate_factor(step, 200) for step in range(200)]
    assert max(factors) == 1.0
    assert factors.index(1.0) <= 10
    assert factors[0] <= 0.1
    assert factors[-1] < 1e-3
    assert all(a >= b for a, b in itertools.pairwise(factors[10:]))


def test_optimise_finds_a_minimum_and_keeps_averaged_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 16).unsqueeze(1)
    loss = optimise(
        model,
        lambda step: (model(x) - 3 * x - 1).square().mean(),
        Recipe(steps=300, batch_size=16, learning_rate=5e-2, ema_decay=0.9),
        "line",
        lambda line: None,
    )
    assert loss < 1e-3
    assert model.weight.item() == pytest.approx(3, abs=0.05)


def test_reconstruction_loss_is_zero_only_at_the_target_and_weighs_the_shape() -> None:
    captions = [world.Caption("circle", "red", "left")]
    generator = torch.Generator().manual_seed(0)
    target = train_vae.to_model_range(world.sample_images(captions, generator))
    assert train_vae.reconstruction_loss(target, target) == 0
    mask = (target - target.amin(dim=(2, 3), keepdim=True)).abs().sum(1, keepdim=True) > 1.5
    area = mask.float().mean()
    on_shape = train_vae.reconstruction_loss(target + 0.1 * mask, target) / area
    off_shape = train_vae.reconstruction_loss(target + 0.1 * ~mask, target) / (1 - area)
    assert on_shape > 3 * off_shape


def test_clips_and_their_shape_labels_belong_together() -> None:
    generator = torch.Generator().manual_seed(1)
    videos, shapes = train_vae.draw_clips(24, generator)
    area = ((videos[:, :, 0] + 1).amax(dim=1) > 1.0).float().sum(dim=(1, 2))
    triangles = shapes == world.SHAPES.index("triangle")
    assert triangles.any()
    assert (~triangles).any()
    assert area[triangles].max() < area[~triangles].min()


def test_condition_is_the_one_the_stock_pipeline_makes() -> None:
    pipeline = WanImageToVideoPipeline.from_pretrained(CHECKPOINTS / VIDEO_FOLDER)
    frame = torch.rand(1, 3, world.SIZE, world.SIZE) * 2 - 1
    _, stock = pipeline.prepare_latents(frame, 1, 16, 32, 32, 9, torch.float32, torch.device("cpu"))
    ours = train_transformer.first_frame_condition(pipeline.vae, frame)
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
