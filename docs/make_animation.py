"""Makes ``docs/assets/before_after.webp`` from a run: the same prompts and seeds, before and after.

python docs/make_animation.py runs/quickstart
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from workflow_rl.media import read_mp4, write_animation
from workflow_rl.training.iteration_log import IterationLog

COLUMNS = 6
SIDE = 96
GAP = 6
OUTPUT = Path(__file__).parent / "assets" / "before_after.webp"


def video_pairs(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the paths of a stage's videos in two evaluations, but those that a disk refused."""
    for stage, paths in before["media"].items():
        both = zip(paths, after["media"][stage], strict=True)
        pairs = [(one, other) for one, other in both if one is not None and other is not None]
        if pairs and pairs[0][0].endswith(".mp4"):
            return pairs
    sys.exit("no video was written of the same prompt and seed before and after")


def row_of(run: Path, paths: Sequence[str]) -> torch.Tensor:
    """Return videos side by side, [3, T, SIDE, COLUMNS * (SIDE + GAP)], from a run's files."""
    tiles = []
    for path in paths:
        video_CTHW = read_mp4(run / path)
        small = torch.nn.functional.interpolate(
            video_CTHW.transpose(0, 1), size=(SIDE, SIDE), mode="area"
        ).transpose(0, 1)
        tiles.append(torch.nn.functional.pad(small, (0, GAP), value=0.35))
    return torch.cat(tiles, dim=3)


def main() -> None:
    """Write the animation: the upper row before training, the lower one after."""
    run = Path(sys.argv[1])
    lines = IterationLog(run / "evaluations.jsonl").read()
    pairs = video_pairs(lines[0], lines[-1])[:COLUMNS]
    before, after = (row_of(run, paths) for paths in zip(*pairs, strict=True))
    gap = torch.full_like(before[:, :, :GAP], 0.35)
    sheet = torch.cat([before, gap, after], dim=2)
    held = sheet[:, -1:].expand(-1, 4, -1, -1)
    print(write_animation(OUTPUT, torch.cat([sheet, held], dim=1).clamp(0, 1), fps=6))


if __name__ == "__main__":
    main()
