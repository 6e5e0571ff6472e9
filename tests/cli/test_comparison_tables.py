"""An evaluation's tables in the width of a terminal."""

from io import StringIO

import pytest
from markupsafe import Markup
from rich.console import Console

from workflow_rl.cli.comparison_tables import fitting, short_names, show_view
from workflow_rl.report.comparison import View

PAIRS = View(
    title="a@150 against a@0: rewards trained on",
    note="what it was trained to raise",
    heads=["", "quickstart@0", "quickstart@150", "difference", "higher", "effect", "pairs"],
    rows=[
        ["directed_motion", "0.1", "0.355", "+0.203 [+0.147, +0.257]", "96 % [90, 100]", "+2", "4"],
        ["directed_motion/fidelity", "0.954", "0.843", "−0.110", "9 % [2, 19]", "−1.7", "47 of 48"],
    ],
    chart=Markup(""),
    repeated=(1, 2),
)  # fmt: skip


def _printed(view: View, width: int) -> list[str]:
    output = StringIO()
    show_view(Console(file=output, width=width, markup=False), view)
    return output.getvalue().splitlines()


@pytest.mark.parametrize(("width", "means"), [(80, False), (120, True)])
def test_every_figure_stays_on_one_line(width: int, means: bool) -> None:
    lines = _printed(PAIRS, width)
    assert max(map(len, lines)) <= width
    (whole,) = (line for line in lines if line.startswith("directed_motion"))
    assert whole.split()[-4:] == ["[90,", "100]", "+2", "4"]
    assert ("0.355" in whole) is means, "the means table tells it"
    assert any(line.startswith("  /fidelity") for line in lines)


def test_what_no_other_table_shows_goes_on_below() -> None:
    widths = [17, 25, 25, 25, 25]
    assert fitting(widths, 200, ()) == [[0, 1, 2, 3, 4]]
    assert fitting(widths, 80, ()) == [[0, 1, 2], [0, 3, 4]]
    assert fitting(widths, 10, ()) == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert fitting(widths, 80, (1, 2)) == [[0, 3, 4]]


def test_a_part_is_shortened_only_where_its_reward_has_a_row() -> None:
    names = ["motion", "motion/travel", "motions/x", "judge/clarity"]
    assert short_names(names) == ["motion", "  /travel", "motions/x", "judge/clarity"]
