"""Train the two autoencoders of the embedded pair on drawn images and clips."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, AutoencoderKLWan
from torch import Tensor, nn

from workflow_rl.embedded import world
from workflow_rl.embedded.optimise import Log, Recipe, optimise
from workflow_rl.embedded.video_codec import decode_clips, encode_clips

KL_WEIGHT = 1e-6
SHAPE_WEIGHT = 8.0
"""Extra weight of the pixels of the shape and its outline, which are a twelfth of the frame."""
FASTEST = 3.0
"""Half of the clips move at up to this speed (pixels per frame), evenly: reinforcement learning
asks the decoder for faster motion than the world's own mixture shows."""
LATENT_DISTURBANCE = 0.05
"""Noise on the latents that the decoder refines on, in standard deviations of each channel."""

PROBE_WEIGHT = 0.1

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def to_model_range(pixels: Tensor) -> Tensor:
    """[0, 1] to [-1, 1]."""
    return pixels * 2 - 1


def reconstruction_loss(output: Tensor, target: Tensor) -> Tensor:
    """Absolute plus squared error, weighted towards the shape (channels are dimension 1)."""
    ground = to_model_range(torch.tensor(world.GROUND)).view(1, 3, *[1] * (target.ndim - 2))
    glow = 2 * max(world.GLOW)
    lighter = (target - ground).abs().amax(dim=1, keepdim=True)
    mask = ((lighter - glow) / (1 - glow)).clamp(0.0, 1.0)  # what no ground can be
    pool = nn.functional.max_pool2d
    near = pool(mask.transpose(1, 2).flatten(0, -3), 3, 1, 1)
    near = near.view(mask.transpose(1, 2).shape).transpose(1, 2)
    error = output - target
    weight = 1 + SHAPE_WEIGHT * near
    return (weight * (error.abs() + 2 * error.square())).sum() / (3 * weight.sum())


class ShapeProbe(nn.Module):
    """Tells the shape from one latent frame; trained with the VAE and thrown away.

    Circles and squares of this size differ in some twenty pixels, which the reconstruction loss
    is slow to see. The probe makes the encoder keep them apart early.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.features = nn.Conv3d(channels, 48, (1, 3, 3), padding=(0, 1, 1))
        self.classify = nn.Linear(48, len(world.SHAPES))

    def forward(self, latents_BCTHW: Tensor) -> Tensor:
        """Class scores `[B * T, shapes]`."""
        features_BCT = self.features(latents_BCTHW).relu().amax(dim=(3, 4))
        return self.classify(features_BCT.transpose(1, 2).flatten(0, 1))


def draw_clips(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Clips `[count, 3, T, H, W]` in [-1, 1], half of them at evenly spread speeds, and shapes."""
    captions = world.sample_captions(count, generator)
    half = count // 2
    fast = torch.rand(half, generator=generator) * FASTEST
    starts = world.sample_centres(half, generator)
    videos = [world.sample_videos(captions[half:], generator)]
    for i, caption in enumerate(captions[:half]):
        path = world.path(starts[i], caption.direction, fast[i].item())
        videos.append(world.draw(caption, path).transpose(0, 1).unsqueeze(0))
    # The world's own clips come first in `videos`, so their captions come first here too.
    return to_model_range(torch.cat(videos)), shape_indices(captions[half:] + captions[:half])


def shape_indices(captions: list[world.Caption]) -> Tensor:
    """Index of each caption's shape in `world.SHAPES`."""
    return torch.tensor([world.SHAPES.index(caption.shape) for caption in captions])


def draw_stills(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images as one-frame clips `[count, 3, 1, H, W]` in [-1, 1], and shapes."""
    captions = world.sample_captions(count, generator)
    images = to_model_range(world.sample_images(captions, generator))
    return images.unsqueeze(2), shape_indices(captions)


def train_video_vae(
    vae: AutoencoderKLWan, draw: Draw, recipe: Recipe, seed: int, name: str, log: Log
) -> float:
    """Train encoder and decoder in place on what `draw` draws; returns the last loss.

    Stills cost a ninth of clips and are enough to learn shapes and colours before motion.
    Convolutions run in bfloat16, weights stay float32.
    """
    generator = torch.Generator().manual_seed(seed)
    probe = ShapeProbe(vae.config.z_dim)

    def loss_of_batch(step: int) -> Tensor:
        video, shape_B = draw(recipe.batch_size, generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = encode_clips(vae, video)
            latents = posterior.sample(generator)
            output = decode_clips(vae, latents)
        shapes = shape_B.repeat_interleave(latents.shape[2])
        return (
            reconstruction_loss(output, video)
            + KL_WEIGHT * posterior.kl().mean()
            + PROBE_WEIGHT * nn.functional.cross_entropy(probe(latents), shapes)
        )

    return optimise(nn.ModuleList([vae, probe]), loss_of_batch, recipe, name, log)


def refine_video_decoder(
    vae: AutoencoderKLWan,
    recipe: Recipe,
    seed: int,
    log: Log,
    snapshot: Callable[[], None] | None = None,
) -> float:
    """Train the decoder alone, on slightly disturbed latents; returns the last loss.

    The encoder stays as it is, so a transformer can learn its latents at the same time. The
    disturbance stands for the errors of a transformer's samples.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = nn.ModuleList([vae.post_quant_conv, vae.decoder])

    def loss_of_batch(step: int) -> Tensor:
        video, _ = draw_clips(recipe.batch_size, generator)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                mean = encode_clips(vae, video).mode()
                spread = mean.std(dim=(0, 2, 3, 4), keepdim=True)
                noise = torch.randn(mean.shape, generator=generator)
                latents = mean + LATENT_DISTURBANCE * spread * noise
            output = decode_clips(vae, latents)
        return reconstruction_loss(output, video)

    return optimise(decoder, loss_of_batch, recipe, "video decoder", log, snapshot)


def train_image_vae(vae: AutoencoderKL, recipe: Recipe, seed: int, log: Log) -> float:
    """Train in place; returns the last loss."""
    generator = torch.Generator().manual_seed(seed)

    def loss_of_batch(step: int) -> Tensor:
        captions = world.sample_captions(recipe.batch_size, generator)
        image = to_model_range(world.sample_images(captions, generator))
        posterior = vae.encode(image).latent_dist
        output = vae.decode(posterior.sample(generator)).sample
        return reconstruction_loss(output, image) + KL_WEIGHT * posterior.kl().mean()

    return optimise(vae, loss_of_batch, recipe, "image vae", log)
