"""The two-chunk codec is the stock VAE."""

from __future__ import annotations

import pytest
import torch

from workflow_rl.embedded import architectures
from workflow_rl.embedded.video_codec import decode_clips, encode_clips


@pytest.mark.parametrize("frames", [1, 9])
def test_two_chunks_equal_the_stock_walk(frames: int) -> None:
    torch.manual_seed(0)
    vae = architectures.video_vae()
    with torch.no_grad():
        for parameter in vae.parameters():  # leave the frame-by-frame start
            parameter.add_(0.02 * torch.randn_like(parameter))
        video = torch.rand(2, 3, frames, 32, 32) * 2 - 1
        stock = vae.encode(video).latent_dist.mode()
        torch.testing.assert_close(encode_clips(vae, video).mode(), stock, atol=1e-5, rtol=1e-5)
        assert stock.shape == (2, 16, (frames - 1) // 4 + 1, 4, 4)
        decoded = decode_clips(vae, stock).clamp(-1, 1)
        torch.testing.assert_close(decoded, vae.decode(stock).sample, atol=1e-5, rtol=1e-5)


def test_untrained_vae_treats_each_frame_alone() -> None:
    torch.manual_seed(0)
    vae = architectures.video_vae()
    frame = torch.rand(1, 3, 1, 32, 32) * 2 - 1
    with torch.no_grad():
        still = vae.decode(vae.encode(frame).latent_dist.mode()).sample
        clip = vae.decode(vae.encode(frame.expand(1, 3, 9, 32, 32)).latent_dist.mode()).sample
    torch.testing.assert_close(clip, still.expand_as(clip), atol=1e-5, rtol=1e-5)
