"""Train the two transformers of the embedded pair by flow matching.

The conventions are the stock pipelines': x_sigma = (1 - sigma) x0 + sigma noise, the target is the
velocity noise - x0; packing, ids, conditioning and text come from the pipelines' own helpers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan, FluxPipeline, WanImageToVideoPipeline
from torch import Tensor
from torch.nn.functional import avg_pool2d, mse_loss, pad

from workflow_rl.embedded import world
from workflow_rl.embedded.optimise import Log, Recipe, optimise
from workflow_rl.embedded.tokenizers import MAX_LENGTH
from workflow_rl.embedded.train_vae import to_model_range
from workflow_rl.embedded.video_codec import encode_clips

ENCODE_BATCH = 64
STATISTICS_SAMPLES = 256
IMAGE_CAPTIONS = world.all_captions() + world.placed_captions()
"""What the image transformer is trained on."""


@dataclass(frozen=True)
class ImagePool:
    """Encoded images: packed normalised latents `[N, 16, 16]`, indices into `IMAGE_CAPTIONS`."""

    latents_BLC: Tensor
    caption_B: Tensor


@dataclass(frozen=True)
class VideoPool:
    """Encoded clips `[N, C, T, H, W]`, their condition (mask and first frame) and captions."""

    latents_BCTHW: Tensor
    condition_BCTHW: Tensor
    caption_B: Tensor


def random_sigmas(count: int, generator: torch.Generator) -> Tensor:
    """Noise levels in (0, 1): half uniform, half logit-normal."""
    uniform = torch.rand(count, generator=generator)
    normal = torch.randn(count, generator=generator).sigmoid()
    return torch.where(torch.rand(count, generator=generator) < 0.5, uniform, normal)


def _batches(captions: list[world.Caption]) -> list[list[world.Caption]]:
    return [captions[i : i + ENCODE_BATCH] for i in range(0, len(captions), ENCODE_BATCH)]


def _indices(drawn: list[world.Caption], captions: tuple[world.Caption, ...]) -> Tensor:
    index = {caption: i for i, caption in enumerate(captions)}
    return torch.tensor([index[caption] for caption in drawn])


@torch.no_grad()
def measure_image_latents(vae: AutoencoderKL, seed: int) -> None:
    """Set `shift_factor` and `scaling_factor` so that latents have mean 0 and std 1."""
    generator = torch.Generator().manual_seed(seed)
    captions = world.sample_captions(STATISTICS_SAMPLES, generator)
    images = to_model_range(world.sample_images(captions, generator))
    latents = vae.encode(images).latent_dist.mode()
    vae.register_to_config(
        shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item()
    )


@torch.no_grad()
def measure_video_latents(vae: AutoencoderKLWan, seed: int) -> None:
    """Set `latents_mean` and `latents_std`, channel by channel."""
    generator = torch.Generator().manual_seed(seed)
    captions = world.sample_captions(STATISTICS_SAMPLES, generator)
    videos = to_model_range(world.sample_videos(captions, generator))
    latents = encode_clips(vae, videos).mode().transpose(0, 1).flatten(1)
    vae.register_to_config(
        latents_mean=latents.mean(dim=1).tolist(), latents_std=latents.std(dim=1).tolist()
    )


@torch.no_grad()
def encode_images(pipeline: FluxPipeline, count: int, seed: int) -> ImagePool:
    """Draw and encode `count` images, half of them of captions that place the shape."""
    generator = torch.Generator().manual_seed(seed)
    plain, placed = world.all_captions(), world.placed_captions()
    evenly = plain * (len(placed) // len(plain)) + placed
    captions = world.sample_captions(count, generator, evenly)
    vae, latents = pipeline.vae, []
    for batch in _batches(captions):
        images = to_model_range(world.sample_images(batch, generator))
        encoded = vae.encode(images).latent_dist.mode()
        encoded = (encoded - vae.config.shift_factor) * vae.config.scaling_factor
        latents.append(pipeline._pack_latents(encoded, *encoded.shape))
    return ImagePool(torch.cat(latents), _indices(captions, IMAGE_CAPTIONS))


@torch.no_grad()
def imperfect_frames(
    frames_BCHW: Tensor, image_vae: AutoencoderKL, generator: torch.Generator
) -> Tensor:
    """First frames as the chain will supply them.

    In equal shares: as drawn; blurred with noise; and decoded from disturbed latents of the image
    model's VAE. Values are in [-1, 1].
    """
    count = len(frames_BCHW)
    blurred = avg_pool2d(pad(frames_BCHW, (1, 1, 1, 1), mode="replicate"), 3, 1)
    blend = 0.6 * torch.rand(count, 1, 1, 1, generator=generator)
    noise = 0.03 * torch.randn(frames_BCHW.shape, generator=generator)
    soft = frames_BCHW.lerp(blurred, blend) + noise
    latents = image_vae.encode(frames_BCHW).latent_dist.mode()
    amount = 0.15 * torch.rand(count, 1, 1, 1, generator=generator)
    disturbance = amount * torch.randn(latents.shape, generator=generator)
    latents = latents + disturbance / image_vae.config.scaling_factor
    decoded = image_vae.decode(latents).sample
    kind = torch.randint(3, (count, 1, 1, 1), generator=generator)
    return torch.where(kind == 0, frames_BCHW, torch.where(kind == 1, soft, decoded)).clamp(-1, 1)


def normalised_latents(vae: AutoencoderKLWan, video_BCTHW: Tensor) -> Tensor:
    """The most likely latents of clips in [-1, 1], normalised channel by channel."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    return (encode_clips(vae, video_BCTHW).mode() - mean) / std


