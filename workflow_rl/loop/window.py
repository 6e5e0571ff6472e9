"""Which denoising steps are stochastic in an iteration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workflow_rl.errors import UserError


@dataclass(frozen=True)
class SDEWindow:
    """A rule that picks the stochastic steps, out of the ``n - 1`` that may be.

    ``all``: every step but the last. ``fixed``: ``size`` steps from ``start``. ``random``: ``size``
    consecutive steps, drawn anew for each iteration. ``sliding``: ``size`` steps that move by
    ``stride`` every ``every`` iterations and wrap around (MixGRPO, arXiv 2507.21802, sec. 3.2).
    """

    mode: str = "all"
    start: int = 0
    size: int | None = None
    stride: int = 1
    every: int = 1

    def __post_init__(self) -> None:
        if self.mode not in WINDOW_STARTS:
            raise UserError(
                f"the window's mode is {self.mode!r}; use one of {', '.join(WINDOW_STARTS)}"
            )

    def steps(self, num_steps: int, iteration: int, seed: int) -> tuple[int, ...]:
        """Return the stochastic steps of an iteration; a pure function, so resume is exact."""
        candidates = num_steps - 1
        size = candidates if self.size is None else min(self.size, candidates)
        start = WINDOW_STARTS[self.mode](self, candidates - size + 1, iteration, seed)
        return tuple(range(start, start + size))


def _random_start(window: SDEWindow, positions: int, iteration: int, seed: int) -> int:
    digest = hashlib.blake2b(f"sde-window|{seed}|{iteration}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % positions


WINDOW_STARTS: Mapping[str, Callable[[SDEWindow, int, int, int], int]] = {
    "all": lambda window, positions, iteration, seed: 0,
    "fixed": lambda window, positions, iteration, seed: window.start,
    "random": _random_start,
    "sliding": lambda window, positions, iteration, seed: (
        (window.start + iteration // window.every * window.stride) % positions
    ),
}
"""First step of the window by mode: (window, possible positions, iteration, seed) to index."""
