"""Weights of reward networks: found, loaded whole, or refused.

Both transformers and ``load_state_dict(strict=False)`` only report a tensor that a checkpoint
lacks and leave it random. A reward read from a random head still looks like a number.
"""

import importlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from workflow_rl.errors import UserError
from workflow_rl.module_weights import check_finite, own_memory

T = TypeVar("T")

POSITION_IDS = r"(^|\.)position_ids$"
"""Counters 0, 1, 2, … that checkpoints of older transformers hold as if they were weights."""


class Lazy(Generic[T]):
    """A value made at its first use, once, whatever thread asks first.

    Parameters
    ----------
    make : callable
        Makes the value; may raise, and is then called again at the next use.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []

    def get(self) -> T:
        """Return the value, made now if it has not been."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
        return self._made[0]


def import_extra(module: str, extra: str, needed_by: str) -> ModuleType:
    """Import an optional package.

    Raises
    ------
    UserError
        It is not installed; names what needs it and the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{needed_by} needs {module}, which cannot be imported ({error}): pip install "
            f"'workflow-rl[{extra}]'"
        ) from error


def pick_device(device: str | None) -> torch.device:
    """The named device; for None a GPU where there is one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def pick_dtype(dtype: str | None, device: torch.device) -> torch.dtype:
    """The named dtype; for None bfloat16 on a GPU and float32 on a CPU.

    Raises
    ------
    UserError
        The name is none of float32, float16 and bfloat16.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise UserError(f"dtype is {dtype!r}: give one of {', '.join(known)}")
    return known[dtype]


def weight_file(source: str) -> Path:
    """The file that ``source`` names: a path, or ``owner/repository/file.safetensors`` on the hub.

    Raises
    ------
    UserError
        There is no such file and it cannot be fetched, or it is not in safetensors.
    """
    path = Path(source).expanduser()
    if path.suffix != ".safetensors":
        raise UserError(
            f"{source} is not in safetensors, and pickles are not read: convert it once, "
            f"see docs/rewards.md"
        )
    if path.is_file():
        return path
    parts = source.split("/")
    if len(parts) < 3 or source.startswith(("/", ".", "~")):
        raise UserError(
            f"there is no weight file {source}: see docs/rewards.md for where to get it"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download("/".join(parts[:2]), "/".join(parts[2:])))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise _cannot_load(source, error) from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises
    ------
    UserError
        It is damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _cannot_load(str(path), error) from error


def load_strict(module: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Load every tensor of ``module`` from ``state``, which holds no other.

    Raises
    ------
    UserError
        One is missing, too many, of another shape, or not finite.
    """
    wanted = module.state_dict()
    refuse_keys(wanted.keys() - state.keys(), state.keys() - wanted.keys(), module, source)
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, a {type(module).__name__} "
                f"needs {tuple(wanted[name].shape)}: the weights are of another model"
            )
    module.load_state_dict(dict(state), strict=True)
    check_finite(module, source)


def load_pretrained(
    model_class: Any, source: str, *, unused: Iterable[str] = (), **options: Any
) -> Any:
    """``model_class.from_pretrained(source)``, refused if one tensor of it stayed random.

    Parameters
    ----------
    source : str
        A folder, or the name of a repository on the hub.
    unused : iterable of str
        Regular expressions for tensors that do not matter: the reward does not read them, or the
        checkpoint holds more than the class needs.

    Raises
    ------
    UserError
        It cannot be found or read, or a tensor is missing, too many, of another shape, or not
        finite.
    """
    try:
        model, report = model_class.from_pretrained(
            source, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _cannot_load(source, error) from error
    ignored = re.compile("|".join([POSITION_IDS, *unused]))
    missing, unexpected = (
        {name for name in report[kind] if not ignored.search(name)}
        for kind in ("missing_keys", "unexpected_keys")
    )
    refuse_keys(missing, unexpected, model, source)
    check_finite(model, source)
    return own_memory(model.eval().requires_grad_(False))


def load_processor(processor_class: Any, source: str, **options: Any) -> Any:
    """``processor_class.from_pretrained(source)``: a tokenizer, or a configuration.

    Raises
    ------
    UserError
        It cannot be found or read.
    """
    try:
        return processor_class.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise _cannot_load(source, error) from error


def refuse_keys(
    missing: Iterable[str], unexpected: Iterable[str], module: nn.Module, source: object
) -> None:
    """Raise a UserError that names the first tensors that are missing or too many, if any are."""
    for names, fault in ((sorted(missing), "lacks"), (sorted(unexpected), "has too many")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{source} {fault} tensors of a {type(module).__name__}: {', '.join(names[:3])}"
                f"{more}; the weights are of another model or incomplete: download them again"
            )


def _cannot_load(source: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    return UserError(f"cannot load {source}: {reason[:300]}; give a folder, or download it first")
