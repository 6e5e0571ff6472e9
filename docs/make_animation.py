"""Makes ``docs/assets/before_after.webp`` from a run: the same prompts and seeds, before and after.

python docs/make_animation.py runs/quickstart
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from workflow_rl.media import read_mp4, write_animation
from workflow_rl.training.iteration_log import IterationLog

COLUMNS = 6
SIDE = 96
GAP = 6
OUTPUT = Path(__file__).parent / "assets" / "before_after.webp"


def row_of(run: Path, paths: list[str]) -> torch.Tensor:
    """Return videos side by side, [3, T, SIDE, COLUMNS * (SIDE + GAP)], from a run's files."""
    tiles = []
    for path in paths[:COLUMNS]:
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
    videos = next(s for s, paths in lines[0]["media"].items() if paths[0].endswith(".mp4"))
    before, after = (row_of(run, line["media"][videos]) for line in (lines[0], lines[-1]))
    gap = torch.full_like(before[:, :, :GAP], 0.35)
    sheet = torch.cat([before, gap, after], dim=2)
    held = sheet[:, -1:].expand(-1, 4, -1, -1)
    print(write_animation(OUTPUT, torch.cat([sheet, held], dim=1).clamp(0, 1), fps=6))


if __name__ == "__main__":
    main()
