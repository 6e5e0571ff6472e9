"""The words and figures of an ablation, as the terminal, the Markdown and the page show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from workflow_rl.ablation.levels import mean_score
from workflow_rl.ablation.results import AblationResult, VariantResult, curve
from workflow_rl.ablation.run_results import RunResult
from workflow_rl.ablation.variants import CONSTANT, SHARED
from workflow_rl.evaluation.statistics import PairedComparison
from workflow_rl.report.charts import Chart, Series
from workflow_rl.report.numbers import UNKNOWN, number, percent, signed


@dataclass(frozen=True)
class Table:
    """Text cells; the first of a row names it."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def main_table(result: AblationResult) -> Table:
    """One row per variant, means over its seeds."""
    level = percent(result.confidence)
    heads = (
        "variant",
        "seeds",
        f"{result.output_name} each",
        "before",
        "after",
        f"change [{level}]",
        f"against {result.reference} [{level}]",
        "seeds ahead",
        *if_shared(result, f"{result.output_name} to {SHARED}'s best"),
    )
    return Table("Variants", heads, tuple(_variant_row(v, result) for v in result.variants))


def if_shared(result: AblationResult, cell: str) -> tuple[str, ...]:
    """Return a cell of the column that compares with the shared runs, none where none finished."""
    return (cell,) if result.to_shared else ()


def _variant_row(variant: VariantResult, result: AblationResult) -> tuple[str, ...]:
    counts = sorted({run.videos for run in variant.runs})
    head = (
        variant.name,
        ", ".join(str(run.seed) for run in variant.runs),
        " to ".join(dict.fromkeys(str(counts[i]) for i in (0, -1))),
    )
    if variant.change is None:
        figures = (*[UNKNOWN] * 3, moved(variant), UNKNOWN)
        return (*head, *figures, *if_shared(result, UNKNOWN))
    return (
        *head,
        number(variant.change.before),
        with_range(variant),
        interval(variant.change),
        interval(variant.against),
        ahead(variant),
        *if_shared(result, _to_shared(variant, result)),
    )


def moved(variant: VariantResult, between: str = " ") -> str:
    """Write how many tensors of a constant reward's runs moved."""
    checks = [run.check for run in variant.runs if run.check is not None]
    counts = f"{sum(c.moved for c in checks)} of {sum(c.tensors for c in checks)}"
    return f"{counts}{between}tensors moved"


def with_range(variant: VariantResult, between: str = " ") -> str:
    """Write the mean after training, and the lowest and highest seed where there are several."""
    if variant.change is None:
        return UNKNOWN
    text = number(variant.change.after)
    if len(variant.runs) == 1:
        return text
    ends = [mean_score(run.evaluations[-1].scores) for run in variant.runs]
    return f"{text}{between}({number(min(ends))} to {number(max(ends))})"


def ahead(variant: VariantResult) -> str:
    """Write on how many of the seeds the variant ends above the reference."""
    return UNKNOWN if variant.against is None else f"{variant.ahead} of {variant.compared}"


def _to_shared(variant: VariantResult, result: AblationResult) -> str:
    """Write the mean over the seeds that reached it, and how many did if not all."""
    values = [result.to_shared.get((variant.name, run.seed)) for run in variant.runs]
    compared = [run for run in variant.runs if (variant.name, run.seed) in result.to_shared]
    if not compared:
        return UNKNOWN
    counts = [value for value in values if value is not None]
    if not counts:
        return "never"
    text = f"{fmean(counts):.0f}"
    if len(counts) == len(compared):
        return text
    return f"{text} ({len(counts)} of {len(compared)} seeds)"


def run_table(result: AblationResult) -> Table:
    """One row per finished run."""
    shares = [f"variance from {name}" for name in result.stages]
    heads = (
        "run",
        result.output_name,
        "denoising steps",
        "before",
        "after",
        f"change [{percent(result.confidence)}]",
        *if_shared(result, f"{result.output_name} to {SHARED}'s best"),
        *shares,
    )
    return Table("Runs", heads, tuple(_run_row(run, result) for run in result.runs))


def _run_row(run: RunResult, result: AblationResult) -> tuple[str, ...]:
    head = (run.name, str(run.videos), str(run.denoising_steps))
    shares = [percent(run.variance[stage]) for stage in result.stages]
    if run.variant == CONSTANT:
        return (*head, *[UNKNOWN] * 3, *if_shared(result, UNKNOWN), *shares)
    change = run.change
    figures = (number(change.before), number(change.after), interval(change))
    return (*head, *figures, *if_shared(result, reached(run, result)), *shares)


def reached(run: RunResult, result: AblationResult) -> str:
    """Write what a run had made when it reached the best level of its seed's shared run."""
    if (run.variant, run.seed) not in result.to_shared:
        return UNKNOWN
    at = result.to_shared[run.variant, run.seed]
    return "never" if at is None else str(at)


