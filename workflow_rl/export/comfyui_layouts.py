"""Layouts of the families whose original names are known: tables, one for each family.

Which layer is which is told by the converters of single files in diffusers'
``loaders/single_file_utils.py``, and the tests hold these tables to them. Which LoRA names ComfyUI
takes is told by its ``comfy/lora.py`` (``model_lora_keys_unet``) and ``comfy/utils.py``
(``flux_to_diffusers``, ``mmdit_to_diffusers``, ``z_image_to_diffusers``), read in Comfy-Org/ComfyUI
at commits 17358c8 and 09708ea.
"""

from collections.abc import Mapping

from workflow_rl.export.layout import Blocks, Layout


def _same(*names: str) -> dict[str, str]:
    """Return layers whose names were kept."""
    return {name: name for name in names}


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")

_MLP_EMBEDDER = {"linear_1": "in_layer", "linear_2": "out_layer"}

_DOUBLE_ATTENTION = {
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
}
_DOUBLE_FUSED = {"img_attn.qkv": _QKV, "txt_attn.qkv": _ADDED_QKV}

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
            layers=_DOUBLE_ATTENTION
            | {
                "norm1.linear": "img_mod.lin",
                "norm1_context.linear": "txt_mod.lin",
                "ff.net.0.proj": "img_mlp.0",
                "ff.net.2": "img_mlp.2",
                "ff_context.net.0.proj": "txt_mlp.0",
                "ff_context.net.2": "txt_mlp.2",
            },
            fused=_DOUBLE_FUSED,
        ),
        "single_transformer_blocks": Blocks(
            "single_blocks",
            layers={
                "norm.linear": "modulation.lin",
                "attn.norm_q": "norm.query_norm",
                "attn.norm_k": "norm.key_norm",
                "proj_out": "linear2",
            },
            fused={"linear1": (*_QKV, "proj_mlp")},
        ),
    },
    swapped=("norm_out.linear",),
    scales=("query_norm", "key_norm"),
)

FLUX2 = Layout(
    top={
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
    }
    | {
        f"time_guidance_embed.timestep_embedder.{layer}": f"time_in.{original}"
        for layer, original in _MLP_EMBEDDER.items()
    },
    blocks={
        "transformer_blocks": Blocks(
            "double_blocks",
            layers=_DOUBLE_ATTENTION
            | {
                "ff.linear_in": "img_mlp.0",
                "ff.linear_out": "img_mlp.2",
                "ff_context.linear_in": "txt_mlp.0",
                "ff_context.linear_out": "txt_mlp.2",
            },
            fused=_DOUBLE_FUSED,
        ),
        "single_transformer_blocks": Blocks(
            "single_blocks",
            layers={
                "attn.norm_q": "norm.query_norm",
                "attn.norm_k": "norm.key_norm",
                "attn.to_qkv_mlp_proj": "linear1",
                "attn.to_out": "linear2",
            },
        ),
    },
    swapped=("norm_out.linear",),
    scales=("query_norm", "key_norm"),
    lora_by_original_name=(
        *("time_guidance_embed.", "double_stream_modulation_", "single_stream_modulation."),
    ),
)

_SD3_MLP = {"linear_1": "mlp.0", "linear_2": "mlp.2"}

SD3 = Layout(
    top={
        "pos_embed.pos_embed": "pos_embed",
        "pos_embed.proj": "x_embedder.proj",
        "context_embedder": "context_embedder",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
    }
    | {
        f"time_text_embed.{ours}.{layer}": f"{theirs}.{original}"
        for ours, theirs in (("timestep_embedder", "t_embedder"), ("text_embedder", "y_embedder"))
        for layer, original in _SD3_MLP.items()
    },
    blocks={
        "transformer_blocks": Blocks(
            "joint_blocks",
            layers={
                "norm1.linear": "x_block.adaLN_modulation.1",
                "norm1_context.linear": "context_block.adaLN_modulation.1",
                "attn.norm_q": "x_block.attn.ln_q",
                "attn.norm_k": "x_block.attn.ln_k",
                "attn.norm_added_q": "context_block.attn.ln_q",
                "attn.norm_added_k": "context_block.attn.ln_k",
                "attn.to_out.0": "x_block.attn.proj",
                "attn.to_add_out": "context_block.attn.proj",
                "attn2.norm_q": "x_block.attn2.ln_q",
                "attn2.norm_k": "x_block.attn2.ln_k",
                "attn2.to_out.0": "x_block.attn2.proj",
                "ff.net.0.proj": "x_block.mlp.fc1",
                "ff.net.2": "x_block.mlp.fc2",
                "ff_context.net.0.proj": "context_block.mlp.fc1",
                "ff_context.net.2": "context_block.mlp.fc2",
            },
            fused={
                "x_block.attn.qkv": _QKV,
                "context_block.attn.qkv": _ADDED_QKV,
                "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
            },
            # The text stream ends there, so that this is a norm like that of the output.
            swapped_in_last=("norm1_context.linear",),
        )
    },
    swapped=("norm_out.linear",),
)

