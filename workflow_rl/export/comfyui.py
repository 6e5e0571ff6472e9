"""Names of layers and tensors that ComfyUI's loaders accept, for the families that are mapped.

ComfyUI holds the models as their authors published them. A whole model is loaded under those
names. A LoRA is loaded under ``diffusion_model.<original layer>``, and for FLUX under
``transformer.<diffusers layer>`` too, where ComfyUI itself finds the rows of a fused layer; its
scale is alpha / rank with alpha from a tensor ``<layer>.alpha``, never from the file's header.

Sources: ``comfy/lora.py`` (``model_lora_keys_unet``), ``comfy/weight_adapter/lora.py`` and
``comfy/utils.py`` (``flux_to_diffusers``) of ComfyUI say what it accepts; the converters of FLUX
and Wan checkpoints in diffusers' ``loaders/single_file_utils.py`` say which layer is which, and the
tests hold these tables to them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from workflow_rl.errors import UserError

_BLOCK = re.compile(r"(\w+)\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where a tensor lies in the original model.

    ``part`` of ``parts`` equal in kind, stacked along the first axis; ``swapped`` if the halves of
    that axis change places.
    """

    name: str
    part: int = 0
    parts: int = 1
    swapped: bool = False


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Parameters
    ----------
    prefix
        What they are called in the original.
    layers
        Layer in diffusers → layer in the original, both without the block.
    fused
        Layer in the original → the layers of diffusers that are stacked in it.
    """

    prefix: str
    layers: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def place(self, layer: str) -> Place | None:
        """Return where a block's layer lies; None: it is not mapped."""
        for name, parts in self.fused.items():
            if layer in parts:
                return Place(name, parts.index(layer), len(parts))
        return Place(self.layers[layer]) if layer in self.layers else None


@dataclass(frozen=True)
class Layout:
    """A family's layers in the original model.

    Parameters
    ----------
    top
        Layers outside of blocks.
    blocks
        Blocks by their name in diffusers.
    swapped
        Layers outside of blocks that give scale and shift in the other order.
    scales
        Layers in the original whose weight is called ``scale``.
    lora_by_diffusers_name
        ComfyUI knows this family's layers by the names that diffusers gives them.
    """

    top: Mapping[str, str]
    blocks: Mapping[str, Blocks]
    swapped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    lora_by_diffusers_name: bool = False

    def layer(self, layer: str) -> Place | None:
        """Return where a layer lies; None: it is not mapped."""
        match = _BLOCK.fullmatch(layer)
        if match is not None and match[1] in self.blocks:
            blocks = self.blocks[match[1]]
            place = blocks.place(match[3])
            if place is None:
                return None
            return place._replace(name=f"{blocks.prefix}.{match[2]}.{place.name}")
        if layer not in self.top:
            return None
        return Place(self.top[layer], swapped=layer in self.swapped)

    def tensor(self, name: str) -> Place | None:
        """Return where a tensor lies, such as ``x_embedder.weight``; None: it is not mapped."""
        layer, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            layer, dot, suffix = name, "", ""
        place = self.layer(layer)
        if place is None:
            return None
        if suffix == "weight" and place.name.endswith(self.scales) and self.scales:
            suffix = "scale"
        return place._replace(name=f"{place.name}{dot}{suffix}")


_MLP_EMBEDDER = {"linear_1": "in_layer", "linear_2": "out_layer"}

FLUX = Layout(
    top={
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
    }
    | {
        f"time_text_embed.{ours}.{layer}": f"{theirs}.{original}"
        for ours, theirs in (
            ("timestep_embedder", "time_in"),
            ("text_embedder", "vector_in"),
            ("guidance_embedder", "guidance_in"),
        )
        for layer, original in _MLP_EMBEDDER.items()
    },
    blocks={
        "transformer_blocks": Blocks(
            "double_blocks",
            layers={
                "norm1.linear": "img_mod.lin",
                "norm1_context.linear": "txt_mod.lin",
                "attn.norm_q": "img_attn.norm.query_norm",
                "attn.norm_k": "img_attn.norm.key_norm",
                "attn.norm_added_q": "txt_attn.norm.query_norm",
                "attn.norm_added_k": "txt_attn.norm.key_norm",
                "attn.to_out.0": "img_attn.proj",
                "attn.to_add_out": "txt_attn.proj",
                "ff.net.0.proj": "img_mlp.0",
                "ff.net.2": "img_mlp.2",
                "ff_context.net.0.proj": "txt_mlp.0",
                "ff_context.net.2": "txt_mlp.2",
            },
            fused={
                "img_attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
                "txt_attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            },
        ),
        "single_transformer_blocks": Blocks(
            "single_blocks",
            layers={
                "norm.linear": "modulation.lin",
                "attn.norm_q": "norm.query_norm",
                "attn.norm_k": "norm.key_norm",
                "proj_out": "linear2",
            },
            fused={"linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")},
        ),
    },
    swapped=("norm_out.linear",),
    scales=("query_norm", "key_norm"),
    lora_by_diffusers_name=True,
)

_WAN_ATTENTION = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
}

WAN = Layout(
    top={
        "patch_embedding": "patch_embedding",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
        "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
        "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
        "proj_out": "head.head",
        "scale_shift_table": "head.modulation",
    },
    blocks={
        "blocks": Blocks(
            "blocks",
            layers={
                "ffn.net.0.proj": "ffn.0",
                "ffn.net.2": "ffn.2",
                "norm2": "norm3",  # the norm before the cross-attention
                "scale_shift_table": "modulation",
            }
            | {
                f"{ours}.{layer}": f"{theirs}.{original}"
                for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
                for layer, original in _WAN_ATTENTION.items()
            },
        )
    },
)

LAYOUTS: Mapping[str, Layout] = {"flux": FLUX, "wan": WAN}
"""Layouts by the name of the family."""
COMFYUI_FAMILIES = tuple(LAYOUTS)


def tensor_places(family: str, names: Iterable[str]) -> dict[str, Place]:
    """Return where each tensor of a transformer lies.

    Raises
    ------
    UserError
        If one is not mapped.
    """
    places = {name: LAYOUTS[family].tensor(name) for name in names}
    _refuse(family, [name for name, place in places.items() if place is None])
    return {name: place for name, place in places.items() if place is not None}


def lora_keys(family: str, layers: Iterable[str]) -> dict[str, str]:
    """Return the name under which ComfyUI finds each layer's LoRA.

    Raises
    ------
    UserError
        If one is not mapped.
    """
    layout = LAYOUTS[family]
    places = {layer: layout.layer(layer) for layer in layers}
    _refuse(family, [layer for layer, place in places.items() if place is None])
    return {
        layer: f"transformer.{layer}"
        if layout.lora_by_diffusers_name
        else f"diffusion_model.{place.name}"
        for layer, place in places.items()
        if place is not None
    }


def _refuse(family: str, unmapped: list[str]) -> None:
    if unmapped:
        more = f" and {len(unmapped) - 1} more" if len(unmapped) > 1 else ""
        raise UserError(
            f"{unmapped[0]}{more} of this {family} model has no name in ComfyUI that is known "
            "here; use --key-format diffusers"
        )
