"""Which layers a LoRA adapts, and whether an existing one fits a model: read without PyTorch.

Only the headers of safetensors files are read, so a fault shows before any weight is loaded.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workflow_rl.config.lora import ALL_LINEAR, LoRAConfig
from workflow_rl.config.model_index import indexed_components
from workflow_rl.errors import UserError

LORA_FILE = "pytorch_lora_weights.safetensors"
"""What ``save_lora_weights`` of diffusers names its file."""
PREFIX = "transformer."
"""Of every key in such a file, for a second transformer too."""
METADATA = "lora_adapter_metadata"
"""Entry in the header where diffusers keeps rank and alpha, as JSON."""
LORA_PARTS = ("lora_A.weight", "lora_B.weight", "alpha")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LoRALayout:
    """Adapters of one component.

    Parameters
    ----------
    modules
        Full names of its linear layers.
    rank, alpha
        The output is base(x) + (alpha / rank) B A x. ``alpha`` is None where the header of
        ``file`` has none: then the file's ``alpha`` tensors say it, else it is the rank.
    file
        Where A and B start; None: A is random and B is 0.
    """

    modules: tuple[str, ...]
    rank: int
    alpha: float | None
    file: Path | None


def check_lora(
    folder: Path, index: Mapping[str, Any], defaults: Sequence[str], lora: LoRAConfig, where: str
) -> None:
    """Check a LoRA against a diffusers folder, by the names and shapes in its headers.

    Raises
    ------
    UserError
        As :func:`lora_layout`.
    """
    lora_layouts(folder, index, defaults, lora, where)


def lora_layouts(
    folder: Path, index: Mapping[str, Any], defaults: Sequence[str], lora: LoRAConfig, where: str
) -> dict[str, LoRALayout]:
    """Return the adapters of each transformer in a diffusers folder, from its files' headers.

    Parameters
    ----------
    index
        The folder's ``model_index.json``.
    defaults
        The family's targets.
    where
        Configuration key of the LoRA, for messages: ``stages.t2i.lora``.

    Raises
    ------
    UserError
        As :func:`lora_layout`.
    """
    components = tuple(n for n in indexed_components(index) if n.startswith("transformer"))
    return {
        component: lora_layout(
            lora, _linear_shapes(folder / component, where), defaults, component, components, where
        )
        for component in components
    }


def lora_layout(
    lora: LoRAConfig,
    linears: Shapes,
    defaults: Sequence[str],
    component: str,
    components: Sequence[str],
    where: str,
) -> LoRALayout:
    """Return the adapters that ``component`` gets.

    Parameters
    ----------
    linears
        Name to weight shape [out, in] of each linear layer of ``component``.
    defaults
        The family's targets.
    components
        Every component that gets adapters.

    Raises
    ------
    UserError
        If a target names no linear layer; if ``lora.init`` is missing, damaged, no LoRA in
        diffusers' format, made for another model, or of another rank.
    """
    if lora.init is not None:
        file = _init_file(lora.init, component, components, f"{where}.init")
        return _layout_of_file(file, lora.rank, linears, f"{where}.init")
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    if lora.targets == ALL_LINEAR:
        return LoRALayout(tuple(linears), lora.rank, alpha, None)
    targets = defaults if lora.targets is None else lora.targets
    for target in targets:
        if not any(_ends_with(name, target) for name in linears):
            endings = sorted({_ending(name) for name in linears})
            raise UserError(
                f"{where}.targets: {target!r} names no linear layer of the {component}; "
                f"use endings such as {', '.join(endings[:12])}, or {ALL_LINEAR}"
            )
    modules = tuple(name for name in linears if any(_ends_with(name, t) for t in targets))
    return LoRALayout(modules, lora.rank, alpha, None)


def module_of(key: str) -> tuple[str, str] | None:
    """Split a key of a LoRA file into layer name and part; None: it is not of diffusers' format."""
    for part in LORA_PARTS:
        if key.startswith(PREFIX) and key.endswith(f".{part}"):
            return key[len(PREFIX) : -len(part) - 1], part
    return None