QWEN_IMAGE = Layout(
    top=_same(
        *(
            "time_text_embed.timestep_embedder.linear_1",
            "time_text_embed.timestep_embedder.linear_2",
        ),
        *("txt_norm", "img_in", "txt_in", "norm_out.linear", "proj_out"),
    ),
    blocks={
        "transformer_blocks": Blocks(
            "transformer_blocks",
            layers=_same(
                *(*_QKV, *_ADDED_QKV, "attn.to_out.0", "attn.to_add_out"),
                *("attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"),
                *("img_mod.1", "img_mlp.net.0.proj", "img_mlp.net.2"),
                *("txt_mod.1", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
            ),
        )
    },
)

_Z_IMAGE_LAYERS = _same(
    *("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2", "adaLN_modulation.0"),
    *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
) | {
    "attention.norm_q": "attention.q_norm",
    "attention.norm_k": "attention.k_norm",
    "attention.to_out.0": "attention.out",
}

Z_IMAGE = Layout(
    top=_same(
        *("x_pad_token", "cap_pad_token", "cap_embedder.0", "cap_embedder.1"),
        *("t_embedder.mlp.0", "t_embedder.mlp.2"),
    )
    | {
        "all_x_embedder.2-1": "x_embedder",
        "all_final_layer.2-1.linear": "final_layer.linear",
        "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
    },
    blocks={
        name: Blocks(
            name,
            layers=_Z_IMAGE_LAYERS,
            fused={"attention.qkv": ("attention.to_q", "attention.to_k", "attention.to_v")},
        )
        for name in ("layers", "noise_refiner", "context_refiner")
    },
)

_WAN_ATTENTION = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
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
                "attn2.add_k_proj": "cross_attn.k_img",
                "attn2.add_v_proj": "cross_attn.v_img",
                "attn2.norm_added_k": "cross_attn.norm_k_img",
                "scale_shift_table": "modulation",
            }
            | {
                f"{ours}.{layer}": f"{theirs}.{original}"
                for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn"))
                for layer, original in _WAN_ATTENTION.items()
            },
        )
    },
    lora_by_original_name=("",),
)

LTX = Layout(
    top=_same(
        *("caption_projection.linear_1", "caption_projection.linear_2"),
        *("proj_out", "scale_shift_table"),
    )
    | {
        "proj_in": "patchify_proj",
        "time_embed.emb.timestep_embedder.linear_1": "adaln_single.emb.timestep_embedder.linear_1",
        "time_embed.emb.timestep_embedder.linear_2": "adaln_single.emb.timestep_embedder.linear_2",
        "time_embed.linear": "adaln_single.linear",
    },
    blocks={
        "transformer_blocks": Blocks(
            "transformer_blocks",
            layers=_same("ff.net.0.proj", "ff.net.2", "scale_shift_table")
            | {
                f"{attention}.{layer}": f"{attention}.{original}"
                for attention in ("attn1", "attn2")
                for layer, original in (
                    _same("to_q", "to_k", "to_v", "to_out.0")
                    | {"norm_q": "q_norm", "norm_k": "k_norm"}
                ).items()
            },
        )
    },
    lora_by_original_name=("",),
)

LAYOUTS: Mapping[str, Layout] = {
    "flux": FLUX,
    "flux2": FLUX2,
    "sd3": SD3,
    "qwen_image": QWEN_IMAGE,
    "z_image": Z_IMAGE,
    "wan": WAN,
    "ltx": LTX,
}
"""Layouts by the name of the family."""
COMFYUI_FAMILIES = tuple(LAYOUTS)
