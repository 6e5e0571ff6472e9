"""Line charts as inline SVG: no script, no external resource; colours come from the page's style.

Classes ``s0`` to ``s5`` pick a series' colour, so that a chart follows the light or dark theme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from workflow_rl.report.numbers import number

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 36
MOST_POINTS = 500
COLOURS = 6


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes
    ----------
    label : str
    x, y : sequence of float
        Of one length, ``x`` ascending; a ``y`` that is not finite is a gap.
    low, high : sequence of float, optional
        A band around the line, of the same length.
    colour : int
        Index of the page's series colours.
    markers : bool
        Draw a dot with its value on each point.
    alarm : bool
        Draw the points alone, in the colour of an alarm.
    faint : bool
        Draw the line thin, behind the others.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: int = 0
    markers: bool = False
    alarm: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """A titled chart.

    ``reference`` draws a dashed line at a value that means something, such as a ratio of 1;
    ``expected`` a band between two such values. ``legend`` names several series below the title.
    ``empty`` is what stands in the place of a chart that has no finite value.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    x_label: str = "iteration"
    reference: float | None = None
    from_zero: bool = False
    expected: tuple[float, float] | None = None
    legend: bool = True
    empty: str = "no values yet"

    @property
    def svg(self) -> Markup:
        """The drawing."""
        return draw_chart(self)


