"""Whether a diffusers folder has the files of every component that ``model_index.json`` names.

The libraries are not this strict: of a tokenizer without files transformers makes an empty one,
under which every prompt is the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workflow_rl.config.families import ReadJSON
from workflow_rl.config.model_index import LIBRARIES, indexed_components
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
    folder: Path, index: Mapping[str, Any], variant: str | None = None, where: str = "variant"
) -> dict[str, WeightFiles]:
    """Return the weight files of each module of a diffusers folder, after checking all components.

    Parameters
    ----------
    folder, index
        The diffusers folder and its parsed ``model_index.json``.
    variant
        Variant of the weight files; None: the plain files.
    where
        What the variant is called in messages: ``stages.t2i.variant``.

    Raises
    ------
    UserError
        If a component lacks its files or is of an unknown library, or as `check_weight_files`.
    """
    check_libraries(index, str(folder))
    weights = check_weight_files(folder, index, variant, where)
    for name, (_, class_name) in indexed_components(index).items():
        needed = _needed(class_name)
        path = folder / name
        if needed is None and name not in weights:
            raise UserError(
                f"{path} holds no weights in safetensors; download them, or save the model with "
                "save_pretrained"
            )
        if needed is not None and not any(any(path.glob(pattern)) for pattern in needed):
            raise UserError(
                f"{path} has none of {', '.join(needed)}, and model_index.json names a "
                f"{class_name} there; {AGAIN}"
            )
    return weights


def check_libraries(index: Mapping[str, Any], source: str) -> None:
    """Check that every component is of a library whose classes are loaded.

    Parameters
    ----------
    index
        A parsed ``model_index.json``.
    source
        Where it is from, for messages.

    Raises
    ------
    UserError
        At the first that is not.
    """
    for name, (library, class_name) in indexed_components(index).items():
        if library not in LIBRARIES:
            raise UserError(
                f"{source} names a {class_name} of the library {library!r} for its {name} in "
                f"model_index.json, but components are loaded from {' and '.join(LIBRARIES)} "
                f"alone; save the model with a {name} of one of these, or download it again"
            )


def check_plain_weights(index: Mapping[str, Any], read: ReadJSON, source: str) -> None:
    """Check that no component's weights are quantised, by its ``config.json``.

    The libraries would need packages and devices of their own for them, and a merged LoRA or a
    trained weight has no place in them.

    Parameters
    ----------
    index
        A parsed ``model_index.json``.
    read
        Returns a JSON file of the folder.
    source
        Where they are from, for messages.

    Raises
    ------
    UserError
        At the first that is.
    """
    for name, (_, class_name) in indexed_components(index).items():
        if _needed(class_name) is not None:
            continue
        quantised = read(f"{name}/config.json").get("quantization_config")
        if quantised:
            method = quantised.get("quant_method", "an unnamed method")
            raise UserError(
                f"{source} has a quantised {name} ({method}), which is not supported; use the "
                "model with plain weights, and dtype: bfloat16 where memory is short"
            )


def _needed(class_name: str) -> tuple[str, ...] | None:
    """Return the files of which a component has one; None: it is a module, with weights."""
    return next((files for part, files in _FILES.items() if part in class_name), None)
