"""Where the embedded checkpoints lie, and what their folders cannot say about sampling them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from workflow_rl.request import DiffusionParams


@dataclass(frozen=True)
class EmbeddedModel:
    """A diffusers folder and the sampling parameters that a request may leave out."""

    folder: Path
    defaults: DiffusionParams = field(default_factory=DiffusionParams)


_CHECKPOINTS = Path(__file__).parent / "checkpoints"

TINY_FLUX_T2I = EmbeddedModel(_CHECKPOINTS / "tiny-flux-t2i")
TINY_WAN_I2V = EmbeddedModel(_CHECKPOINTS / "tiny-wan-i2v", DiffusionParams(num_frames=9))
