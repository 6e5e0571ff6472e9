"""Writes what an evaluation found: JSON, a Markdown table and a page that opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from workflow_rl.evaluation.comparison import TOTAL, Comparison, ScoredCandidate
from workflow_rl.evaluation.statistics import Interval, PairedComparison
from workflow_rl.report.forest import Bar, draw_forest
from workflow_rl.report.pair_cells import PAIR_HEADS, pair_bar, pair_cells, with_interval
from workflow_rl.training.iteration_log import strict_json
from workflow_rl.whole_files import write_whole

JSON_FILE = "comparison.json"
MARKDOWN_FILE = "comparison.md"
HTML_FILE = "comparison.html"
EVALUATION_FILE = "evaluation.json"
DIVERSITY = "diversity"


@dataclass(frozen=True)
class View:
    """A titled table.

    ``note`` is a sentence below the title, ``chart`` the same drawn, ``repeated`` the columns that
    another table shows too: where there is no room they are left out.
    """

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]
    chart: Markup
    repeated: tuple[int, ...] = ()


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write ``comparison.json``, ``.md`` and ``.html`` into ``folder``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(comparison.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    texts = {
        JSON_FILE: figures + "\n",
        MARKDOWN_FILE: markdown(comparison),
        HTML_FILE: html(comparison),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def write_before_after(comparison: Comparison, run_dir: Path) -> Path:
    """Write ``evaluation.json`` of a run that was compared with its start: the bare figures."""
    index = 1 - comparison.baseline
    against = comparison.against[index]
    if against is None:
        raise ValueError("the baseline is not compared with itself")
    components = {name: summary(pair) for name, pair in against.measures.items() if name != TOTAL}
    content = {
        "iteration": comparison.candidates[index].description["iteration"],
        "prompts": comparison.settings["prompts_file"],
        "seeds_per_prompt": len(dict.fromkeys(comparison.seeds)),
        "reward": summary(against.total),
        "components": components,
    }
    path = run_dir / EVALUATION_FILE
    write_whole(path, json.dumps(strict_json(content), indent=2, allow_nan=False) + "\n")
    return path


def summary(pair: PairedComparison) -> dict[str, float]:
    """Return the figures of one reward."""
    return {
        "before": pair.before,
        "after": pair.after,
        "difference": pair.difference.mean,
        "low": pair.difference.low,
        "high": pair.difference.high,
        "win_rate": pair.win_rate,
        "failed_pairs": pair.difference.failed,
    }


def views(comparison: Comparison) -> list[View]:
    """Return the tables: the means, then each candidate against the baseline.

    What a candidate was trained on and what it was not are tables of their own.
    """
    result = [_means(comparison)]
    for index, against in enumerate(comparison.against):
        if against is None:
            continue
        for title, note, names in _sections(comparison, index):
            pairs = {name: against.measures[name] for name in names}
            result.append(_pairs_view(comparison, index, title, note, pairs))
        if comparison.several_seeds:
            note = "how far apart the samples of one prompt are, seed from seed; pairs are prompts"
            diversity = {DIVERSITY: against.diversity}
            result.append(_pairs_view(comparison, index, DIVERSITY, note, diversity))
    return result


def _sections(comparison: Comparison, index: int) -> list[tuple[str, str, list[str]]]:
    """Return title, note and measures of a candidate's tables."""
    by_kind: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for name in comparison.measures:
        by_kind[comparison.trained(index, name)].append(name)
    texts = {
        True: ("rewards trained on", "what it was trained to raise, and the parts of that"),
        False: ("rewards not trained on", "what the training did besides"),
        None: ("rewards", "it is not known what it was trained on"),
    }
    if comparison.candidates[index].trained_on == ():
        texts[False] = ("rewards", "it was not trained")
    return [(*texts[kind], names) for kind, names in by_kind.items() if names]


def _means(comparison: Comparison) -> View:
    """Return the means of every candidate: rows are measures, columns candidates."""
    rows = []
    for name in comparison.measures:
        marks = ["*" if comparison.trained(i, name) else "" for i in range(len(comparison.means))]
        cells = [
            with_interval(means[name]) + mark
            for means, mark in zip(comparison.means, marks, strict=True)
        ]
        rows.append([name, *cells])
    if comparison.several_seeds:
        rows.append([DIVERSITY, *(with_interval(interval) for interval in comparison.diversity)])
    note = f"with {_level(comparison)}; * was trained on this reward"
    heads = ["", *(candidate.label for candidate in comparison.candidates)]
    return View("means", note, heads, rows, Markup(""))


