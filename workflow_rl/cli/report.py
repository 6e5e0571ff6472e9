"""``workflow-rl report``."""

from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.config.run_dir import load_run_config


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)
    ],
) -> None:
    """Write report.html of a run: one file that opens offline.

    Curves with intervals, every reward apart, guards and failures with their causes, videos before
    and after side by side, a gallery of rollouts with rewards and advantages, the configuration.

    **Example**

    ```
    workflow-rl report runs/quickstart
    ```
    """
    load_run_config(run_dir)
    from workflow_rl.report.build import build_report

    typer.echo(f"Report: {build_report(run_dir)}")
