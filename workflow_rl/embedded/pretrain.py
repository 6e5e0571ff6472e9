"""Pre-train the embedded pair from nothing: `workflow-rl pretrain-tiny`.

Five stages, each kept when it is whole, so that a run that was stopped goes on where it was:
image VAE, image transformer, video VAE, video decoder, video transformer.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, FluxPipeline, WanImageToVideoPipeline

from workflow_rl.embedded import architectures, train_transformer, train_vae
from workflow_rl.embedded.model_readme import write_readme
from workflow_rl.embedded.optimise import Log
from workflow_rl.embedded.records import PretrainRecipe, StageRecord
from workflow_rl.errors import UserError

CHECKPOINTS = Path(__file__).parent / "checkpoints"
"""Where the package keeps the pair that it ships."""
IMAGE_FOLDER, VIDEO_FOLDER = "tiny-flux-t2i", "tiny-wan-i2v"


class Stages:
    """Runs stages and keeps their results under one folder, each whole or not at all."""

    def __init__(self, folder: Path, log: Log) -> None:
        self.folder = folder
        self.log = log
        self.records: list[StageRecord] = []

    def run(self, name: str, work: Callable[[Path], dict[str, float]]) -> Path:
        """Do `work`, which saves into the folder it is given, unless its result is there."""
        result, record = self.folder / name, self.folder / f"{name}.json"
        if result.is_dir() and record.is_file():
            self.log(f"{name}: already there")
            self.records.append(StageRecord(**json.loads(record.read_text(encoding="utf-8"))))
            return result
        partial = self.folder / f"{name}.partial"
        for leftover in (partial, result):
            shutil.rmtree(leftover, ignore_errors=True)
        start = time.monotonic()
        losses = work(partial)
        done = StageRecord(name, round(time.monotonic() - start, 1), losses)
        os.replace(partial, result)
        record.write_text(json.dumps(asdict(done), indent=2), encoding="utf-8")
        self.records.append(done)
        return result


def pretrain(
    output_dir: str | Path,
    seed: int = 0,
    recipe: PretrainRecipe | None = None,
    log: Log = print,
) -> tuple[Path, Path]:
    """Make `tiny-flux-t2i` and `tiny-wan-i2v` under `output_dir`.

    Parameters
    ----------
    output_dir
        Also holds the stages (`stages/`), from which an interrupted run goes on.
    seed
        Seeds weights, data and noise of every stage.
    recipe
        Defaults to `PretrainRecipe()`.
    log
        Receives one line every 50 steps.

    Returns
    -------
    tuple
        The two model folders.

    Raises
    ------
    UserError
        If `output_dir` was begun with another seed or recipe.
    """
    recipe = recipe or PretrainRecipe()
    output = Path(output_dir)
    stages = Stages(output / "stages", log)
    stages.folder.mkdir(parents=True, exist_ok=True)
    _claim(stages.folder / "recipe.json", seed, recipe)

    image_vae_dir = stages.run("image-vae", lambda to: _image_vae(to, recipe, seed, log))
    image_dir = stages.run(
        "image-transformer", lambda to: _image_transformer(to, image_vae_dir, recipe, seed, log)
    )
    video_vae_dir = stages.run("video-vae", lambda to: _video_vae(to, recipe, seed, log))
    refined_dir = stages.run(
        "video-decoder", lambda to: _video_decoder(to, video_vae_dir, recipe, seed, log)
    )
    video_dir = stages.run(
        "video-transformer",
        lambda to: _video_transformer(to, refined_dir, image_dir, recipe, seed, log),
    )
    image_target, video_target = output / IMAGE_FOLDER, output / VIDEO_FOLDER
    for source, target, pipeline in (
        (image_dir, image_target, "FluxPipeline"),
        (video_dir, video_target, "WanImageToVideoPipeline"),
    ):
        shutil.copytree(source, target, dirs_exist_ok=True)
        _forget_origin(target)
        write_readme(target, pipeline, seed, recipe, stages.records)
    return image_target, video_target


def _forget_origin(model: Path) -> None:
    """Drop the path that a component was loaded from, which diffusers keeps in its config."""
    for path in model.glob("*/config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _claim(path: Path, seed: int, recipe: PretrainRecipe) -> None:
    claim = {"seed": seed, **asdict(recipe)}
    if not path.is_file():
        path.write_text(json.dumps(claim, indent=2), encoding="utf-8")
    elif json.loads(path.read_text(encoding="utf-8")) != claim:
        raise UserError(
            f"{path} was begun with another seed or recipe; choose another output folder"
        )


def _image_vae(to: Path, recipe: PretrainRecipe, seed: int, log: Log) -> dict[str, float]:
    torch.manual_seed(seed)
    vae = architectures.image_vae()
    loss = train_vae.train_image_vae(vae, recipe.image_vae, seed + 1, log)
    train_transformer.measure_image_latents(vae, seed + 2)
    vae.save_pretrained(to)
    return {"image vae": loss}


def _image_transformer(
    to: Path, vae_dir: Path, recipe: PretrainRecipe, seed: int, log: Log
) -> dict[str, float]:
    torch.manual_seed(seed)
    pipeline: FluxPipeline = architectures.image_pipeline(AutoencoderKL.from_pretrained(vae_dir))
    pool = train_transformer.encode_images(pipeline, recipe.image_pool, seed + 3)
    loss = train_transformer.train_image_transformer(
        pipeline, pool, recipe.image_transformer, seed + 4, log
    )
    pipeline.save_pretrained(to)
    return {"image transformer": loss}


def _video_vae(to: Path, recipe: PretrainRecipe, seed: int, log: Log) -> dict[str, float]:
    torch.manual_seed(seed)
    vae = architectures.video_vae()
    losses = {}
    for name, draw, part, offset in (
        ("video vae, stills", train_vae.draw_stills, recipe.video_vae_stills, 5),
        ("video vae, clips", train_vae.draw_clips, recipe.video_vae_clips, 6),
    ):
        losses[name] = train_vae.train_video_vae(vae, draw, part, seed + offset, name, log)
    train_transformer.measure_video_latents(vae, seed + 8)
    vae.save_pretrained(to)
    return losses


def _video_decoder(
    to: Path, vae_dir: Path, recipe: PretrainRecipe, seed: int, log: Log
) -> dict[str, float]:
    vae = AutoencoderKLWan.from_pretrained(vae_dir)
    loss = train_vae.refine_video_decoder(vae, recipe.video_decoder, seed + 7, log)
    vae.save_pretrained(to)
    return {"video decoder": loss}


def _video_transformer(
    to: Path, vae_dir: Path, image_dir: Path, recipe: PretrainRecipe, seed: int, log: Log
) -> dict[str, float]:
    torch.manual_seed(seed)
    vae = AutoencoderKLWan.from_pretrained(vae_dir)
    pipeline: WanImageToVideoPipeline = architectures.video_pipeline(vae)
    image_vae = AutoencoderKL.from_pretrained(image_dir / "vae")
    pool = train_transformer.encode_videos(vae, image_vae, recipe.video_pool, seed + 9)
    loss = train_transformer.train_video_transformer(
        pipeline, pool, recipe.video_transformer, seed + 10, log
    )
    pipeline.save_pretrained(to)
    return {"video transformer": loss}


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        sys.exit("usage: python -m workflow_rl.embedded.pretrain OUTPUT_DIR")
    pretrain(sys.argv[1])
