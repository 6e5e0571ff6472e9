"""Shows a plan: as tables for people, as a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from workflow_rl.planning.advice import Advice, Change
from workflow_rl.planning.memory import StageMemory
from workflow_rl.planning.run import GIGABYTE, RunNumbers
from workflow_rl.planning.stage import StageNumbers

FLOPS_ROWS = {"image": "CLIP of the image", "encode": "VAE encode", "decode": "VAE decode"}
"""Titles of causes of FLOPs that their names don't tell."""

MEMORY_ROWS = (
    ("optimizer", "optimizer (AdamW moments)"),
    ("masters", "float32 copies of 16-bit weights"),
    ("ema", "EMA"),
    ("reference", "reference"),
    ("gradients", "gradients"),
    ("peak_plain", "activations, no checkpointing"),
    ("peak_checkpointed", "activations, checkpointed"),
    ("rollout", "rollout, one step"),
    ("decode", "VAE decode"),
    ("encode", "VAE encode"),
    ("embeddings", "cached embeddings"),
    ("dropped", "text encoders, until dropped"),
    ("trajectories", "trajectories (CPU)"),
    ("media", "media (CPU)"),
)


def show(
    console: Console, numbers: RunNumbers, advice: Advice | None, notes: Sequence[str]
) -> None:
    """Print a plan."""
    console.print(_memory_table(numbers.stages))
    console.print(_flops_table(numbers.stages))
    console.print(_summary(numbers), highlight=False)
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    if advice is not None:
        _show_advice(console, numbers, advice)


def _memory_table(stages: Sequence[StageNumbers]) -> Table:
    table = Table("GB per GPU", title="Memory", title_justify="left")
    for stage in stages:
        table.add_column(f"{stage.name}\n{stage.size}\n{stage.dtype}", justify="right")
    components = list(dict.fromkeys(name for stage in stages for name in stage.parameters))
    for name in components:
        table.add_row(
            f"{name}, parameters",
            *(_count_text(stage.parameters.get(name, 0)) for stage in stages),
        )
    table.add_row(
        "trainable parameters",
        *(f"{_count_text(stage.trainable)}\n{stage.trains}" for stage in stages),
        end_section=True,
    )
    for name in components:
        weights = [stage.memory.weights.get(name, 0) for stage in stages]
        if any(weights):
            table.add_row(f"{name}, weights", *map(_gb, weights))
    for field, title in MEMORY_ROWS:
        values = [getattr(stage.memory, field) for stage in stages]
        if any(values):
            table.add_row(title, *map(_gb, values))
    table.add_section()
    table.add_row("held between iterations", *(_gb(s.memory.resident) for s in stages))
    table.add_row("peak of the stage alone", *(_peak_text(s.memory) for s in stages))
    return table


def _peak_text(memory: StageMemory) -> str:
    phase = max(memory.phases, key=lambda name: memory.phases[name])
    return f"{_gb(memory.peak)} ({phase})"


def _flops_table(stages: Sequence[StageNumbers]) -> Table:
    table = Table("TFLOPs per GPU and iteration", title="Work", title_justify="left")
    for stage in stages:
        table.add_column(stage.name, justify="right")
    table.add_row("samples", *(str(s.work.samples) for s in stages))
    table.add_row("steps, trained", *(f"{s.work.steps}, {s.work.trained_steps}" for s in stages))
    for cause in stages[0].flops:
        values = [stage.flops[cause] for stage in stages]
        if any(values):
            table.add_row(
                FLOPS_ROWS.get(cause, cause), *(f"{value / 1e12:,.1f}" for value in values)
            )
    table.add_row("sum", *(f"{s.total_flops / 1e12:,.1f}" for s in stages))
    return table


def _summary(numbers: RunNumbers) -> str:
    hardware = numbers.hardware
    together, swapped = (numbers.bottleneck(swapped=value) for value in (False, True))
    which = "swapped" if numbers.swap_stages else "not swapped"
    state = "fits" if numbers.fits else "does NOT fit"
    return "\n".join(
        [
            f"peak per GPU, all stages on it: {_gb(together.bytes)} GB "
            f"({together.phase} of {together.stage})",
            f"peak per GPU, stages swapped:   {_gb(swapped.bytes)} GB "
            f"({swapped.phase} of {swapped.stage})",
            f"as configured ({which}) it {state}: {_gb(numbers.peak.bytes)} of "
            f"{_gb(hardware.gpu_memory)} GB; {_gb(numbers.host_bytes)} GB of CPU memory per GPU",
            f"iteration: {numbers.total_flops / 1e15:,.1f} PFLOPs per GPU, about "
            f"{_time_text(numbers.seconds)} at {hardware.utilisation:.0%} of "
            f"{hardware.peak_tflops:g} TFLOPS"
            + (f", {numbers.swap_seconds:.0f} s of it moving stages" if numbers.swap_stages else "")
            + " (rewards and evaluations not counted)",
        ]
    )


def change_table(changes: Sequence[Change]) -> Table:
    """Return what to change; an override is there to be copied, so that others are cut first."""
    change_column = Column("change", no_wrap=True)
    table = Table(change_column, "what it costs", "peak then, GB", title="What to change")
    for change in changes:
        table.add_row(change.override, change.cost, _gb(change.peak))
    return table


def _show_advice(console: Console, numbers: RunNumbers, advice: Advice) -> None:
    if advice.changes:
        console.print(change_table(advice.changes))
    if not advice.after.fits:
        peak = advice.after.peak
        memory = _gb(numbers.hardware.gpu_memory)
        console.print(
            f"That is not enough: {peak.phase} of {peak.stage} still needs "
            f"{_gb(peak.bytes)} GB. Lower stages.{peak.stage}'s num_frames, height and width, "
            f"name a smaller model, or use GPUs of more than {memory} GB.",
            highlight=False,
        )


def as_dict(numbers: RunNumbers, advice: Advice | None, notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan as what JSON can hold; memory is in bytes, time in seconds."""
    return {
        "hardware": asdict(numbers.hardware),
        "fits": numbers.fits,
        "peak": asdict(numbers.peak),
        "peak_swapped": asdict(numbers.bottleneck(swapped=True)),
        "peak_not_swapped": asdict(numbers.bottleneck(swapped=False)),
        "cpu_bytes": numbers.host_bytes,
        "flops": numbers.total_flops,
        "seconds": numbers.seconds,
        "stages": {stage.name: _stage_dict(stage) for stage in numbers.stages},
        "changes": []
        if advice is None
        else [{**asdict(c), "override": c.override} for c in advice.changes],
        "fits_after_changes": None if advice is None else advice.after.fits,
        "notes": list(notes),
    }


def _stage_dict(stage: StageNumbers) -> dict[str, Any]:
    memory = asdict(stage.memory)
    held = {"resident": stage.memory.resident, "peak": stage.memory.peak}
    return {
        "architecture": stage.source,
        "size": stage.size,
        "dtype": stage.dtype,
        "parameters": dict(stage.parameters),
        "trainable": stage.trainable,
        "trains": stage.trains,
        "work": asdict(stage.work),
        "bytes": memory | held | {"phases": stage.memory.phases},
        "flops": dict(stage.flops),
    }


def _gb(value: int) -> str:
    return f"{value / GIGABYTE:.1f}" if value >= GIGABYTE / 10 else f"{value / GIGABYTE:.2g}"


def _count_text(value: int) -> str:
    if value >= 10**9:
        return f"{value / 10**9:.2f} B"
    return f"{value / 10**6:.1f} M" if value >= 10**6 else str(value)


def _time_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
