"""What ComfyUI says of the names that it takes, as patterns: facts that the product is held to.

From the modules under ``comfy/ldm``, and from ``comfy/lora.py`` and ``comfy/utils.py``, of
Comfy-Org/ComfyUI in 2026 (``lora.py`` at commit 17358c8, ``utils.py`` at 09708ea).
"""

from __future__ import annotations

_ENDING = r"\.(weight|bias)"
_DOUBLE = r"double_blocks\.\d+\.(img|txt)_"
_FLUX = (
    rf"({_DOUBLE}(mod\.lin|attn\.(qkv|proj)|mlp\.[02])|single_blocks\.\d+\.(linear[12]|modulation\.lin)"
    r"|(img|txt)_in|(time|vector|guidance)_in\.(in|out)_layer|final_layer\.(linear|adaLN_modulation\.1)"
    rf"|(double_stream_modulation_(img|txt)|single_stream_modulation)\.lin){_ENDING}"
    rf"|({_DOUBLE}attn|single_blocks\.\d+)\.norm\.(query|key)_norm\.scale"
)
ORIGINAL_NAMES = {
    "flux": _FLUX,
    "flux2": _FLUX,
    "sd3": rf"pos_embed|(x_embedder\.proj|context_embedder|[ty]_embedder\.mlp\.[02]"
    r"|final_layer\.(linear|adaLN_modulation\.1)|joint_blocks\.\d+\.(x|context)_block\."
    rf"(adaLN_modulation\.1|attn2?\.(qkv|proj|ln_[qk])|mlp\.fc[12])){_ENDING}",
    "qwen_image": rf"(time_text_embed\.timestep_embedder\.linear_[12]|txt_norm|(img|txt)_in"
    r"|proj_out|norm_out\.linear|transformer_blocks\.\d+\.((img|txt)_(mod\.1|mlp\.net\.(0\.proj|2))"
    rf"|attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out|norm_(added_)?[qk]))){_ENDING}",
    "z_image": rf"(x|cap)_pad_token|(x_embedder|cap_embedder\.[01]|t_embedder\.mlp\.[02]"
    r"|final_layer\.(linear|adaLN_modulation\.1)|(layers|noise_refiner|context_refiner)\.\d+\."
    r"(attention\.(qkv|out|[qk]_norm)|(attention|ffn)_norm[12]|feed_forward\.w[123]"
    rf"|adaLN_modulation\.0)){_ENDING}",
    "wan": rf"head\.modulation|blocks\.\d+\.modulation|(patch_embedding|(text|time)_embedding\.[02]"
    r"|time_projection\.1|img_emb\.proj\.[0134]|head\.head|blocks\.\d+\.(norm3|ffn\.[02]"
    rf"|(self|cross)_attn\.([qkvo]|norm_[qk]|[kv]_img|norm_k_img))){_ENDING}",
    "ltx": rf"(transformer_blocks\.\d+\.)?scale_shift_table|(patchify_proj|proj_out"
    r"|adaln_single\.(emb\.timestep_embedder\.linear_[12]|linear)|caption_projection\.linear_[12]"
    r"|transformer_blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0|[qk]_norm)|ff\.net\.(0\.proj|2)))"
    rf"{_ENDING}",
}
"""Tensors of a family's transformer."""

_JOINT = r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)|norm1(_context)?\.linear"
_TOP = (
    r"context_embedder|proj_out|norm_out\.linear"
    r"|time_text_embed\.(timestep|text|guidance)_embedder\.linear_[12]"
)
_FLUX_TO_DIFFUSERS = (
    rf"transformer_blocks\.\d+\.({_JOINT}|ff(_context)?\.(net\.0\.proj|net\.2|linear_in|linear_out))"
    r"|single_transformer_blocks\.\d+\.(attn\.(to_[qkv]|to_qkv_mlp_proj|to_out)|proj_mlp|proj_out"
    rf"|norm\.linear)|x_embedder|{_TOP}"
)
LORA_BY_DIFFUSERS_NAME = {
    "flux": _FLUX_TO_DIFFUSERS,
    "flux2": _FLUX_TO_DIFFUSERS,
    "sd3": rf"transformer_blocks\.\d+\.({_JOINT}|attn2\.(to_[qkv]|to_out\.0)"
    rf"|ff(_context)?\.net\.(0\.proj|2))|{_TOP}",
    "qwen_image": r".*",
    "z_image": r"(layers|context_refiner|noise_refiner)\.\d+\.(attention\.(to_[qkv]|to_out\.0)"
    r"|feed_forward\.w[123]|adaLN_modulation\.0)|all_final_layer\.2-1\.(linear|adaLN_modulation\.1)"
    r"|all_x_embedder\.2-1|cap_embedder\.1|t_embedder\.mlp\.[02]",
}
"""Linear layers, by their names in diffusers, whose LoRA is taken under ``transformer.<name>``.

From ``model_lora_keys_unet``, which takes them from ``flux_to_diffusers``, ``mmdit_to_diffusers``
and ``z_image_to_diffusers``. Of other families it takes ``diffusion_model.<original name>`` alone,
as it does of every family.
"""
