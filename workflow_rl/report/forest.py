"""Forest plots as inline SVG: a dot and its interval per line, on one axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from workflow_rl.report.charts import Scale, nice_ticks
from workflow_rl.report.numbers import number

WIDTH, LINE, LEFT, RIGHT, TOP, BOTTOM = 400, 34, 8, 8, 4, 20
TICKS = 4


@dataclass(frozen=True)
class Bar:
    """A value with its interval; ends that are not finite are not drawn."""

    label: str
    value: float
    low: float
    high: float


def draw_forest(bars: Sequence[Bar], *, reference: float | None = 0.0) -> Markup:
    """Draw the bars below one another, each under its label.

    ``reference`` is a value that the axis shows and a dashed line marks. A drawing without a finite
    value is empty.
    """
    shown = [bar for bar in bars if math.isfinite(bar.value)]
    if not shown:
        return Markup("")
    height = TOP + LINE * len(shown) + BOTTOM
    head = Markup('<svg class="chart forest" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    described = "; ".join(_describe(bar) for bar in shown)
    scale = _scale(shown, reference)
    parts = [head.format(WIDTH, height, described), _axis(scale, height, reference)]
    parts += [_draw_bar(bar, scale, TOP + LINE * row) for row, bar in enumerate(shown)]
    return Markup("").join([*parts, Markup("</svg>")])


def _describe(bar: Bar) -> str:
    text = f"{bar.label}: {number(bar.value)}"
    if math.isfinite(bar.low) and math.isfinite(bar.high):
        text += f" ({number(bar.low)} to {number(bar.high)})"
    return text


def _scale(bars: Sequence[Bar], reference: float | None) -> Scale:
    ends = [v for bar in bars for v in (bar.value, bar.low, bar.high) if math.isfinite(v)]
    if reference is not None:
        ends.append(reference)
    low, high = min(ends), max(ends)
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        spread = 0.5 * abs(low) or 1.0
        low, high = low - spread, high + spread
    ticks = nice_ticks(low, high, TICKS)
    return Scale(ticks[0], ticks[-1], LEFT + 14, WIDTH - RIGHT - 14, ticks)


def _axis(scale: Scale, height: int, reference: float | None) -> Markup:
    line = Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    text = Markup('<text class="x-tick" x="{:.1f}" y="{:.1f}">{}</text>')
    parts = []
    for tick in scale.ticks:
        x = scale(tick)
        kind = "reference" if reference is not None and abs(tick - reference) < 1e-12 else "grid"
        parts.append(line.format(kind, x, x, TOP, height - BOTTOM))
        parts.append(text.format(x, height - 5, number(tick, 4)))
    return Markup("").join(parts)


def _draw_bar(bar: Bar, scale: Scale, top: float) -> Markup:
    y = top + 24
    parts = [Markup('<text class="bar-label" x="{}" y="{:.1f}">{}</text>').format(
        LEFT, top + 13, bar.label
    )]  # fmt: skip
    if math.isfinite(bar.low) and math.isfinite(bar.high):
        whisker = Markup('<line class="whisker" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
        parts.append(whisker.format(scale(bar.low), scale(bar.high), y, y))
        for end in (bar.low, bar.high):
            parts.append(whisker.format(scale(end), scale(end), y - 4, y + 4))
    dot = Markup('<circle class="dot s0" cx="{:.1f}" cy="{:.1f}" r="4"><title>{}</title></circle>')
    parts.append(dot.format(scale(bar.value), y, _describe(bar)))
    return Markup("").join(parts)
