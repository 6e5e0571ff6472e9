"""Side by side: one video or image per prompt, a column per candidate, a row per seed."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont

from workflow_rl.enums import MediaKind
from workflow_rl.evaluation.diversity import rows_of_prompts
from workflow_rl.evaluation.folders import prompt_stem
from workflow_rl.evaluation.media_files import DEFAULT_FPS, shown
from workflow_rl.media import write_mp4, write_png

CELL = 256
"""Pixels of a cell's shorter side, as near as a whole number of times or a reduction comes."""
GAP = 8
FONT_SIZE = 20
LINE = 26
GROUND, INK, SOFT = (24, 25, 28), (240, 240, 238), (190, 192, 198)

Frames = npt.NDArray[np.uint8]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


class GridWriter:
    """Keeps what is to be shown on the disk until every candidate has it, then lays it out.

    Parameters
    ----------
    folder : Path
        Where the files go; made if missing.
    kind : MediaKind
        Videos become MP4 files, images PNG files.
    """

    def __init__(self, folder: Path, kind: MediaKind) -> None:
        self._folder = folder
        self._kind = kind
        self._store = folder / ".cells"
        self._store.mkdir(parents=True, exist_ok=True)
        self._fps: list[float] = []

    def add(self, media: torch.Tensor, fps: float | None) -> None:
        """Take the next sample of the candidate whose turn it is, candidate by candidate.

        Parameters
        ----------
        media : Tensor
            ``[3, H, W]`` or ``[3, T, H, W]``; black where it is not finite.
        fps
            Of a video.
        """
        np.save(self._store / f"{len(self._fps)}.npy", cell_frames(media))
        self._fps.append(fps or DEFAULT_FPS)

    def write(self, labels: Sequence[str], rows: Sequence[tuple[str, int]]) -> list[Path]:
        """Write a file per prompt.

        Parameters
        ----------
        labels
            Of the candidates, in the order in which they were added.
        rows
            Prompt and seed of each sample of a candidate, in order.
        """
        prompts = [prompt for prompt, _ in rows]
        written = []
        for number, group in enumerate(rows_of_prompts(prompts)):
            prompt = prompts[group[0]]
            cells = [
                [self._cell(candidate * len(rows) + row) for candidate in range(len(labels))]
                for row in group
            ]
            seeds = [rows[row][1] for row in group]
            path = self._folder / f"{number:03d}_{prompt_stem(prompt)}"
            written.append(self._write_one(path, prompt, labels, seeds, cells))
        shutil.rmtree(self._store)
        return written

    def _cell(self, number: int) -> tuple[Frames, float]:
        return np.load(self._store / f"{number}.npy"), self._fps[number]

    def _write_one(
        self,
        path: Path,
        prompt: str,
        labels: Sequence[str],
        seeds: Sequence[int],
        cells: Sequence[Sequence[tuple[Frames, float]]],
    ) -> Path:
        flat = [cell for row in cells for cell in row]
        fps = max(rate for _, rate in flat)
        # Videos of other frame rates play at their own speed; the shorter ones hold their end.
        count = max(math.ceil(len(frames) / rate * fps - 1e-6) for frames, rate in flat)
        sheet = Sheet(
            prompt, labels, seeds, [[frames.shape[1:3] for frames, _ in r] for r in cells]
        )
        pages = [
            sheet.page([[frames[_frame_at(k / fps, rate, len(frames))] for frames, rate in row]
                        for row in cells])
            for k in range(count)
        ]  # fmt: skip
        video_CTHW = torch.from_numpy(np.stack(pages)).permute(3, 0, 1, 2).float() / 255
        if self._kind is MediaKind.IMAGE:
            return write_png(path.with_suffix(".png"), video_CTHW[:, 0], min_side=1)
        return write_mp4(path.with_suffix(".mp4"), video_CTHW, fps, min_side=1)


def _frame_at(seconds: float, fps: float, frames: int) -> int:
    return min(frames - 1, math.floor(seconds * fps + 1e-6))


def cell_frames(media: torch.Tensor) -> Frames:
    """Return a sample as bytes ``[T, h, w, 3]``, its shorter side near ``CELL`` pixels.

    Small samples are enlarged by a whole number of times, large ones reduced.
    """
    video_CTHW = media.unsqueeze(1) if media.dim() == 3 else media
    levels = (shown(video_CTHW).float() * 255).round().clamp(0, 255).to(torch.uint8)
    frames_THWC: Frames = levels.permute(1, 2, 3, 0).cpu().numpy()
    side = min(frames_THWC.shape[1:3])
    factor = max(1, CELL // side)
    if side <= CELL:
        return frames_THWC.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = (round(n * CELL / side) for n in frames_THWC.shape[1:3])
    return np.stack(
        [np.array(Image.fromarray(f).resize((width, height), Image.Resampling.BOX))
         for f in frames_THWC]
    )  # fmt: skip


class Sheet:
    """The labelled ground that the cells are put on.

    Parameters
    ----------
    sizes
        Height and width of each cell, row by row.
    """

    def __init__(
        self,
        prompt: str,
        labels: Sequence[str],
        seeds: Sequence[int],
        sizes: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        font = ImageFont.load_default(FONT_SIZE)
        widths = [max(row[c][1] for row in sizes) for c in range(len(labels))]
        heights = [max(size[0] for size in row) for row in sizes]
        margin = max(round(font.getlength(f"seed {seed}")) for seed in seeds) + 2 * GAP
        width = margin + sum(widths) + GAP * len(labels)
        head = _wrapped(prompt, font, width - 2 * GAP)
        names = [
            _wrapped(label, font, column) for label, column in zip(labels, widths, strict=True)
        ]
        below_head = GAP + LINE * len(head) + GAP // 2
        top = below_head + LINE * max(map(len, names)) + GAP
        ground = Image.new(
            "RGB", (_even(width), _even(top + sum(heights) + GAP * len(seeds))), GROUND
        )
        draw = ImageDraw.Draw(ground)
        _write_lines(draw, head, (GAP, GAP), font, INK)
        self._lefts = [margin + sum(widths[:c]) + GAP * c for c in range(len(labels))]
        self._tops = [top + sum(heights[:r]) + GAP * r for r in range(len(seeds))]
        for left, lines in zip(self._lefts, names, strict=True):
            _write_lines(draw, lines, (left, below_head), font, INK)
        for y, seed in zip(self._tops, seeds, strict=True):
            draw.text((GAP, y + 4), f"seed {seed}", fill=SOFT, font=font)
        self._ground: Frames = np.array(ground)

    def page(self, frames: Sequence[Sequence[Frames]]) -> Frames:
        """Return one picture ``[H, W, 3]`` with a frame in each cell."""
        page = self._ground.copy()
        for top, row in zip(self._tops, frames, strict=True):
            for left, frame in zip(self._lefts, row, strict=True):
                page[top : top + frame.shape[0], left : left + frame.shape[1]] = frame
        return page


def _wrapped(text: str, font: Font, width: int) -> list[str]:
    """Break a text into lines of at most ``width`` pixels."""
    per_letter = font.getlength(text) / max(1, len(text))
    return textwrap.wrap(text, max(4, int(width / max(per_letter, 1) * 0.95))) or [""]


def _write_lines(
    draw: ImageDraw.ImageDraw,
    lines: Sequence[str],
    corner: tuple[int, int],
    font: Font,
    colour: tuple[int, int, int],
) -> None:
    for number, line in enumerate(lines):
        draw.text((corner[0], corner[1] + LINE * number), line, fill=colour, font=font)


def _even(pixels: int) -> int:
    return pixels + pixels % 2