def _pairs_view(
    comparison: Comparison,
    index: int,
    title: str,
    note: str,
    pairs: dict[str, PairedComparison],
) -> View:
    base = comparison.candidates[comparison.baseline].label
    label = comparison.candidates[index].label
    heads = ["", base, label, *PAIR_HEADS]
    return View(
        f"{label} against {base}: {title}",
        f"{note}; with {_level(comparison)}s",
        heads,
        [[name, *pair_cells(pair)] for name, pair in pairs.items()],
        draw_forest([pair_bar(name, pair) for name, pair in pairs.items()]),
        repeated=(1, 2),
    )


def _level(comparison: Comparison) -> str:
    return f"{100 * comparison.settings['confidence']:g}% interval"


def headline(comparison: Comparison) -> str:
    """Say in one line what was compared."""
    prompts = len(dict.fromkeys(comparison.prompts))
    text = f"{len(comparison.prompts)} samples each: {prompts} prompts"
    seeds = len(dict.fromkeys(comparison.seeds))
    left_out = comparison.settings.get("left_out")
    text += f", {seeds} seeds" if seeds > 1 else ", 1 seed"
    text += f"; {left_out} left out that not all have" if left_out else ""
    shapes = [_shapes(candidate) for candidate in comparison.candidates]
    if len(set(shapes)) == 1:
        return text
    each = [f"{c.label} {shape}" for c, shape in zip(comparison.candidates, shapes, strict=True)]
    return f"{text}; sizes differ, which alone can move a reward: {', '.join(each)}"


def _shapes(candidate: ScoredCandidate) -> str:
    """Write the sizes of a candidate's samples, such as ``832×480 81 frames``."""
    shapes = candidate.description["shapes"]
    if len(shapes) > 1:
        return f"{len(shapes)} sizes"
    *frames, height, width = shapes[0]
    return f"{width}×{height}" + (f" {frames[0]} frames" if frames else "")


def failures(comparison: Comparison) -> list[str]:
    """Return a line per candidate and reason for what failed."""
    return [
        f"{entry['label']}: {count} failed: {reason}"
        for entry in comparison.to_json()["candidates"]
        for reason, count in entry["failures"].items()
    ]


def markdown(comparison: Comparison) -> str:
    """Return the tables as Markdown."""
    lines = [f"# {_title(comparison)}", "", headline(comparison), ""]
    for view in views(comparison):
        lines += [f"## {_cell(view.title)}", "", _cell(view.note), ""]
        lines.append(_markdown_row(view.heads))
        lines.append("|" + " --- |" * len(view.heads))
        lines += [_markdown_row(row) for row in view.rows]
        lines.append("")
    failed = failures(comparison)
    if failed:
        lines += ["## failures", "", *(f"- {_cell(line)}" for line in failed), ""]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(text: str) -> str:
    """Return a text that neither ends a cell nor marks anything up."""
    for mark in "\\|*_`<":
        text = text.replace(mark, f"\\{mark}")
    return text


def _title(comparison: Comparison) -> str:
    return " · ".join(candidate.label for candidate in comparison.candidates)


def html(comparison: Comparison) -> str:
    """Return the page. Labels and components are text: they are escaped; the page has no script."""
    environment = Environment(
        loader=PackageLoader("workflow_rl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    if environment.loader is None:
        raise RuntimeError("the environment has no loader")
    style = "".join(
        environment.loader.get_source(environment, name)[0]
        for name in ("report.css", "pairs.css", "comparison.css")
    )
    first, *others = views(comparison)
    return environment.get_template("comparison.html.j2").render(
        title=_title(comparison),
        headline=headline(comparison),
        comparison=comparison,
        means=first,
        views=others,
        failures=failures(comparison),
        trained=comparison.trained,
        mean_charts=_mean_charts(comparison),
        style=Markup(style),
    )


def _mean_charts(comparison: Comparison) -> dict[str, Markup]:
    """Return, per measure, the candidates' means with their intervals."""
    charts = {}
    labels = [candidate.label for candidate in comparison.candidates]
    for name in comparison.measures:
        intervals = [means[name] for means in comparison.means]
        charts[name] = _means_chart(labels, intervals)
    if comparison.several_seeds:
        charts[DIVERSITY] = _means_chart(labels, comparison.diversity)
    return charts


def _means_chart(labels: Sequence[str], intervals: Sequence[Interval]) -> Markup:
    bars = [
        Bar(label, interval.mean, interval.low, interval.high)
        for label, interval in zip(labels, intervals, strict=True)
    ]
    return draw_forest(bars, reference=None)