def measure_table(result: AblationResult) -> Table:
    """What else was measured on the same samples: its change, one row per variant."""
    variants = [v for v in result.variants if v.measures]
    names = list(dict.fromkeys(name for v in variants for name in v.measures))
    rows = tuple(
        (v.name, *(interval(v.measures[n]) if n in v.measures else UNKNOWN for n in names))
        for v in variants
    )
    return Table("Change of what else was measured", ("variant", *names), rows if names else ())


def interval(comparison: PairedComparison | None, between: str = " ") -> str:
    """Write a paired difference with its interval."""
    if comparison is None:
        return UNKNOWN
    difference = comparison.difference
    mean = signed(difference.mean)
    if not math.isfinite(difference.low):
        return mean
    return f"{mean}{between}[{signed(difference.low)}, {signed(difference.high)}]"


def facts(result: AblationResult) -> list[str]:
    """Say in sentences what was checked, and what is missing and why."""
    lines = [_equality(result)] if result.runs else []
    lines += _control(result)
    lines += [
        f"FAILED: {run.name} after {run.done} of {run.iterations} iterations: {run.reason}"
        for run in result.unfinished
        if run.reason
    ]
    lines += _ends(result)
    open_runs = [
        f"{u.name} ({u.done} of {u.iterations})" for u in result.unfinished if not u.reason
    ]
    if open_runs:
        lines.append(f"Not finished, with the iterations done: {', '.join(open_runs)}.")
    lines += [f"Left out: {name}: {reason}." for name, reason in result.left_out.items()]
    return lines


def _equality(result: AblationResult) -> str:
    runs, made = result.runs, result.output_name
    counts = sorted({(run.videos, run.denoising_steps) for run in runs})
    if result.equal:
        videos, steps = counts[0]
        return (
            f"Checked: each of the {len(runs)} finished runs made {videos} {made} for training, "
            f"in {steps} denoising steps."
        )
    odd = ", ".join(f"{r.name} {r.videos} in {r.denoising_steps}" for r in runs)
    return f"NOT EQUAL: the runs made different numbers of {made} and denoising steps: {odd}."


def _control(result: AblationResult) -> list[str]:
    if result.moved:
        parts = [f"{name} (such as {result.checks[name].first})" for name in result.moved]
        return [f"WRONG: weights moved under a constant reward in {', '.join(parts)}."]
    if not result.checks:
        return []
    tensors = sum(check.tensors for check in result.checks.values())
    return [
        f"Checked: under a constant reward none of the {tensors} trained tensors of "
        f"{len(result.checks)} runs moved in a bit."
    ]


def _ends(result: AblationResult) -> list[str]:
    """Say which finished runs ended with a fault, or by a guard, after their last iteration."""
    lines = [
        f"FAILED: {name} after all of its iterations: {result.failures[name]}"
        for name in result.failed
    ]
    for run in result.runs:
        if run.stopped_by:
            reason = result.failures.get(run.name)
            lines.append(
                f"Stopped by a guard: {run.name} after its last iteration, by "
                f"{', '.join(run.stopped_by)}; it made all its {result.output_name} and counts"
                + (f": {reason}" if reason else ".")
            )
    return lines


def explanations(result: AblationResult) -> list[str]:
    """Say how the figures are to be read."""
    level = percent(result.confidence)
    return [
        "Reward: on the held-out prompts, without noise in the steps. Where there are several "
        "seeds of training, a sample's scores are averaged over them first, and the lowest and "
        "highest seed stand in brackets.",
        f"Intervals: {level}, of the difference on the same prompts and noise, bootstrapped over "
        "prompts. They say nothing about other seeds of training: for that look at how many seeds "
        f"of a variant end above {result.reference} (seeds ahead).",
        *if_shared(
            result,
            f"{result.output_name.capitalize()} to {SHARED}'s best: made until the run first "
            f"reached the best level of the {SHARED} run of its seed, as finely as "
            "evaluation.every.",
        ),
        "Variance from a stage: its share of the reward's variance within a prompt, mean over the "
        "iterations.",
    ]


def reward_chart(result: AblationResult) -> Chart:
    """Held-out reward over the outputs made: mean over the seeds, with intervals over prompts."""
    series = []
    for index, variant in enumerate(v for v in result.variants if v.name != CONSTANT):
        videos, intervals = curve(variant.runs, result.confidence)
        series.append(
            Series(
                variant.name,
                videos,
                [i.mean for i in intervals],
                [i.low for i in intervals],
                [i.high for i in intervals],
                colour=index,
                markers=True,
            )
        )
    return Chart(
        "Held-out reward",
        series,
        f"Mean over the seeds, with {percent(result.confidence)} intervals over prompts.",
        x_label=f"{result.output_name} made",
    )


def lines_of(table: Table) -> list[str]:
    """Return a table as lines of Markdown."""
    rows: Sequence[Sequence[str]] = [table.heads, ["---"] * len(table.heads), *table.rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
