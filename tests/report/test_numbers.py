"""Numbers as the report writes them."""

import math

import pytest

from workflow_rl.report.numbers import credit, duration, number, percent, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (-1.5, "−1.50"),
        (1234.5, "1234"),
        (1.2e-5, "1.2e−5"),
        (2.5e7, "2.5e7"),
        (math.nan, "–"),
        (math.inf, "–"),
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


def test_ticks_have_no_zeros_at_the_end() -> None:
    assert [number(v, 4) for v in (0.2, 5.0, 5e-5, 100.0)] == ["0.2", "5", "5e−5", "100"]


def test_signs_and_units() -> None:
    assert [signed(v) for v in (0.5, -0.5, 0.0)] == ["+0.500", "−0.500", "0"]
    assert [credit(v) for v in (0.004, -1.234, math.nan)] == ["+0.00", "−1.23", "–"]
    assert [percent(v) for v in (0.884, math.nan)] == ["88 %", "–"]
    assert [duration(v) for v in (41.2, 330.0, 11100.0)] == ["41 s", "5 min 30 s", "3 h 05 min"]