def _ends_with(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")


def _ending(name: str) -> str:
    """Return a layer's name within its block: what follows the last block number, if any.

    ``to_out.0`` and ``net.0.proj`` keep their own numbers.
    """
    parts = name.split(".")
    return ".".join(parts[2:]) if len(parts) > 2 and parts[1].isdecimal() else name


def _linear_shapes(folder: Path, where: str) -> dict[str, tuple[int, ...]]:
    """Return [out, in] of each matrix ``<name>.weight`` in a component's safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{where}: {folder} has no .safetensors weights; download the model again")
    shapes = {key: shape for file in files for key, shape in _header(file, where)[0].items()}
    return {
        key.removesuffix(".weight"): shape
        for key, shape in shapes.items()
        if key.endswith(".weight") and len(shape) == 2
    }


def _header(file: Path, where: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the shapes and the metadata in a safetensors file's header."""
    try:
        with safe_open(file, framework="np") as opened:
            names = opened.keys()
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
            return shapes, opened.metadata() or {}
    except (OSError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{where}: {file} is not a whole safetensors file ({reason}); download it again"
        ) from None


def _init_file(init: Path, component: str, components: Sequence[str], where: str) -> Path:
    """Return the file that ``component`` starts from."""
    if len(components) == 1:
        file = init / LORA_FILE if init.is_dir() else init
    else:
        file = init / component / LORA_FILE
    if not file.is_file():
        kinds = "a .safetensors file, or a folder with" if len(components) == 1 else "a folder with"
        names = [LORA_FILE] if len(components) == 1 else [f"{c}/{LORA_FILE}" for c in components]
        raise UserError(f"{where}: no file {file}; give {kinds} {' and '.join(names)}")
    return file


def _layout_of_file(file: Path, rank: int, linears: Shapes, where: str) -> LoRALayout:
    shapes, metadata = _header(file, where)
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        split = module_of(key)
        if split is None:
            raise UserError(
                f"{where}: {file} has the key {key!r}, expected {PREFIX}<layer>.lora_A.weight, "
                "lora_B.weight or alpha as diffusers writes; convert it with the stock pipeline's "
                "load_lora_weights and save_lora_weights"
            )
        layers.setdefault(split[0], {})[split[1]] = shape
    if not layers:
        raise UserError(f"{where}: {file} holds no tensor; use another file")
    unknown = [name for name in layers if name not in linears]
    if unknown:
        raise UserError(
            f"{where}: {file} is a LoRA for another model: {len(unknown)} of its {len(layers)} "
            f"layers, such as {unknown[0]!r}, are not in this one; use one made for this model"
        )
    ranks = set()
    for name, parts in layers.items():
        size_out, size_in = linears[name]
        a, b = parts.get("lora_A.weight"), parts.get("lora_B.weight")
        if a is None or b is None or a[1:] != (size_in,) or b != (size_out, a[0]):
            raise UserError(
                f"{where}: {file} does not fit this model: {name} is {size_out}×{size_in}, but the "
                f"file has A {a} and B {b}; use a LoRA made for this model"
            )
        ranks.add(a[0])
    if ranks != {rank}:
        found = ", ".join(map(str, sorted(ranks)))
        mend = f"set rank: {found}" if len(ranks) == 1 else "use a LoRA of one rank"
        raise UserError(f"{where}: {file} has rank {found}, but rank is {rank}; {mend}")
    return LoRALayout(tuple(layers), rank, _header_alpha(file, metadata, where), file)


def _header_alpha(file: Path, metadata: Mapping[str, str], where: str) -> float | None:
    """Return the alpha in a file's header, if it is there."""
    if METADATA not in metadata:
        return None
    try:
        adapter = json.loads(metadata[METADATA])
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: {file}: {METADATA} in its header is not JSON ({error}); save it again"
        ) from None
    if not isinstance(adapter, dict):
        raise UserError(
            f"{where}: {file}: {METADATA} in its header is not a JSON object; save it again"
        )
    for option in ("use_rslora", "use_dora", "lora_bias", "alpha_pattern", "rank_pattern"):
        if adapter.get(f"{PREFIX}{option}"):
            raise UserError(
                f"{where}: {file} uses {option}, which is not supported; use a LoRA without it"
            )
    alpha = adapter.get(f"{PREFIX}lora_alpha")
    return None if alpha is None else usable_alpha(alpha, f"{where}: {file}")


def usable_alpha(alpha: object, what: str) -> float:
    """Return the alpha of a LoRA file, which ``what`` names in messages.

    Raises
    ------
    UserError
        Unless it is a finite number above 0: the adapter would be NaN, or nothing that can train.
    """
    if isinstance(alpha, int | float) and math.isfinite(alpha) and alpha > 0:
        return float(alpha)
    raise UserError(f"{what} has the alpha {alpha!r}, expected a number above 0; save it again")
