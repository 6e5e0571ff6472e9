"""VAEs in tiles, on the trained ones of the embedded pair: nothing changes up to a tile's size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workflow_rl.config.memory import MemoryConfig
from workflow_rl.embedded import world
from workflow_rl.instance import load_card
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.models.memory import apply_memory

TILE = world.SIZE
"""Pixels of a tile's side: the size that the VAEs were trained at."""


def _trained(task: str, tiling: bool) -> Any:
    """Return a trained VAE; in tiles of ``TILE`` pixels that overlap by a quarter, as by default.

    The factor of the video VAE is 8 pixels, so that its stride is 24 of 32.
    """
    build: Callable[[], Any] = build_flux_t2i_card if task == "t2i" else build_wan_i2v_card
    instance = load_card(build())
    apply_memory(instance, MemoryConfig(vae_tiling=tiling))
    vae: Any = instance.component("vae")
    if task == "i2v":
        vae.tile_sample_min_height = vae.tile_sample_min_width = TILE
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = TILE * 3 // 4
    else:
        assert vae.tile_sample_min_size == TILE
    return vae


def _media(task: str, tiles: int) -> torch.Tensor:
    """Return four pictures or videos in [-1, 1], each of ``tiles`` x ``tiles`` drawn ones."""
    generator = torch.Generator().manual_seed(0)
    captions = world.sample_captions(4 * tiles * tiles, generator)
    draw = world.sample_images if task == "t2i" else world.sample_videos
    rows = draw(captions, generator).chunk(tiles * tiles)
    lines = [torch.cat(rows[i : i + tiles], dim=-1) for i in range(0, len(rows), tiles)]
    return torch.cat(lines, dim=-2) * 2 - 1


@torch.no_grad()
def _coded(vae: Any, media: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the latents, and the media in [0, 1] that they are decoded to."""
    latents: torch.Tensor = vae.encode(media).latent_dist.mode()
    return latents, (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)


def _psnr(found: torch.Tensor, expected: torch.Tensor) -> float:
    return -10 * math.log10(float((found - expected).square().mean()))


@pytest.mark.parametrize("task", ["t2i", "i2v"])
def test_up_to_the_tile_size_not_one_bit_changes(task: str) -> None:
    media = _media(task, 1)
    whole, tiled = (_coded(_trained(task, tiling), media) for tiling in (False, True))
    assert torch.equal(whole[0], tiled[0])
    assert torch.equal(whole[1], tiled[1])


@pytest.mark.parametrize(
    ("task", "to_whole", "to_truth"), [("t2i", 26.5, 26.2), ("i2v", 28.4, 26.1)]
)
def test_above_the_tile_size_tiles_come_close(task: str, to_whole: float, to_truth: float) -> None:
    """In dB, of pictures of twice the tile's side: to what is coded whole, and to the truth.

    Measured: 26.8 and 26.5 (t2i), 28.7 and 26.4 (i2v); coded whole, 28.7 and 28.1 to the truth. A
    tile's attention and norms see the tile alone, which is why they are not equal.
    """
    media = _media(task, 2)
    tiled = _trained(task, tiling=True)
    sizes: list[torch.Size] = []
    tiled.decoder.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[-2:]))
    _, found = _coded(tiled, media)
    _, whole = _coded(_trained(task, tiling=False), media)
    assert max(max(size) for size in sizes) * (4 if task == "t2i" else 8) == TILE
    assert not torch.equal(found, whole)
    assert _psnr(found, whole) >= to_whole
    assert _psnr(found, media / 2 + 0.5) >= to_truth
