"""How many videos a run needs to reach another's best level.

    python -m benchmarks.videos_to_level runs/seed0 runs/shared0 runs/seed1 runs/shared1

Takes pairs of runs that make equally many videos per iteration. For each pair: the best held-out
reward of the second, the first evaluation at which it is reached by the second and by the first,
and the ratio of the two. As fine as `evaluation.every`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workflow_rl.ablation.levels import first_reached, mean_score
from workflow_rl.report.run_data import read_run


def levels(run: Path) -> dict[int, float]:
    """Return the mean held-out reward by iteration."""
    return {e.iteration: mean_score(e.scores) for e in read_run(run).evaluations}


def row(run: Path, other: Path) -> str:
    """Return the table's line of a pair."""
    own, others = levels(run), levels(other)
    best = max(others.values())
    at, other_at = first_reached(best, own), first_reached(best, others)
    assert other_at is not None
    ratio = "never" if at is None else f"{at / other_at:.2f}"
    return f"| {run.name} / {other.name} | {best:.3f} | {other_at} | {at or '-'} | {ratio} |"


def main() -> None:
    """Print the table of the pairs of runs named on the command line."""
    if len(sys.argv) < 3 or len(sys.argv) % 2 == 0:
        sys.exit("usage: python -m benchmarks.videos_to_level RUN OTHER [RUN OTHER ...]")
    print(
        "| pair | best of the second | reached by the second at | by the first at | ratio |\n"
        "| --- | --- | --- | --- | --- |"
    )
    runs = [Path(argument) for argument in sys.argv[1:]]
    for run, other in zip(runs[::2], runs[1::2], strict=True):
        print(row(run, other))


if __name__ == "__main__":
    main()
