"""Whether a diffusers folder has the files of every component that ``model_index.json`` names.

The libraries are not this strict: of a tokenizer without files transformers makes an empty one,
under which every prompt is the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_rl.config.weight_files import AGAIN, WeightFiles, check_weight_files
from workflow_rl.errors import UserError

_FILES: Mapping[str, tuple[str, ...]] = {
    "Tokenizer": ("tokenizer.json", "vocab.json", "vocab.txt", "*.model"),
    "Scheduler": ("scheduler_config.json",),
    "Processor": ("preprocessor_config.json", "processor_config.json"),
    "FeatureExtractor": ("preprocessor_config.json",),
}
"""Part of a class's name to the files of which its folder has one; other classes are modules."""


def check_components(
    folder: Path, index: Mapping[str, Any], variant: str | None = None
) -> dict[str, WeightFiles]:
    """Return the weight files of each module of a diffusers folder, after checking all components.

    Parameters
    ----------
    folder, index
        The diffusers folder and its parsed ``model_index.json``.
    variant
        Variant of the weight files; None: the plain files.

    Raises
    ------
    UserError
        If a component lacks its files, or as `check_weight_files`.
    """
    weights = check_weight_files(folder, index, variant)
    for name, entry in index.items():
        if not (isinstance(entry, list) and len(entry) == 2 and entry[0] is not None):
            continue
        needed = _needed(str(entry[1]))
        path = folder / name
        if needed is None and name not in weights:
            raise UserError(
                f"{path} holds no weights in safetensors; download them, or save the model with "
                "save_pretrained"
            )
        if needed is not None and not any(any(path.glob(pattern)) for pattern in needed):
            raise UserError(
                f"{path} has none of {', '.join(needed)}, and model_index.json names a {entry[1]} "
                f"there; {AGAIN}"
            )
    return weights


def _needed(class_name: str) -> tuple[str, ...] | None:
    """Return the files of which a component has one; None: it is a module, with weights."""
    return next((files for part, files in _FILES.items() if part in class_name), None)
