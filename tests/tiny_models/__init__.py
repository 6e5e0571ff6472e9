"""Random tiny checkpoints of the classes that people run, saved as real diffusers folders.

One file per family; what they share is in ``parts``.
"""

from tests.tiny_models.flux import save_flux
from tests.tiny_models.wan import save_wan

__all__ = ["save_flux", "save_wan"]
