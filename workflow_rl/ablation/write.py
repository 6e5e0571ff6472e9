"""Writes an ablation's figures: JSON, Markdown, one page that opens offline, and its plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, PrefixLoader, StrictUndefined
from markupsafe import Markup

from workflow_rl.ablation import tables
from workflow_rl.ablation.results import AblationResult
from workflow_rl.ablation.variants import CONSTANT
from workflow_rl.evaluation.statistics import PairedComparison
from workflow_rl.report.charts import HEIGHT, LEFT, WIDTH, Chart, Series
from workflow_rl.report.numbers import credit, number
from workflow_rl.training.iteration_log import strict_json
from workflow_rl.whole_files import write_whole

COLOURS = ("#1f5fbf", "#b8500f", "#14743c", "#8b3fa8", "#8a6a00", "#0f7482")
"""Of the stand-alone plot; readable on white and on black."""
LEGEND_ROW = 16
TITLE_ROW = 16
LETTER = 6
"""Width of a letter, about."""


def write_all(result: AblationResult, out: Path) -> list[Path]:
    """Write ``ablation.json``, ``.md``, ``.html`` and ``.svg``, each whole or not at all."""
    chart = tables.reward_chart(result)
    texts = {
        "json": json.dumps(strict_json(as_dict(result)), indent=1) + "\n",
        "md": markdown(result, out.name),
        "html": page(result, chart, out.name),
        "svg": stand_alone(chart),
    }
    paths = []
    for ending, text in texts.items():
        path = out / f"ablation.{ending}"
        write_whole(path, text)
        paths.append(path)
    return paths


def as_dict(result: AblationResult) -> dict[str, Any]:
    """Return all figures as JSON types; what is not known is null."""
    return {
        "reference": result.reference,
        "output": result.output_name,
        "confidence": result.confidence,
        "equal": result.equal,
        "constant_moved": {name: asdict(check) for name, check in result.checks.items()},
        "left_out": dict(result.left_out),
        "unfinished": [asdict(run) for run in result.unfinished],
        "failures": dict(result.failures),
        "variants": {
            v.name: {
                "what": v.what,
                "seeds": [run.seed for run in v.runs],
                "change": _comparison(v.change),
                "against_reference": _comparison(v.against),
                "seeds_ahead": v.ahead,
                "seeds_compared": v.compared,
                "measures": {name: _comparison(m) for name, m in v.measures.items()},
            }
            for v in result.variants
        },
        "runs": [
            {
                "variant": run.variant,
                "seed": run.seed,
                "videos": run.videos,
                "denoising_steps": run.denoising_steps,
                "levels": [list(pair) for pair in run.levels.items()],
                "change": None if run.variant == CONSTANT else _comparison(run.change),
                "variance_share": dict(run.variance),
                "stopped_by": list(run.stopped_by),
                "videos_to_shared_best": result.to_shared.get((run.variant, run.seed)),
            }
            for run in result.runs
        ],
    }


def _comparison(comparison: PairedComparison | None) -> dict[str, Any] | None:
    return None if comparison is None else asdict(comparison)


def markdown(result: AblationResult, name: str) -> str:
    """Return the tables and what was checked as a Markdown page."""
    lines = [f"# Ablation: {name}", ""]
    lines += [f"- **{v.name}**: {v.what}" for v in result.variants]
    lines += ["", *tables.lines_of(tables.main_table(result)), ""]
    lines += [f"- {fact}" for fact in tables.facts(result)]
    lines += ["", "![Held-out reward over what was made for training](ablation.svg)", ""]
    for table in (tables.run_table(result), tables.measure_table(result)):
        if table.rows:
            lines += [f"## {table.title}", "", *tables.lines_of(table), ""]
    lines += ["## How to read it", "", *(f"- {text}" for text in tables.explanations(result))]
    return "\n".join(lines) + "\n"


def page(result: AblationResult, chart: Chart, name: str) -> str:
    """Return the page; it has no script and no external resource."""
    report = PackageLoader("workflow_rl.report")
    environment = Environment(
        loader=PrefixLoader({"ablation": PackageLoader("workflow_rl.ablation"), "report": report}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "credit": credit}  # the report's macros use them
    style = "".join(report.get_source(environment, f"{n}.css")[0] for n in ("report", "pairs"))
    shown = [tables.main_table(result), tables.run_table(result), tables.measure_table(result)]
    return environment.get_template("ablation/ablation.html.j2").render(
        name=name,
        result=result,
        chart=chart,
        tables=[table for table in shown if table.rows],
        facts=tables.facts(result),
        explanations=tables.explanations(result),
        style=Markup(style),
    )


def stand_alone(chart: Chart) -> str:
    """Return a chart as an SVG file of its own, with its title above and its legend below."""
    colours = "".join(f".s{i} {{ --c: {colour}; }} " for i, colour in enumerate(COLOURS))
    style = (
        f"{colours} text {{ font: 11px sans-serif; fill: #777; }} .y-tick {{ text-anchor: end; }} "
        ".x-tick, .x-label, .empty { text-anchor: middle; } .grid { stroke: #8884; } "
        ".line { fill: none; stroke: var(--c); stroke-width: 1.7; } "
        ".band { fill: var(--c); opacity: 0.15; } .dot, .name { fill: var(--c); }"
    )
    legend, rows = _legend(chart.series)
    height = TITLE_ROW + HEIGHT + rows * LEGEND_ROW + LEGEND_ROW // 2
    view = f"0 {-TITLE_ROW} {WIDTH} {height}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" width="800">'
    title = Markup('<text x="4" y="0">{}. {}</text>').format(chart.title, chart.note)
    placed = Markup('<svg width="{}" height="{}" ').format(WIDTH, HEIGHT)
    inner = chart.svg.replace("<svg ", placed, 1)
    return f"{head}<style>{style}</style>{title}{inner}{legend}</svg>\n"


def _legend(series: Sequence[Series]) -> tuple[str, int]:
    """Return the names of the series in their colours, below the chart, and the rows they take."""
    longest = max((len(s.label) for s in series), default=1)
    columns = max(1, min(len(series), (WIDTH - LEFT) // (LETTER * (longest + 2))))
    step = (WIDTH - LEFT) / columns
    name = Markup('<text class="name s{}" x="{:.0f}" y="{}">{}</text>')
    names = [
        name.format(
            s.colour % len(COLOURS),
            LEFT + i % columns * step,
            HEIGHT + (1 + i // columns) * LEGEND_ROW - 2,
            s.label,
        )
        for i, s in enumerate(series)
    ]
    return "".join(names), -(-len(series) // columns)
