"""Inputs of the stock modules at the shapes of a run, on the meta device.

A transformer class is one entry of `TRANSFORMER_INPUTS`. The rest of the planner knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workflow_rl.planning.modules import META
from workflow_rl.planning.sizes import Geometry


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device=META, dtype=dtype)


def _flux(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    _, _, rows, columns = size.latent_CTHW
    tokens = rows // 2 * (columns // 2)
    return {
        "hidden_states": _empty(batch, tokens, config.in_channels, dtype=dtype),
        "timestep": _empty(batch, dtype=dtype),
        "guidance": _empty(batch) if config.guidance_embeds else None,
        "pooled_projections": _empty(batch, config.pooled_projection_dim, dtype=dtype),
        "encoder_hidden_states": _empty(
            batch, size.text_tokens, config.joint_attention_dim, dtype=dtype
        ),
        "txt_ids": _empty(size.text_tokens, 3, dtype=dtype),
        "img_ids": _empty(tokens, 3, dtype=dtype),
    }


def _flux2(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    _, _, rows, columns = size.latent_CTHW
    tokens = rows // 2 * (columns // 2)
    return {
        "hidden_states": _empty(batch, tokens, config.in_channels, dtype=dtype),
        "timestep": _empty(batch, dtype=dtype),
        "guidance": _empty(batch) if config.guidance_embeds else None,
        "encoder_hidden_states": _empty(
            batch, size.text_tokens, config.joint_attention_dim, dtype=dtype
        ),
        "txt_ids": _empty(batch, size.text_tokens, 4),
        "img_ids": _empty(batch, tokens, 4),
    }


def _sd3(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    channels, _, rows, columns = size.latent_CTHW
    return {
        "hidden_states": _empty(batch, channels, rows, columns, dtype=dtype),
        "timestep": _empty(batch),
        "pooled_projections": _empty(batch, config.pooled_projection_dim, dtype=dtype),
        "encoder_hidden_states": _empty(
            batch, size.clip_tokens + size.text_tokens, config.joint_attention_dim, dtype=dtype
        ),
    }


def _qwen(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    _, _, rows, columns = size.latent_CTHW
    rows, columns = rows // 2, columns // 2
    return {
        "hidden_states": _empty(batch, rows * columns, config.in_channels, dtype=dtype),
        "timestep": _empty(batch, dtype=dtype),
        "encoder_hidden_states": _empty(
            batch, size.text_tokens, config.joint_attention_dim, dtype=dtype
        ),
        "img_shapes": [[(1, rows, columns)]] * batch,
    }


def _wan(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    _, frames, rows, columns = size.latent_CTHW
    _, patch_rows, patch_columns = config.patch_size
    tokens = frames * (rows // patch_rows) * (columns // patch_columns)
    image = None
    if config.image_dim is not None:
        image = _empty(batch, size.image_tokens, config.image_dim, dtype=dtype)
    return {
        "hidden_states": _empty(batch, config.in_channels, frames, rows, columns, dtype=dtype),
        "timestep": _empty(batch, tokens) if size.per_token_time else _empty(batch),
        "encoder_hidden_states": _empty(batch, size.text_tokens, config.text_dim, dtype=dtype),
        "encoder_hidden_states_image": image,
    }


def _ltx(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype, batch = module.config, module.dtype, size.batch
    _, frames, rows, columns = size.latent_CTHW
    tokens = frames * rows * columns
    return {
        "hidden_states": _empty(batch, tokens, config.in_channels, dtype=dtype),
        "timestep": _empty(batch, tokens),
        "encoder_hidden_states": _empty(
            batch, size.text_tokens, config.caption_channels, dtype=dtype
        ),
        "encoder_attention_mask": _empty(batch, size.text_tokens, dtype=dtype),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


def _z_image(module: Any, size: Geometry) -> dict[str, Any]:
    config, dtype = module.config, module.dtype
    channels, _, rows, columns = size.latent_CTHW
    return {
        "x": [_empty(channels, 1, rows, columns, dtype=dtype) for _ in range(size.batch)],
        "t": _empty(size.batch, dtype=dtype),
        "cap_feats": [
            _empty(size.text_tokens, config.cap_feat_dim, dtype=dtype) for _ in range(size.batch)
        ],
    }


TRANSFORMER_INPUTS: Mapping[str, Callable[[Any, Geometry], dict[str, Any]]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "LTXVideoTransformer3DModel": _ltx,
    "QwenImageTransformer2DModel": _qwen,
    "SD3Transformer2DModel": _sd3,
    "WanTransformer3DModel": _wan,
    "ZImageTransformer2DModel": _z_image,
}
"""Transformer class → keyword arguments of its forward pass."""

TEXT_INPUTS = (
    "encoder_hidden_states",
    "pooled_projections",
    "encoder_attention_mask",
    "cap_feats",
)
"""The inputs that are text embeddings, which are cached per text."""


def text_bytes(inputs: Mapping[str, Any]) -> int:
    """Return the bytes of the text embeddings among a transformer's inputs."""
    tensors = tree_leaves([inputs[name] for name in TEXT_INPUTS if name in inputs])
    return sum(t.numel() * t.element_size() for t in tensors)


def vae_latents(vae: Any, size: Geometry) -> torch.Tensor:
    """Return latents as ``vae.decode`` takes them: [B, C, H, W] or [B, C, T, H, W]."""
    channels, frames, rows, columns = size.latent_CTHW
    if type(vae).__name__ in ("AutoencoderKL", "AutoencoderKLFlux2"):
        return _empty(size.batch, channels, rows, columns, dtype=vae.dtype)
    return _empty(size.batch, channels, frames, rows, columns, dtype=vae.dtype)


def vae_decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return the media that ``vae`` makes of a batch of latents, in [0, 1], as the adapters do."""
    return (_vae_decode(vae, latents).float() / 2 + 0.5).clamp(0, 1)


def _vae_decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """LTX's goes one sample at a time, with a timestep where it is conditioned on one."""
    if type(vae).__name__ != "AutoencoderKLLTXVideo":
        whole: torch.Tensor = vae.decode(latents, return_dict=False)[0]
        return whole
    timestep = _empty(1, dtype=vae.dtype) if vae.config.timestep_conditioning else None
    return torch.cat([vae.decode(row, timestep, return_dict=False)[0] for row in latents.split(1)])


def vae_first_frames(vae: Any, size: Geometry) -> torch.Tensor:
    """Return what is encoded of first frames: the video they begin, or where it is time, they.

    Wan's image models encode [first frame, zeros] over all frames; models whose latents hold the
    first frame as it is (per-token time) encode it alone.
    """
    frames = 1 if size.per_token_time else size.frames
    return _empty(size.batch, 3, frames, size.height, size.width, dtype=vae.dtype)
