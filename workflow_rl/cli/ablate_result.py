"""Shows what came of an ablation, in tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workflow_rl.ablation import tables
from workflow_rl.ablation.results import AblationResult
from workflow_rl.ablation.variants import CONSTANT, SHARED
from workflow_rl.cli.ablate_view import print_line
from workflow_rl.report.numbers import number, percent


def show_result(
    result: AblationResult, paths: Sequence[Path], console: Console | None = None
) -> None:
    """Print the main figures, what was checked, and where all of it is written."""
    console = console or Console()
    if result.runs:
        for table in (variant_table(result), run_table(result)):
            console.print()
            console.print(table)
        console.print()
    for fact in tables.facts(result):
        print_line(console, fact)
    print_line(console, "Written: " + ", ".join(str(path) for path in paths))


def variant_table(result: AblationResult) -> Table:
    """Two lines per variant: figures, and below them their interval or range."""
    level = percent(result.confidence)
    table = _table(
        "Held-out reward of the variants",
        "variant\n(seeds)",
        "after\n(by seed)",
        f"change\n[{level}]",
        f"against {result.reference}\n[{level}]",
        "seeds\nahead",
    )
    for variant in result.variants:
        seeds = ", ".join(str(run.seed) for run in variant.runs)
        constant = variant.name == CONSTANT
        _add_row(
            table,
            f"{variant.name}\n({seeds})",
            tables.with_range(variant, "\n"),
            tables.moved(variant, "\n") if constant else tables.interval(variant.change, "\n"),
            tables.interval(variant.against, "\n"),
            tables.ahead(variant),
        )
    return table


def run_table(result: AblationResult) -> Table:
    """One line per run whose reward can be compared."""
    best = tables.if_shared(result, f"{result.output_name} to\n{SHARED}'s best")
    change = f"change [{percent(result.confidence)}]"
    table = _table("Held-out reward of the runs", "run", "before", "after", change, *best)
    for run in result.runs:
        if run.variant != CONSTANT:
            _add_row(
                table,
                run.name,
                number(run.change.before),
                number(run.change.after),
                tables.interval(run.change),
                *tables.if_shared(result, tables.reached(run, result)),
            )
    return table


def _table(title: str, *heads: str) -> Table:
    """Return a table in which figures stay whole; where there is no room, names are folded."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column(escape(heads[0]), overflow="fold")
    for head in heads[1:]:
        table.add_column(escape(head), justify="right", no_wrap=True)
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(escape, cells))
