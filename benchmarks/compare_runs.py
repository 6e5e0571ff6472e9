"""Tabulates finished runs from their evaluations: one line a run, Markdown.

    python -m benchmarks.compare_runs runs/seed0 runs/seed1 runs/shared0

Columns: mean held-out reward before and after; their ratio; the paired difference with its 95%
interval (bootstrap over prompts); the last evaluation over the best; and how far the shape's start
moved along the direction of travel, in frame widths (negative: placed back), with its interval.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workflow_rl.ablation.levels import mean_score
from workflow_rl.ablation.run_results import compare
from workflow_rl.report.run_data import read_run

START = "directed_motion/start"


def row(run: Path) -> str:
    """Return a run's line of the table."""
    evaluations = read_run(run).evaluations
    first, last = evaluations[0], evaluations[-1]
    reward, start = compare(first, last), compare(first, last, START)
    best = max(mean_score(evaluation.scores) for evaluation in evaluations)
    difference, shift = reward.difference, start.difference
    return (
        f"| {run.name} | {last.iteration} | {reward.before:.3f} | {reward.after:.3f} "
        f"| {reward.after / reward.before:.2f} "
        f"| {difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}] "
        f"| {mean_score(last.scores) / best:.2f} "
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
