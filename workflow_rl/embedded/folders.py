"""Where the embedded checkpoints lie: importing this needs neither PyTorch nor diffusers."""

from collections.abc import Mapping
from pathlib import Path

_CHECKPOINTS = Path(__file__).parent / "checkpoints"

EMBEDDED_FOLDERS: Mapping[str, Path] = {
    "t2i": _CHECKPOINTS / "tiny-flux-t2i",
    "i2v": _CHECKPOINTS / "tiny-wan-i2v",
}
"""Task → diffusers folder of the model that is embedded for it."""
