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
"""Of a pipeline that is no family here."""

SIDES: Mapping[str, int] = {
    "Flux2Transformer2DModel": 1024,
    "QwenImageTransformer2DModel": 1024,
    "ZImageTransformer2DModel": 1024,
}
"""Height and width in px where none are asked for, by transformer class, as in the adapters.

Of others it is the VAE's sample size.
"""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one batch.

    ``height`` and ``width`` are px, ``frames`` is 1 for an image, ``latent_CTHW`` the latents of
    one sample as the VAE has them, ``text_tokens`` the length of the longest text embedding.
    ``clip_tokens`` are those of CLIP's text encoder, ``image_tokens`` those of the image encoder; 0
    where there is none. ``per_token_time`` says that the first frame's latents are given, at a time
    of their own.
    """

    batch: int
    height: int
    width: int
    frames: int
    latent_CTHW: tuple[int, int, int, int]
    text_tokens: int
    clip_tokens: int = 0
    image_tokens: int = 0
    per_token_time: bool = False

    def of(self, batch: int, text_tokens: int | None = None) -> Geometry:
        """Return the same sizes for another batch, and texts of another length if one is given."""
        return replace(self, batch=batch, text_tokens=text_tokens or self.text_tokens)

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
    longest_text: int | None = None,
) -> Geometry:
    """Return the sizes of one sample of stage ``name``.

    Parameters
    ----------
    before
        Sizes of the stage before it, whose pictures it begins with; None: it is the first.
    longest_text
        Tokens of the longest text; None: the limit of texts, to which most families pad.

    Raises
    ------
    UserError
        If the model can't make that size, or nothing says what it is.
    """
    index = architecture.read(INDEX)
    height, width = _image_size(name, stage, modules, before)
    frames = 1 if stage.task == "t2i" else _frames(name, architecture, stage)
    _check_grid(name, architecture, height, width, frames)
    return Geometry(
        batch=1,
        height=height,
        width=width,
        frames=frames,
        latent_CTHW=latent_size(modules["vae"], height, width, frames),
        text_tokens=longest_text or text_limit(architecture, stage),
        clip_tokens=_clip_tokens(modules),
        image_tokens=_image_tokens(modules),
        per_token_time=bool(index.get("expand_timesteps")) or "LTX" in architecture.pipeline,
    )


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
    name: str, stage: StageConfig, modules: Mapping[str, Any], before: Geometry | None
) -> tuple[int, int]:
    if stage.height is not None and stage.width is not None:
        return stage.height, stage.width
    if before is not None:
        return before.height, before.width
    if stage.task == "i2v":
        raise UserError(
            f"stages.{name} begins the chain with given images; set its height and width to plan it"
        )
    side = SIDES.get(type(modules["transformer"]).__name__)
    if side is None:
        side = int(modules["vae"].config["sample_size"])
    return side, side


def _frames(name: str, architecture: Architecture, stage: StageConfig) -> int:
    if stage.num_frames is not None:
        return stage.num_frames
    family = FAMILIES.get(architecture.pipeline)
    if family is None or family.num_frames is None:
        raise UserError(
            f"stages.{name}.num_frames is null, and {architecture.pipeline} has no default; give it"
        )
    return family.num_frames


def _check_grid(
    name: str, architecture: Architecture, height: int, width: int, frames: int
) -> None:
    """Check sizes that a stage need not have said itself: those of the stage before it."""
    family = FAMILIES.get(architecture.pipeline)
    if family is None:
        return
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


def text_limit(architecture: Architecture, stage: StageConfig) -> int:
    """Return the most tokens of a text: the stage's, else the family's, else the tokenizer's.

    What a family pads to is whatever its tokenizer says; the tokenizer's is bounded.
    """
    if stage.max_sequence_length is not None:
        return stage.max_sequence_length
    family = FAMILIES.get(architecture.pipeline)
    if family is not None and family.text_tokens is not None:
        return family.text_tokens
    most = MAX_TEXT_TOKENS if family is None else family.max_text_tokens
    for name in ("tokenizer_3", "tokenizer_2", "tokenizer"):
        file = f"{name}/tokenizer_config.json"
        if file in architecture.files:
            return int(min(most, architecture.read(file).get("model_max_length", most)))
    return most


def _clip_tokens(modules: Mapping[str, Any]) -> int:
    """Return the length that CLIP's text encoder pads to: all of its positions."""
    encoder = modules.get("text_encoder")
    if encoder is None or encoder.config.model_type != "clip_text_model":
        return 0
    return int(encoder.config.max_position_embeddings)


def _image_tokens(modules: Mapping[str, Any]) -> int:
    """Return how many tokens the image encoder makes: its patches and the class token."""
    encoder = modules.get("image_encoder")
    if encoder is None:
        return 0
    return int(encoder.config.image_size // encoder.config.patch_size) ** 2 + 1
