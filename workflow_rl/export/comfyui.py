"""Names of layers and tensors that ComfyUI's loaders accept, for the families that are mapped.

ComfyUI holds the models as their authors published them. A whole model is loaded under those
names. A LoRA is loaded under ``diffusion_model.<original layer>``, and for most image families
under ``transformer.<diffusers layer>`` too, where ComfyUI itself finds the rows of a fused layer;
its scale is alpha / rank with alpha from a tensor ``<layer>.alpha``, never from the file's header.

Sources: ``comfy/lora.py`` (``model_lora_keys_unet``) and ``comfy/weight_adapter/lora.py`` of
ComfyUI, and those of the tables in ``comfyui_layouts.py``.
"""

from collections.abc import Iterable

from workflow_rl.errors import UserError
from workflow_rl.export.comfyui_layouts import LAYOUTS
from workflow_rl.export.layout import Place, last_blocks


def tensor_places(family: str, names: Iterable[str]) -> dict[str, Place]:
    """Return where each tensor of a transformer lies.

    Raises
    ------
    UserError
        If one is not mapped.
    """
    names = list(names)
    last = last_blocks(names)
    places = {name: LAYOUTS[family].tensor(name, last) for name in names}
    _refuse(family, [name for name, place in places.items() if place is None])
    return {name: place for name, place in places.items() if place is not None}


def lora_keys(family: str, layers: Iterable[str]) -> dict[str, str]:
    """Return the name under which ComfyUI finds each layer's LoRA.

    Raises
    ------
    UserError
        If one is not mapped.
    """
    layout, layers = LAYOUTS[family], list(layers)
    last = last_blocks(layers)
    places = {layer: layout.layer(layer, last) for layer in layers}
    _refuse(family, [layer for layer, place in places.items() if place is None])
    return {
        layer: f"diffusion_model.{place.name}"
        if layer.startswith(layout.lora_by_original_name)
        else f"transformer.{layer}"
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
