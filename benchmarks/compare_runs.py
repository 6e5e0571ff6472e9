"""Tabulates finished runs from their ``evaluations.jsonl``: one line a run, Markdown.

    python -m benchmarks.compare_runs runs/seed0 runs/seed1 runs/shared0

Columns: mean held-out reward before and after; their ratio; the paired difference with its 95%
interval (bootstrap over prompts); the last evaluation over the best; and how far the shape's start
moved along the direction of travel, in frame widths (negative: placed back), with its interval.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workflow_rl.evaluation.statistics import PairedComparison, paired_bootstrap
from workflow_rl.training.iteration_log import IterationLog

START = "directed_motion/start"
SAMPLES = 10_000


def numbers(values: list[float | None]) -> list[float]:
    """Return values with NaN for what failed."""
    return [float("nan") if value is None else value for value in values]


def compare(first: dict[str, Any], last: dict[str, Any], name: str | None) -> PairedComparison:
    """Compare the scores, or the component ``name``, of two evaluations of the same samples."""
    before, after = (
        numbers(line["scores"] if name is None else line["components"][name])
        for line in (first, last)
    )
    return paired_bootstrap(before, after, clusters=first["prompts"], samples=SAMPLES)


def mean(line: dict[str, Any]) -> float:
    """Return the mean score of an evaluation."""
    scores = [value for value in line["scores"] if value is not None]
    return sum(scores) / len(scores)


def row(run: Path) -> str:
    """Return a run's line of the table."""
    lines = IterationLog(run / "evaluations.jsonl").read()
    first, last = lines[0], lines[-1]
    reward, start = compare(first, last, None), compare(first, last, START)
    best = max(mean(line) for line in lines)
    difference, shift = reward.difference, start.difference
    return (
        f"| {run.name} | {last['iteration']} | {reward.before:.3f} | {reward.after:.3f} "
        f"| {reward.after / reward.before:.2f} "
        f"| {difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] "
        f"| {mean(last) / best:.2f} "
        f"| {shift.mean:+.3f} [{shift.low:+.3f}, {shift.high:+.3f}] |"
    )


def main() -> None:
    """Print the table of the runs named on the command line."""
    print(
        "| run | iterations | before | after | ratio | difference | last / best | start moved |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    for argument in sys.argv[1:]:
        print(row(Path(argument)))


if __name__ == "__main__":
    main()
