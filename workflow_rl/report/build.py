"""Builds ``report.html`` of a run: one file, no external resource, opens offline."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from workflow_rl.report.embed import MEGABYTE, Embedder
from workflow_rl.report.intervals import Statistics
from workflow_rl.report.numbers import credit, number, percent, signed
from workflow_rl.report.other_results import OtherResult, other_results
from workflow_rl.report.pair_cells import MEASURE_HEADS
from workflow_rl.report.run_data import RunData, read_run
from workflow_rl.report.views import (
    effects,
    evaluation,
    failures,
    guards,
    rewards,
    summary,
    training,
)
from workflow_rl.report.views.gallery import gallery
from workflow_rl.whole_files import write_whole

REPORT_FILE = "report.html"
MEDIA_BUDGET = 24 * MEGABYTE
"""Bytes of images and videos put into the page; what is beyond is linked from beside it."""


def build_report(run_dir: Path, *, media_budget: int = MEDIA_BUDGET) -> Path:
    """Write the report of a run into its directory.

    Parameters
    ----------
    run_dir : Path
        Run directory; the run may still be going, or be without an evaluation yet.
    media_budget : int
        Bytes of media to put into the page; what is beyond is linked relative to it.

    Returns
    -------
    Path
        ``run_dir / "report.html"``, written whole or not at all.

    Raises
    ------
    UserError
        When there is no run, or a file of it is damaged.
    """
    page = render(read_run(run_dir), Embedder(run_dir, media_budget), other_results(run_dir))
    path = run_dir / REPORT_FILE
    write_whole(path, page)
    return path


def render(run: RunData, embed: Embedder, others: Sequence[OtherResult] = ()) -> str:
    """Return the page. Everything a run wrote is text: it is escaped, and no script of it runs."""
    environment = Environment(
        loader=PackageLoader("workflow_rl.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "signed": signed, "credit": credit}
    environment.globals["embed"] = embed
    style, script = (
        Markup("").join(_source(environment, f"{name}.{kind}") for name in names)
        for kind, names in (("css", ("report", "pairs", "gallery")), ("js", ("report", "gallery")))
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    template = environment.get_template("report.html.j2")
    return template.render(
        **_sections(run, embed),
        others=others,
        style=style,
        script=script,
        script_hash=f"sha256-{digest}",
    )


def _source(environment: Environment, name: str) -> Markup:
    """Return one of our own files, which needs no escaping."""
    if environment.loader is None:
        raise RuntimeError("the environment has no loader")
    return Markup(environment.loader.get_source(environment, name)[0])


def _sections(run: RunData, embed: Embedder) -> dict[str, Any]:
    statistics = Statistics(run)
    level = percent(statistics.confidence)
    ends = evaluation.first_and_last(run)
    comparison = None
    if ends is not None:
        first, last = ends
        comparison = statistics.compare(first.scores, last.scores, first.prompts)
    with embed.leaving(0.5):  # for the rollouts
        pairs = evaluation.pairs(run, embed)
    headline, tone = summary.verdict(run, comparison)
    return {
        "run": run,
        "headline": headline,
        "tone": tone,
        "level": level,
        "tiles": summary.tiles(run, comparison, level),
        "ends": ends,
        "evaluation_chart": evaluation.evaluation_chart(run, statistics, level),
        "training_chart": training.training_chart(run),
        "reward_charts": rewards.reward_charts(run),
        "contribution_charts": rewards.contribution_charts(run),
        "measure_charts": evaluation.measure_charts(run, statistics),
        "effects": effects.effects(run, statistics),
        "effect_heads": MEASURE_HEADS,
        "pairs": pairs,
        "gallery": gallery(run, embed),
        "guards": guards.guard_views(run),
        "guard_heads": guards.HEADS,
        "alarms": guards.alarm_rows(run),
        "stages": training.stage_charts(run),
        "variance_charts": training.variance_charts(run),
        "failures": failures.failures(run),
        "failure_causes": [
            (cause, where, count) for where, cause, count in failures.failure_causes(run)
        ],
        "other_metrics": training.other_metrics(run),
        "identity_text": yaml.safe_dump(dict(run.identity), sort_keys=False, allow_unicode=True),
    }
