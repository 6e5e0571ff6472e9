"""The embedded models, with what their folders cannot say about sampling them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.request import DiffusionParams


@dataclass(frozen=True)
class EmbeddedModel:
    """A diffusers folder and the sampling parameters that a request may leave out."""

    folder: Path
    defaults: DiffusionParams = field(default_factory=DiffusionParams)


TINY_FLUX_T2I = EmbeddedModel(EMBEDDED_FOLDERS["t2i"])
TINY_WAN_I2V = EmbeddedModel(EMBEDDED_FOLDERS["i2v"], DiffusionParams(num_frames=9, fps=8.0))
