"""Laws of the charts: every finite value lies inside, gaps stay gaps, text is escaped."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workflow_rl.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    Series,
    nice_ticks,
    thin,
)

values = st.floats(min_value=-1e6, max_value=1e6).map(lambda v: round(v, 6))


def points(svg: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", svg)]


@given(st.lists(values | st.just(math.nan), min_size=1, max_size=20))
def test_a_chart_is_xml_with_every_finite_value_inside(y: list[float]) -> None:
    svg = Chart("Reward", [Series("reward", range(len(y)), y)]).svg
    ElementTree.fromstring(svg)
    drawn = points(svg)
    assert len(drawn) == sum(map(math.isfinite, y))
    assert all(LEFT <= x <= WIDTH - RIGHT for x, _ in drawn)
    assert all(TOP - 0.1 <= v <= HEIGHT - BOTTOM + 0.1 for _, v in drawn)


def test_higher_is_further_up_and_later_further_right() -> None:
    (x0, y0), (x1, y1) = points(Chart("t", [Series("s", [0, 1], [0.2, 0.9])]).svg)
    assert x1 > x0
    assert y1 < y0


def test_a_gap_is_not_bridged() -> None:
    svg = Chart("t", [Series("s", range(4), [1.0, math.nan, 2.0, 3.0])]).svg
    assert len(re.findall(r"M[\d.]+ [\d.]+", svg)) == 2


def test_bands_need_finite_edges_and_may_leave_out_points() -> None:
    low, high = [0.0, math.nan, 1.0], [1.0, math.nan, 2.0]
    svg = Chart("t", [Series("s", range(3), [0.5, 1.0, 1.5], low=low, high=high)]).svg
    band = re.search(r'class="band s0" points="([^"]*)"', svg)
    assert band is not None
    assert len(band[1].split()) == 4


def test_without_values_the_chart_says_so() -> None:
    assert "no values yet" in Chart("t", [Series("s", [], [])]).svg
    assert "no values yet" in Chart("t", [Series("s", [0], [math.nan])]).svg


def test_a_count_has_no_half() -> None:
    svg = Chart("Reward", [Series("reward", [1, 2], [0.0, 1.0])]).svg
    assert re.findall(r'class="x-tick"[^>]*>([^<]*)<', svg) == ["1", "2"]
    svg = Chart("Reward", [Series("reward", [0.5, 2], [0.0, 1.0])]).svg
    assert "1.5" in re.findall(r'class="x-tick"[^>]*>([^<]*)<', svg)


def test_labels_are_escaped() -> None:
    svg = Chart('<b>"', [Series("<i>", [0, 1], [0.0, 1.0], markers=True)]).svg
    assert "<b>" not in svg
    assert "<i>" not in svg
    ElementTree.fromstring(svg)


def test_the_text_alternative_names_both_ends() -> None:
    label = ElementTree.fromstring(Chart("KL", [Series("t2i", [0, 7], [0.5, 2.0])]).svg).attrib
    assert label["aria-label"] == "KL. t2i: 0.500 at iteration 0, 2.00 at 7."


@given(values, st.floats(min_value=1e-6, max_value=1e6))
def test_ticks_span_the_values_and_are_few(low: float, width: float) -> None:
    ticks = nice_ticks(low, low + width)
    slack = max(1e-6 * (ticks[1] - ticks[0]), 1e-12 * abs(low))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + width - slack
    assert 2 <= len(ticks) <= 7


@pytest.mark.parametrize("count", [3, 500, 501, 20_000])
def test_thinning_keeps_the_extremes(count: int) -> None:
    y = [math.sin(0.1 * i) for i in range(count)]
    y[count // 2], y[count // 3] = 99.0, -99.0
    kept = thin(y)
    assert kept == sorted(set(kept))
    assert len(kept) <= 500
    assert {0, count - 1, count // 2, count // 3} <= set(kept)
