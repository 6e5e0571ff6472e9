"""The tables of an evaluation on a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from workflow_rl.report.comparison import View

GAP = 2
"""Columns of the terminal between two of a table."""


def show_view(console: Console, view: View) -> None:
    """Print a table, or as many as it takes for every figure to stay on one line."""
    console.print(view.title, style="bold")
    console.print(f"({view.note})")
    rows = [
        [name, *row[1:]]
        for name, row in zip(short_names([row[0] for row in view.rows]), view.rows, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(view.heads, *rows, strict=True)]
    for columns in fitting(widths, console.width, view.repeated):
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0)
        )
        for column in columns:
            table.add_column(
                view.heads[column], overflow="fold", justify="right" if column else "left"
            )
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        console.print(table)
        console.print()


def fitting(widths: Sequence[int], room: int, repeated: Sequence[int]) -> list[list[int]]:
    """Return the columns of each table that is needed.

    Parameters
    ----------
    widths
        Of the columns; the first holds the names of the rows, and every table begins with it.
    room
        Width of the terminal.
    repeated
        Columns to leave out first. Without any, a table too wide goes on below.
    """

    def needed(columns: Sequence[int]) -> int:
        return sum(widths[column] + GAP for column in columns) - GAP

    columns = list(range(len(widths)))
    if needed(columns) <= room:
        return [columns]
    if repeated:
        return [[column for column in columns if column not in repeated]]
    tables: list[list[int]] = []
    for column in columns[1:]:
        if tables and needed([*tables[-1], column]) <= room:
            tables[-1].append(column)
        else:
            tables.append([0, column])
    return tables


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of measures, a part's without its reward's where that stands above it.

    >>> short_names(["motion", "motion/travel", "brightness/mean"])
    ['motion', '  /travel', 'brightness/mean']
    """
    shown = []
    for name in names:
        above = [other for other in names if name.startswith(f"{other}/")]
        shown.append(f"  {name.removeprefix(max(above, key=len))}" if above else name)
    return shown
