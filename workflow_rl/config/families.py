"""The model families, each registered once: what tells a folder's family, and what it can make.

Light: reading a folder's JSON needs neither PyTorch nor diffusers. A new family is one entry here;
a family whose checkpoints come under several pipeline classes has one entry for each, of one name.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from workflow_rl.enums import GuidanceMode

ReadJSON = Callable[[str], Mapping[str, Any]]
"""Returns a JSON file of the folder, by its path in there."""


@dataclass(frozen=True)
class Grid:
    """What a model can make: multiples of ``height`` and ``width`` px, ``frames`` n + 1 frames.

    ``largest`` bounds both sides, in px; None: nothing does. ``given_frame``: the first latent
    frame is the given image, so that one frame alone would leave nothing to sample.
    """

    height: int
    width: int
    frames: int = 1
    largest: int | None = None
    given_frame: bool = False

    @property
    def fewest_frames(self) -> int:
        """The shortest video, in frames."""
        return self.frames + 1 if self.given_frame else 1


LORA_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""The projections of an attention layer."""
LORA_JOINT_ATTENTION = (*LORA_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Those of an attention layer over image and text tokens."""


PARTS = ("text_encoder", "tokenizer", "transformer", "vae", "scheduler")
"""The components without which no model works."""
SECOND_TEXT = ("text_encoder_2", "tokenizer_2")


def _plain_or_cfg(read: ReadJSON) -> tuple[GuidanceMode, ...]:
    return GuidanceMode.NONE, GuidanceMode.CFG


@dataclass(frozen=True)
class Family:
    """A model family.

    Parameters
    ----------
    name
        Name of the family.
    task
        What its models do: ``t2i`` or ``i2v``.
    card_builder
        ``module:function`` that describes a folder as a card.
    grid
        Reads which sizes and frame counts a folder's model can make.
    lora_targets
        Endings of the linear layers that a LoRA adapts by default.
    guidances
        Reads which modes of guidance a folder's model has.
    cfg_above
        Classifier-free guidance is active for scales above this.
    shapes_cfg
        It takes ``cfg_normalization`` and ``cfg_truncation``.
    max_text_tokens
        Most text tokens that it takes.
    text_tokens
        Text tokens where none are asked for; None: as many as tokenizer and ``max_text_tokens``
        allow.
    num_frames
        Frames where none are asked for; None for images.
    takes_fps
        The frame rate is an input of the model.
    parts
        Reads which components of a folder may not be null in ``model_index.json``.
    refusal
        Says what in ``model_index.json`` is not supported, with the mend; None: nothing.
    """

    name: str
    task: str
    card_builder: str
    grid: Callable[[ReadJSON], Grid]
    lora_targets: tuple[str, ...] = LORA_ATTENTION
    guidances: Callable[[ReadJSON], tuple[GuidanceMode, ...]] = _plain_or_cfg
    cfg_above: float = 1.0
    shapes_cfg: bool = False
    max_text_tokens: int = 512
    text_tokens: int | None = None
    num_frames: int | None = None
    takes_fps: bool = False
    parts: Callable[[ReadJSON], tuple[str, ...]] = lambda read: PARTS
    refusal: Callable[[Mapping[str, Any]], str | None] = lambda index: None


EULER = "FlowMatchEulerDiscreteScheduler"
"""The scheduler whose steps rollout builds on."""

WAN_MIN_MULTIPLE = 16
"""``WanImageToVideoPipeline`` refuses sizes that are not multiples of this many pixels."""


def _two_encoders(read: ReadJSON) -> tuple[str, ...]:
    return *PARTS, *SECOND_TEXT


def _wan_parts(read: ReadJSON) -> tuple[str, ...]:
    """A transformer with an image branch (Wan 2.1) takes CLIP's embedding of the first frame."""
    if read("transformer/config.json").get("image_dim") is None:
        return PARTS
    return *PARTS, "image_encoder", "image_processor"


def _flux_grid(read: ReadJSON) -> Grid:
    """``FluxPipeline`` and its kin: the VAE's factor, and 2x2 latents to a token."""
    step = 2 * 2 ** (len(read("vae/config.json")["block_out_channels"]) - 1)
    return Grid(step, step)


def _sd3_grid(read: ReadJSON) -> Grid:
    """``StableDiffusion3Pipeline``: a token's pixels, and as many tokens as have positions."""
    transformer = read("transformer/config.json")
    factor = 2 ** (len(read("vae/config.json")["block_out_channels"]) - 1)
    step = factor * transformer["patch_size"]
    return Grid(step, step, largest=step * transformer["pos_embed_max_size"])


def _qwen_image_grid(read: ReadJSON) -> Grid:
    """``QwenImagePipeline``: the VAE's factor, and 2x2 latents to a token."""
    step = 2 * 2 ** len(read("vae/config.json")["temperal_downsample"])
    return Grid(step, step)


def _flux_guidances(read: ReadJSON) -> tuple[GuidanceMode, ...]:
    if read("transformer/config.json").get("guidance_embeds"):
        return (GuidanceMode.EMBEDDED,)
    return _plain_or_cfg(read)


def _klein_guidances(read: ReadJSON) -> tuple[GuidanceMode, ...]:
    """The stock pipeline ignores the scale of a distilled model."""
    if read("model_index.json").get("is_distilled"):
        return (GuidanceMode.NONE,)
    return _plain_or_cfg(read)


def _wan_grid(read: ReadJSON) -> Grid:
    """``WanImageToVideoPipeline``: the VAE's factors, the transformer's patch, and its minimum."""
    vae = read("vae/config.json")
    spatial = int(vae.get("scale_factor_spatial", 8))
    _, patch_height, patch_width = read("transformer/config.json")["patch_size"]
    return Grid(
        height=max(WAN_MIN_MULTIPLE, spatial * patch_height),
        width=max(WAN_MIN_MULTIPLE, spatial * patch_width),
        frames=int(vae.get("scale_factor_temporal", 4)),
        given_frame=bool(read("model_index.json").get("expand_timesteps")),
    )


def _wan_refusal(index: Mapping[str, Any]) -> str | None:
    """Two experts need the boundary between them, and a boundary needs two."""
    second = index.get("transformer_2")
    two_experts = isinstance(second, list) and second[0] is not None
    boundary = index.get("boundary_ratio")
    if two_experts == (boundary is not None):
        return None
    if two_experts:
        return (
            "a Wan folder with a transformer_2 but no boundary_ratio, so that it would never be "
            "used; set boundary_ratio in its model_index.json (0.9 for Wan 2.2 I2V-A14B)"
        )
    return (
        f"a Wan folder with boundary_ratio {boundary} but no transformer_2; download it again, or, "
        "for Wan 2.1, set boundary_ratio to null in its model_index.json"
    )


def _wan_ti2v_refusal(index: Mapping[str, Any]) -> str | None:
    """``WanPipeline`` names text-to-video folders too, which cannot take a first frame."""
    if index.get("expand_timesteps"):
        return _wan_refusal(index)
    return (
        "a WanPipeline without expand_timesteps, a text-to-video model that takes no first frame; "
        "use a Wan I2V or TI2V folder"
    )


WAN_FRAMES = 81
"""Frames of ``WanImageToVideoPipeline`` where none are asked for."""

_WAN_LORA = (*LORA_ATTENTION, "ffn.net.0.proj", "ffn.net.2")


LTX_MULTIPLE = 32
"""``LTXImageToVideoPipeline`` refuses sizes that are not multiples of this many pixels."""


def _ltx_grid(read: ReadJSON) -> Grid:
    """``AutoencoderKLLTXVideo``: its factors, told or counted from its down blocks."""
    vae = read("vae/config.json")
    halvings = 2 ** sum(vae["spatio_temporal_scaling"])
    spatial = vae.get("spatial_compression_ratio") or vae["patch_size"] * halvings
    temporal = vae.get("temporal_compression_ratio") or vae["patch_size_t"] * halvings
    size = math.lcm(LTX_MULTIPLE, spatial)
    return Grid(size, size, temporal, given_frame=True)


_LTX = Family(
    "ltx",
    "i2v",
    "workflow_rl.models.ltx:build_ltx_i2v_card",
    grid=_ltx_grid,
    max_text_tokens=128,
    num_frames=161,
    takes_fps=True,
)

FAMILIES: Mapping[str, Family] = {
    "FluxPipeline": Family(
        "flux",
        "t2i",
        "workflow_rl.models.flux:build_flux_t2i_card",
        grid=_flux_grid,
        guidances=_flux_guidances,
        parts=_two_encoders,
        lora_targets=(
            *LORA_JOINT_ATTENTION,
            *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
        ),
    ),
    "Flux2KleinPipeline": Family(
        "flux2",
        "t2i",
        "workflow_rl.models.flux2:build_flux2_t2i_card",
        grid=_flux_grid,
        guidances=_klein_guidances,
        lora_targets=(
            *LORA_JOINT_ATTENTION,
            *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
            *("attn.to_qkv_mlp_proj", "attn.to_out"),
        ),
    ),
    "StableDiffusion3Pipeline": Family(
        "sd3",
        "t2i",
        "workflow_rl.models.sd3:build_sd3_t2i_card",
        grid=_sd3_grid,
        text_tokens=256,
        parts=_two_encoders,
        lora_targets=LORA_JOINT_ATTENTION,
    ),
    "QwenImagePipeline": Family(
        "qwen_image",
        "t2i",
        "workflow_rl.models.qwen_image:build_qwen_image_t2i_card",
        grid=_qwen_image_grid,
        max_text_tokens=1024,
        text_tokens=512,
        lora_targets=(
            *LORA_JOINT_ATTENTION,
            *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ),
    ),
    "ZImagePipeline": Family(
        "z_image",
        "t2i",
        "workflow_rl.models.z_image:build_z_image_t2i_card",
        grid=_flux_grid,
        cfg_above=0.0,
        shapes_cfg=True,
        lora_targets=(
            *LORA_ATTENTION,
            *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        ),
    ),
    "WanImageToVideoPipeline": Family(
        "wan",
        "i2v",
        "workflow_rl.models.wan:build_wan_i2v_card",
        grid=_wan_grid,
        lora_targets=_WAN_LORA,
        num_frames=WAN_FRAMES,
        parts=_wan_parts,
        refusal=_wan_refusal,
    ),
    "WanPipeline": Family(
        "wan",
        "i2v",
        "workflow_rl.models.wan:build_wan_i2v_card",
        grid=_wan_grid,
        lora_targets=_WAN_LORA,
        num_frames=WAN_FRAMES,
        parts=_wan_parts,
        refusal=_wan_ti2v_refusal,
    ),
    **dict.fromkeys(("LTXImageToVideoPipeline", "LTXPipeline"), _LTX),
    "LTXConditionPipeline": replace(_LTX, max_text_tokens=256),
}
"""Families by the pipeline class that ``model_index.json`` names."""