@dataclass(frozen=True)
class Scale:
    """An affine map from values to pixels, with ticks at round values."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 4) -> tuple[float, ...]:
    """Return about ``count`` multiples of 1, 2 or 5 times a power of ten that span [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def thin(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Choose at most ``most`` indices that keep the lowest and highest value of every stretch."""
    count = len(values)
    if count <= most:
        return list(range(count))
    chosen = {0, count - 1}
    bins = most // 2 - 1
    for i in range(bins):
        stretch = range(i * count // bins, (i + 1) * count // bins)
        finite = [k for k in stretch if math.isfinite(values[k])]
        if finite:
            chosen |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        else:
            chosen.add(stretch[0])
    return sorted(chosen)


def draw_chart(chart: Chart) -> Markup:
    """Draw ``chart``, or an empty drawing that says so when it has no finite value."""
    shown = [s for s in chart.series if any(map(math.isfinite, s.y))]
    label = escape(f"{chart.title}. {describe(chart)}")
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
        WIDTH, HEIGHT, label
    )
    if not shown:
        empty = Markup('<text class="empty" x="{}" y="{}">{}</text></svg>')
        return head + empty.format(WIDTH / 2, HEIGHT / 2, chart.empty)
    x_scale, y_scale = _scales(chart, shown)
    parts = [head, _expected(chart, y_scale), _axes(chart, x_scale, y_scale)]
    parts += [_band(s, x_scale, y_scale) for s in shown if s.low is not None]
    parts += [_line(s, x_scale, y_scale) for s in shown]
    return Markup("").join([*parts, Markup("</svg>")])


def describe(chart: Chart) -> str:
    """Say in words where each line begins and ends: the chart's text alternative."""
    sentences = []
    for series in chart.series:
        if series.alarm:
            sentences.append(f"{series.label}: {len(series.y)}.")
            continue
        finite = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
        if not finite:
            sentences.append(f"{series.label}: no values.")
            continue
        (x0, y0), (x1, y1) = finite[0], finite[-1]
        sentences.append(
            f"{series.label}: {number(y0)} at {chart.x_label} {x0:.0f}, {number(y1)} at {x1:.0f}."
        )
    return " ".join(sentences)


def _scales(chart: Chart, shown: Sequence[Series]) -> tuple[Scale, Scale]:
    values = [v for s in shown for part in (s.y, s.low or (), s.high or ()) for v in part]
    if chart.reference is not None:
        values.append(chart.reference)
    values += chart.expected or ()
    if chart.from_zero:
        values.append(0.0)
    y_ticks = nice_ticks(*_spread([v for v in values if math.isfinite(v)]))
    xs = [x for s in shown for x in s.x]
    x_low, x_high = _spread(xs)
    x_ticks = tuple(t for t in nice_ticks(x_low, x_high, 5) if x_low <= t <= x_high)
    if all(float(x).is_integer() for x in xs):  # counts, of which there is no half
        x_ticks = tuple(tick for tick in x_ticks if tick.is_integer())
    return (
        Scale(x_low, x_high, LEFT, WIDTH - RIGHT, x_ticks),
        Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP, y_ticks),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and greatest value, moved apart when they are (nearly) one."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low > 1e-9 * size:
        return low, high
    if size == 0:
        return 0.0, 1.0
    return low - 0.5 * size, high + 0.5 * size


def _axes(chart: Chart, x_scale: Scale, y_scale: Scale) -> Markup:
    line = Markup('<line class="{}" x1="{:.1f}" x2="{:.1f}" y1="{:.1f}" y2="{:.1f}"/>')
    text = Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>')
    parts = []
    for tick in y_scale.ticks:
        y = y_scale(tick)
        parts.append(line.format("grid", LEFT, WIDTH - RIGHT, y, y))
        parts.append(text.format("y-tick", LEFT - 6, y + 4, number(tick, 4)))
    for tick in x_scale.ticks:
        parts.append(text.format("x-tick", x_scale(tick), HEIGHT - BOTTOM + 15, number(tick, 4)))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(text.format("x-label", middle, HEIGHT - 5, chart.x_label))
    if chart.reference is not None:
        y = y_scale(chart.reference)
        parts.append(line.format("reference", LEFT, WIDTH - RIGHT, y, y))
    return Markup("").join(parts)


def _expected(chart: Chart, y_scale: Scale) -> Markup:
    if chart.expected is None:
        return Markup("")
    low, high = sorted(y_scale(value) for value in chart.expected)  # pixels fall as values rise
    return Markup('<rect class="expected" x="{}" y="{:.1f}" width="{}" height="{:.1f}"/>').format(
        LEFT, low, WIDTH - RIGHT - LEFT, high - low
    )


def _band(series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    if series.low is None or series.high is None:
        raise ValueError(f"series {series.label!r} needs both edges of its band")
    finite = [
        i
        for i, edges in enumerate(zip(series.low, series.high, strict=True))
        if all(map(math.isfinite, edges))
    ]
    keep = [finite[i] for i in thin([series.high[i] for i in finite])]
    upper = [f"{x_scale(series.x[i]):.1f},{y_scale(series.high[i]):.1f}" for i in keep]
    lower = [f"{x_scale(series.x[i]):.1f},{y_scale(series.low[i]):.1f}" for i in reversed(keep)]
    return Markup('<polygon class="band s{}" points="{}"/>').format(
        series.colour % COLOURS, " ".join(upper + lower)
    )


def _line(series: Series, x_scale: Scale, y_scale: Scale) -> Markup:
    colour = "alarm" if series.alarm else f"s{series.colour % COLOURS}"
    commands, dots = [], []
    pen_down = False
    for i in thin(series.y):
        if not math.isfinite(series.y[i]):
            pen_down = False
            continue
        x, y = x_scale(series.x[i]), y_scale(series.y[i])
        commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
        pen_down = True
        if series.markers or series.alarm or len(series.y) == 1:
            value = f"{series.label}, {series.x[i]:.0f}: {number(series.y[i])}"
            if series.low is not None and series.high is not None:
                value += f" ({number(series.low[i])} to {number(series.high[i])})"
            dot = Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3">')
            dots.append(
                dot.format(colour, x, y) + Markup("<title>{}</title></circle>").format(value)
            )
    if series.alarm:
        return Markup("").join(dots)
    kind = "line faint" if series.faint else "line"
    path = Markup('<path class="{} {}" d="{}"/>').format(kind, colour, "".join(commands))
    return path + Markup("").join(dots)
