"""``workflow-rl evaluate``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from workflow_rl.cli.preflight import check_frames, check_rewards_import, check_stages
from workflow_rl.config import check_first_frames
from workflow_rl.evaluation.candidates import parse_candidates
from workflow_rl.evaluation.job import EvaluationJob, make_job
from workflow_rl.evaluation.output_folder import check_output, default_output, whole_folder

if TYPE_CHECKING:
    from workflow_rl.evaluation.comparison import Comparison
    from workflow_rl.runtime.driver import ProgressEvent

GRID_FOLDER = "grid"
WIDTH = 120
"""Columns of the tables where the output is no terminal."""

ThingsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Run directories, RUN@ITERATION, RUN@ema, RUN@0 (the start), folders of videos.",
        show_default=False,
    ),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help="Prompts; default: the first run's data.eval_prompts."),
]
RewardsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rewards",
        help="Names, a,b or repeated, or a YAML with `rewards`; default: the runs' own.",
        show_default=False,
    ),
]
SeedsOption = Annotated[
    int | None,
    typer.Option("--seeds-per-prompt", min=1, help="Samples per prompt; default: the run's."),
]
BaselineOption = Annotated[
    str | None,
    typer.Option("--baseline", help="What the others are compared with; default: the first."),
]
CommonOption = Annotated[
    bool,
    typer.Option("--common", help="Leave out prompts and seeds that a folder lacks."),
]
GridOption = Annotated[
    bool, typer.Option("--grid", help="Write side-by-side videos, one per prompt.")
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Folder; default: evaluations/NAME in the first run, or here."
    ),
]


def evaluate(
    things: ThingsArgument,
    prompts: PromptsOption = None,
    rewards: RewardsOption = None,
    seeds_per_prompt: SeedsOption = None,
    baseline: BaselineOption = None,
    common: CommonOption = False,
    grid: GridOption = False,
    output: OutputOption = None,
) -> None:
    """Compare checkpoints and folders of videos on the same prompts and seeds.

    One run alone is compared with its own start, before and after training. Samples are made
    without noise in the steps. For each reward: means, the paired difference with its bootstrap
    interval, the share of pairs that score higher, the effect size; rewards that a run was trained
    on apart from those that it was not; and the diversity of samples of one prompt. The folder gets
    comparison.json, .md and .html; the same command gives the same figures. docs/evaluation.md says
    what each of them means.

    **Examples**

    ```
    workflow-rl evaluate runs/quickstart
    workflow-rl evaluate runs/quickstart@140 runs/quickstart runs/quickstart@student
    workflow-rl evaluate runs/both runs/i2v_only --rewards directed_motion,sharpness --grid
    workflow-rl evaluate runs/a made_elsewhere/ --prompts more_prompts.txt --seeds-per-prompt 8
    ```
    """
    candidates, base = parse_candidates(things, baseline)
    job = make_job(
        candidates,
        base,
        prompts=prompts,
        rewards=rewards or (),
        seeds_per_prompt=seeds_per_prompt,
        common=common,
    )
    folder = output or default_output(candidates)
    check_output(folder)
    for run in job.runs:
        check_stages(run.config.stages)
    _check_first_frames(job)
    for run in job.runs:
        if not rewards:
            check_rewards_import(run.config)
    from workflow_rl.report.comparison import failures, write_before_after, write_comparison
    from workflow_rl.serving.evaluate import evaluate as compare

    with _showing() as listener, whole_folder(folder) as building:
        grid_folder = building / GRID_FOLDER if grid else None
        comparison = compare(job, grid=grid_folder, listener=listener)
        written = write_comparison(comparison, building)
        if len(things) == 1 and not rewards:
            write_before_after(comparison, job.runs[0].path)
    show_comparison(comparison)
    for line in failures(comparison):
        typer.echo(line, err=True)
    typer.echo("\n".join(str(folder / path.name) for path in written))
    if grid:
        typer.echo(folder / GRID_FOLDER)


def _check_first_frames(job: EvaluationJob) -> None:
    """Check that the prompts suit every run, as for training."""
    records = list({id(row.record): row.record for row in job.rows}.values())
    frames = [record.first_frame for record in records if record.first_frame is not None]
    for run in job.runs:
        check_first_frames(job.prompts_file, records, run.config.stages)
        check_frames(run.config.stages, frames)


def show_comparison(comparison: "Comparison") -> None:
    """Print the tables."""
    from workflow_rl.cli.comparison_tables import show_view
    from workflow_rl.report.comparison import headline, views

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    for view in views(comparison):
        show_view(console, view)
    typer.echo(headline(comparison))


class EvaluationProgress:
    """Shows on a terminal what is being sampled, elsewhere a line per candidate."""

    def __init__(self, console: Console, progress: Progress) -> None:
        self._console = console
        self._progress = progress
        self._task: TaskID | None = None
        self._label = ""

    def message(self, text: str) -> None:
        """Show one line."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, label: str, samples: int) -> None:
        """Show whose turn it is."""
        self._label = label
        if not self._console.is_terminal:
            self.message(f"evaluating {label}: {samples} samples")
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(label, total=samples)

    def step(self, stage: str, event: "ProgressEvent") -> None:
        """Show the step that a stage is at."""
        if self._task is not None:
            at = f"{self._label}  {stage}: step {event.step}/{event.num_steps}"
            self._progress.update(self._task, description=at)

    def scored(self, samples: int) -> None:
        """Move on."""
        if self._task is not None:
            self._progress.update(self._task, advance=samples, description=self._label)


@contextmanager
def _showing() -> Iterator[EvaluationProgress]:
    """Show progress on stderr, so that stdout holds the tables alone."""
    console = Console(stderr=True)
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with progress:
        yield EvaluationProgress(console, progress)
