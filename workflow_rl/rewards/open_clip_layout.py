"""Checkpoints in the layout of open_clip as those of ``transformers.CLIPModel``."""

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

TOP = {
    "logit_scale": "logit_scale",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "text_projection": "text_projection.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.proj": "visual_projection.weight",
}
NORMS = {
    "ln_final": "text_model.final_layer_norm",
    "visual.ln_pre": "vision_model.pre_layrnorm",  # spelt so in transformers
    "visual.ln_post": "vision_model.post_layernorm",
}
IN_LAYER = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
LAYER = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)[._](weight|bias)")


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names and in the shapes of ``CLIPModel``.

    open_clip multiplies by its projections from the right, and holds query, key and value in one
    matrix. A tensor of an unknown name keeps it, so that a strict load refuses it.
    """
    return {new: tensor for name, old in state.items() for new, tensor in _convert(name, old)}


def _convert(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """One tensor of open_clip as one or three of transformers."""
    if name == "attn_mask":  # the causal mask, which is no weight
        return
    stem, _, kind = name.rpartition(".")
    layer = LAYER.fullmatch(name)
    if name in TOP:
        projection = name in ("text_projection", "visual.proj")
        yield TOP[name], (tensor.T if projection else tensor).contiguous()
    elif stem in NORMS:
        yield f"{NORMS[stem]}.{kind}", tensor
    elif layer:
        visual, number, part, kind = layer.groups()
        prefix = f"{'vision' if visual else 'text'}_model.encoder.layers.{number}."
        if part == "attn.in_proj":
            for role, third in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{prefix}self_attn.{role}_proj.{kind}", third.contiguous()
        else:
            yield f"{prefix}{IN_LAYER.get(part, part)}.{kind}", tensor
    else:
        yield name, tensor
