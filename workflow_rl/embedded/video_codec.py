"""Encode and decode whole clips through an `AutoencoderKLWan` in two chunks instead of three.

The stock `encode` and `decode` walk a clip latent frame by latent frame. The causal feature cache
makes any longer chunk after the first give the same values, so training takes the first frame and
then all the rest at once: the same function, with fewer and larger convolutions.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor


def encode_clips(vae: AutoencoderKLWan, video_BCTHW: Tensor) -> DiagonalGaussianDistribution:
    """Posterior of clips in [-1, 1]; equals `vae.encode(video).latent_dist`."""
    x = video_BCTHW
    if vae.config.patch_size is not None:
        x = patchify(x, vae.config.patch_size)
    vae.clear_cache()
    chunks = []
    for chunk in _first_and_rest(x):
        vae._enc_conv_idx = [0]
        chunks.append(vae.encoder(chunk, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx))
    vae.clear_cache()
    return DiagonalGaussianDistribution(vae.quant_conv(torch.cat(chunks, dim=2)).float())


def decode_clips(vae: AutoencoderKLWan, latents_BCTHW: Tensor) -> Tensor:
    """Clips before the clamp to [-1, 1]; clamped, they equal `vae.decode(latents).sample`."""
    x = vae.post_quant_conv(latents_BCTHW)
    vae.clear_cache()
    chunks: list[Tensor] = []
    for chunk in _first_and_rest(x):
        vae._conv_idx = [0]
        chunks.append(
            vae.decoder(
                chunk,
                feat_cache=vae._feat_map,
                feat_idx=vae._conv_idx,
                first_chunk=not chunks,
            )
        )
    vae.clear_cache()
    video = torch.cat(chunks, dim=2).float()
    return video if vae.config.patch_size is None else unpatchify(video, vae.config.patch_size)


def _first_and_rest(x_BCTHW: Tensor) -> list[Tensor]:
    return [x_BCTHW] if x_BCTHW.shape[2] == 1 else [x_BCTHW[:, :, :1], x_BCTHW[:, :, 1:]]
