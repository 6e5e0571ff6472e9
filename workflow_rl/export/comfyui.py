"""Names that ComfyUI's loaders accept."""

COMFYUI_FAMILIES: tuple[str, ...] = ()
