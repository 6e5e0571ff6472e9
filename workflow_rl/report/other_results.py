"""What ``evaluate`` and ``ablate`` wrote of a run: a short table of each, and where its page is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workflow_rl.evaluation.output_folder import EVALUATIONS, MARK
from workflow_rl.evaluation.statistics import Interval, PairedComparison
from workflow_rl.report.numbers import number, percent, signed
from workflow_rl.report.pair_cells import MEASURE_HEADS, pair_cells, with_ends

ABLATION = "ablation.json"
MOST_ROWS = 8
View = Callable[[Mapping[str, Any]], tuple[str, list[str], list[list[str]]]]
"""Returns a note, the heads and the rows of what a file holds."""


@dataclass(frozen=True)
class OtherResult:
    """One result; ``link`` is its page relative to the run, None where there is none.

    ``fault`` says why it is not shown, empty where it is.
    """

    title: str
    note: str
    link: str | None
    heads: list[str]
    rows: list[list[str]]
    fault: str = ""


def other_results(run_dir: Path) -> list[OtherResult]:
    """Return the evaluations in the run's directory, and the ablations that it is part of or has.

    An ablation is looked for where ``ablate`` puts it: two folders above one of its runs, and
    beside the run of the same configuration, as ``NAME-ablation``. A result that cannot be read is
    told as such.
    """
    run_dir = run_dir.resolve()
    # A name with a dot before it is of an evaluation that is still being written.
    folders = [path.parent for path in sorted((run_dir / EVALUATIONS).glob(f"[!.]*/{MARK}"))]
    found = [_read(folder / MARK, run_dir, _evaluation) for folder in folders]
    places = [run_dir.parent.parent, run_dir.with_name(f"{run_dir.name}-ablation")]
    found += [
        _read(place / ABLATION, run_dir, _ablation)
        for place in places
        if (place / ABLATION).is_file()
    ]
    return found


def _read(path: Path, run_dir: Path, view: View) -> OtherResult:
    page = path.with_suffix(".html")
    link = quote(Path(os.path.relpath(page, run_dir)).as_posix()) if page.is_file() else None
    kind = "Evaluation" if path.name == MARK else "Ablation"
    title = f"{kind} {path.parent.name}"
    try:
        note, heads, rows = view(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{path.name} cannot be read ({type(error).__name__}): run the command again"
        return OtherResult(title, "", link, [], [], reason)
    hidden = len(rows) - MOST_ROWS
    note += f" {hidden} more rows are on its page." if hidden > 0 else ""
    return OtherResult(title, note, link, heads, rows[:MOST_ROWS])


def _evaluation(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    base = content["baseline"]
    prompts = len(set(content["prompts"]))
    rows = []
    for candidate in content["candidates"]:
        if candidate["label"] == base:
            continue
        measures = {n: r["against_baseline"] for n, r in candidate["rewards"].items()}
        measures["diversity"] = candidate["diversity"]["against_baseline"]
        for name, pair in measures.items():
            comparison = _pair(pair, "baseline", "candidate")
            if comparison.difference.count:
                rows.append([f"{candidate['label']}: {name}", *pair_cells(comparison)])
    note = (
        f"Against {base}, on {len(content['prompts'])} samples of {prompts} prompts, with "
        f"{percent(content['confidence'])} intervals."
    )
    return note, list(MEASURE_HEADS), rows


def _ablation(content: Mapping[str, Any]) -> tuple[str, list[str], list[list[str]]]:
    reference = content["reference"]
    rows = []
    for name, variant in content["variants"].items():
        seeds = ", ".join(str(seed) for seed in variant["seeds"])
        if variant["change"] is None:
            rows.append([name, seeds, *[number(math.nan)] * 4])
            continue
        change, against = _pair(variant["change"]), variant["against_reference"]
        other = with_ends(_pair(against).difference, signed) if against else number(math.nan)
        means = [number(change.before), number(change.after)]
        rows.append([name, seeds, *means, with_ends(change.difference, signed), other])
    note = f"Held-out reward, mean over the seeds, {percent(content['confidence'])} intervals."
    heads = ["variant", "seeds", "before", "after", "change", f"against {reference}"]
    return note, heads, rows


def _pair(
    content: Mapping[str, Any], before: str = "before", after: str = "after"
) -> PairedComparison:
    return PairedComparison(
        _interval(content["difference"]),
        _known(content[before]),
        _known(content[after]),
        _interval(content["wins"]),
        _known(content["effect"]),
    )


def _interval(content: Mapping[str, Any]) -> Interval:
    mean, low, high = (_known(content[key]) for key in ("mean", "low", "high"))
    return Interval(mean, low, high, content["count"], content["failed"], content["clusters"])


def _known(value: float | None) -> float:
    return math.nan if value is None else float(value)
