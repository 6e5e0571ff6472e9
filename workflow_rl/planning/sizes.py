"""What one sample of a stage is: pixels, frames, latents and text tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workflow_rl.config import StageConfig
from workflow_rl.config.families import FAMILIES
from workflow_rl.errors import UserError
from workflow_rl.planning.architecture import INDEX, Architecture

MAX_TEXT_TOKENS = 512


@dataclass(frozen=True)
class Defaults:
    """What a family takes where a stage says nothing; ``side`` None: the VAE's sample size.

    A guidance scale above ``cfg_above`` is classifier-free guidance.
    """

    text_tokens: int = MAX_TEXT_TOKENS
    frames: int = 81
    side: int | None = None
    cfg_above: float = 1.0


DEFAULTS: Mapping[str, Defaults] = {
    "Flux2Transformer2DModel": Defaults(side=1024),
    "LTXVideoTransformer3DModel": Defaults(text_tokens=128, frames=161),
    "QwenImageTransformer2DModel": Defaults(side=1024),
    "SD3Transformer2DModel": Defaults(text_tokens=256),
    "ZImageTransformer2DModel": Defaults(side=1024, cfg_above=0.0),
}
"""By transformer class; others have the defaults of `Defaults`. As in the adapters."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one batch.

    ``height`` and ``width`` are px, ``frames`` is 1 for an image, ``latent_CTHW`` the latents of
    one sample as the VAE has them, ``text_tokens`` the length of the longest text embedding.
    ``per_token_time`` says that the first frame's latents are given, at a time of their own.
    """

    batch: int
    height: int
    width: int
    frames: int
    latent_CTHW: tuple[int, int, int, int]
    text_tokens: int
    per_token_time: bool = False

    def of(self, batch: int) -> Geometry:
        """Return the same sizes for another batch."""
        return replace(self, batch=batch)

    @property
    def text(self) -> str:
        """Height, width and frames for a reader."""
        frames = f" × {self.frames} frames" if self.frames > 1 else ""
        return f"{self.height} × {self.width} px{frames}"


def geometry(
    name: str,
    architecture: Architecture,
    stage: StageConfig,
    modules: Mapping[str, Any],
    before: Geometry | None,
) -> Geometry:
    """Return the sizes of one sample of stage ``name``.

    Parameters
    ----------
    before
        Sizes of the stage before it, whose pictures it begins with; None: it is the first.

    Raises
    ------
    UserError
        If the model can't make that size, or nothing says what it is.
    """
    index = architecture.read(INDEX)
    defaults = defaults_of(modules["transformer"])
    height, width = _image_size(name, stage, modules["vae"], before, defaults)
    frames = 1 if stage.task == "t2i" else stage.num_frames or defaults.frames
    _check_grid(name, stage, architecture, height, width, frames)
    return Geometry(
        batch=1,
        height=height,
        width=width,
        frames=frames,
        latent_CTHW=latent_size(modules["vae"], height, width, frames),
        text_tokens=_text_tokens(architecture, stage, defaults),
        per_token_time=bool(index.get("expand_timesteps")) or "LTX" in architecture.pipeline,
    )


def defaults_of(transformer: Any) -> Defaults:
    """Return what the family of a transformer takes where a stage says nothing."""
    return DEFAULTS.get(type(transformer).__name__, Defaults())


def latent_size(vae: Any, height: int, width: int, frames: int) -> tuple[int, int, int, int]:
    """Return channels, frames, height and width of one sample's latents."""
    config = vae.config
    name = type(vae).__name__
    if name == "AutoencoderKLWan":
        spatial, temporal = config.scale_factor_spatial, config.scale_factor_temporal
        channels = config.z_dim
    elif name == "AutoencoderKLQwenImage":
        spatial, temporal = 2 ** len(config.temperal_downsample), 4
        channels = config.z_dim
    elif name == "AutoencoderKLLTXVideo":
        spatial, temporal = vae.spatial_compression_ratio, vae.temporal_compression_ratio
        channels = config.latent_channels
    else:
        spatial, temporal = 2 ** (len(config.block_out_channels) - 1), 1
        channels = config.latent_channels
    return channels, (frames - 1) // temporal + 1, height // spatial, width // spatial


def _image_size(
    name: str, stage: StageConfig, vae: Any, before: Geometry | None, defaults: Defaults
) -> tuple[int, int]:
    if stage.height is not None and stage.width is not None:
        return stage.height, stage.width
    if before is not None:
        return before.height, before.width
    if stage.task == "i2v":
        raise UserError(
            f"stages.{name} begins the chain with given images; set its height and width to plan it"
        )
    side = int(vae.config["sample_size"]) if defaults.side is None else defaults.side
    return side, side


def _check_grid(
    name: str, stage: StageConfig, architecture: Architecture, height: int, width: int, frames: int
) -> None:
    family = FAMILIES.get(architecture.pipeline)
    if family is None:
        return
    if family.task != stage.task:
        raise UserError(
            f"stages.{name}.model: {architecture.source} is an {family.task} model, but the "
            f"stage's task is {stage.task}; put it in an {family.task} stage"
        )
    grid = family.grid(architecture.read)
    if height % grid.height or width % grid.width or (frames - 1) % grid.frames:
        raise UserError(
            f"stages.{name} would make {height} × {width} px and {frames} frames, but the model "
            f"makes multiples of {grid.height} × {grid.width} px and {grid.frames}·n + 1 frames; "
            "change height, width or num_frames"
        )
    if grid.largest is not None and max(height, width) > grid.largest:
        raise UserError(
            f"stages.{name} would make {height} × {width} px, but the model has positions for "
            f"{grid.largest} px; change height or width"
        )


def _text_tokens(architecture: Architecture, stage: StageConfig, defaults: Defaults) -> int:
    """Return the length of text embeddings: the stage's, else the last tokenizer's, bounded."""
    if stage.max_sequence_length is not None:
        return stage.max_sequence_length
    for name in ("tokenizer_3", "tokenizer_2", "tokenizer"):
        file = f"{name}/tokenizer_config.json"
        if file in architecture.files:
            limit = architecture.read(file).get("model_max_length", defaults.text_tokens)
            return int(min(defaults.text_tokens, limit))
    return defaults.text_tokens