@torch.no_grad()
def first_frame_condition(vae: AutoencoderKLWan, frames_BCHW: Tensor) -> Tensor:
    """What `WanImageToVideoPipeline.prepare_latents` makes of first frames, for a whole batch.

    The encoded clip [first frame, zeros], behind a mask of one channel per pixel frame of a latent
    frame that is 1 where the frame is given.
    """
    zeros = frames_BCHW.new_zeros(
        *frames_BCHW.shape[:2], world.NUM_FRAMES - 1, *frames_BCHW.shape[2:]
    )
    latents = normalised_latents(vae, torch.cat([frames_BCHW.unsqueeze(2), zeros], dim=2))
    mask = latents.new_zeros(len(latents), vae.config.scale_factor_temporal, *latents.shape[2:])
    mask[:, :, 0] = 1
    return torch.cat([mask, latents], dim=1)


@torch.no_grad()
def encode_videos(
    vae: AutoencoderKLWan, image_vae: AutoencoderKL, count: int, seed: int
) -> VideoPool:
    """Draw and encode `count` clips, each with the condition that the pipeline makes."""
    generator = torch.Generator().manual_seed(seed)
    captions = world.sample_captions(count, generator)
    latents, conditions = [], []
    for batch in _batches(captions):
        videos = to_model_range(world.sample_videos(batch, generator))
        first = imperfect_frames(videos[:, :, 0], image_vae, generator)
        latents.append(normalised_latents(vae, videos))
        conditions.append(first_frame_condition(vae, first))
    return VideoPool(
        torch.cat(latents), torch.cat(conditions), _indices(captions, world.all_captions())
    )


def train_image_transformer(
    pipeline: FluxPipeline, pool: ImagePool, recipe: Recipe, seed: int, log: Log
) -> float:
    """Train `pipeline.transformer` in place; returns the last loss."""
    generator = torch.Generator().manual_seed(seed)
    captions = [str(caption) for caption in IMAGE_CAPTIONS]
    with torch.no_grad():
        embeds, pooled, text_ids = pipeline.encode_prompt(
            captions, None, max_sequence_length=MAX_LENGTH
        )
    side = world.SIZE // pipeline.vae_scale_factor // 2
    image_ids = pipeline._prepare_latent_image_ids(1, side, side, embeds.device, embeds.dtype)

    def loss_of_batch(step: int) -> Tensor:
        pick = torch.randint(len(pool.caption_B), (recipe.batch_size,), generator=generator)
        clean_BLC, caption_B = pool.latents_BLC[pick], pool.caption_B[pick]
        noise_BLC = torch.randn(clean_BLC.shape, generator=generator)
        sigma_B = random_sigmas(recipe.batch_size, generator)
        velocity_BLC = pipeline.transformer(
            hidden_states=clean_BLC.lerp(noise_BLC, sigma_B.view(-1, 1, 1)),
            timestep=sigma_B,
            pooled_projections=pooled[caption_B],
            encoder_hidden_states=embeds[caption_B],
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        return mse_loss(velocity_BLC, noise_BLC - clean_BLC)

    return optimise(pipeline.transformer, loss_of_batch, recipe, "image transformer", log)


def train_video_transformer(
    pipeline: WanImageToVideoPipeline, pool: VideoPool, recipe: Recipe, seed: int, log: Log
) -> float:
    """Train `pipeline.transformer` in place; returns the last loss."""
    generator = torch.Generator().manual_seed(seed)
    captions = [str(caption) for caption in world.all_captions()]
    with torch.no_grad():
        embeds, _ = pipeline.encode_prompt(
            captions, do_classifier_free_guidance=False, max_sequence_length=MAX_LENGTH
        )

    def loss_of_batch(step: int) -> Tensor:
        pick = torch.randint(len(pool.caption_B), (recipe.batch_size,), generator=generator)
        clean_BCTHW = pool.latents_BCTHW[pick]
        noise_BCTHW = torch.randn(clean_BCTHW.shape, generator=generator)
        sigma_B = random_sigmas(recipe.batch_size, generator)
        noisy_BCTHW = clean_BCTHW.lerp(noise_BCTHW, sigma_B.view(-1, 1, 1, 1, 1))
        velocity_BCTHW = pipeline.transformer(
            hidden_states=torch.cat([noisy_BCTHW, pool.condition_BCTHW[pick]], dim=1),
            timestep=1000 * sigma_B,
            encoder_hidden_states=embeds[pool.caption_B[pick]],
            return_dict=False,
        )[0]
        return mse_loss(velocity_BCTHW, noise_BCTHW - clean_BCTHW)

    return optimise(pipeline.transformer, loss_of_batch, recipe, "video transformer", log)
