"""What an export is asked for, and what is wrong with that: read without PyTorch."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.errors import UserError
from workflow_rl.export.comfyui_layouts import COMFYUI_FAMILIES

Weights = Literal["student", "ema"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class ExportFormat(StrEnum):
    """What is written.

    ``LORA``: the adapters alone. ``MERGED``: the stage's transformers, with a LoRA merged in.
    ``DIFFUSERS``: the whole pipeline folder.
    """

    LORA = "lora"
    MERGED = "merged"
    DIFFUSERS = "diffusers"


class KeyFormat(StrEnum):
    """How tensors are named: as diffusers does, or as ComfyUI's loaders expect."""

    DIFFUSERS = "diffusers"
    COMFYUI = "comfyui"


@dataclass(frozen=True)
class ExportOptions:
    """What to export.

    Parameters
    ----------
    stage
        Name of the stage.
    format
        What is written.
    output
        Folder to make; None: ``export/<stage>-<format>`` in the run directory.
    weights
        Whose weights; None: those that ``evaluate`` takes, the run's ``evaluation.weights``.
    iteration
        Which checkpoint; None: the newest whole one.
    dtype
        Type of the tensors; None: float32 for ``LORA``, else the stage's own.
    key_format
        How the tensors are named.
    """

    stage: str
    format: ExportFormat
    output: Path | None = None
    weights: Weights | None = None
    iteration: int | None = None
    dtype: DTypeName | None = None
    key_format: KeyFormat = KeyFormat.DIFFUSERS

    def target(self, run_dir: Path) -> Path:
        """Return the folder to make."""
        if self.output is not None:
            return self.output
        suffix = "" if self.key_format is KeyFormat.DIFFUSERS else f"-{self.key_format}"
        return run_dir / "export" / f"{self.stage}-{self.format}{suffix}"


def check_options(config: RunConfig, options: ExportOptions) -> StageConfig:
    """Return the stage's configuration, if the run can give what is asked for.

    Raises
    ------
    UserError
        If there is no such stage, it was frozen, it has no LoRA to export, keeps no such weights,
        or the target is there already.
    """
    stage = config.stages.get(options.stage)
    if stage is None:
        raise UserError(
            f"--stage {options.stage} is no stage of this run; use {' or '.join(config.stages)}"
        )
    if stage.freeze:
        raise UserError(
            f"stage {options.stage!r} was frozen in this run, so there is nothing to export; use "
            "its model folder as it is"
        )
    if options.format is ExportFormat.LORA and stage.lora is None:
        raise UserError(
            f"stage {options.stage!r} was trained without a LoRA; use --format merged or diffusers"
        )
    if options.weights == "ema" and stage.ema.decay is None:
        raise UserError(
            f"the run keeps no EMA of stage {options.stage!r} (its ema.decay is null); use "
            "--weights student"
        )
    if options.format is ExportFormat.DIFFUSERS and options.key_format is KeyFormat.COMFYUI:
        raise UserError(
            "--format diffusers is a folder with diffusers' own keys; use --format merged or lora "
            "with --key-format comfyui"
        )
    target = options.target(config.output_dir)
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; give another folder with --output")
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir():
        raise UserError(f"{parent} is a file, so {target} cannot be made; give another --output")
    return stage


def check_key_format(family: str, options: ExportOptions) -> None:
    """Raise a UserError if the keys of ``family`` are not mapped to the format."""
    if options.key_format is KeyFormat.COMFYUI and family not in COMFYUI_FAMILIES:
        raise UserError(
            f"stage {options.stage!r} is of the family {family}, whose keys are not mapped for "
            f"ComfyUI (mapped: {', '.join(sorted(COMFYUI_FAMILIES))}); use --key-format diffusers"
        )
