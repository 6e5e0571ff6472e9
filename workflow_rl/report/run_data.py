"""Reads what a run wrote: its configuration, figures, evaluations and saved groups."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workflow_rl.config.run import RunConfig
from workflow_rl.config.run_dir import CONFIG_FILE, RUN_FILE, load_run_config
from workflow_rl.errors import UserError

EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation: a score per sample, NaN where it failed.

    ``measures`` holds the reward's components and other measures of the same samples.
    ``media`` maps a stage to its files, None for one that the disk refused, which show the samples
    in ``media_rows``; ``lost`` are the causes of that, with their counts. ``diversity`` is of each
    prompt, in the order of their first samples; older runs did not keep it.
    """

    iteration: int
    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    scores: list[float]
    measures: dict[str, list[float]]
    failures: list[str]
    media_rows: list[int]
    media: dict[str, list[str | None]]
    lost: dict[str, int] = field(default_factory=dict)
    diversity: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class SampleNode:
    """A sample of a saved group, with the samples of the next stage that descend from it.

    ``media`` is None where the disk refused it; ``components`` are the rewards apart, which runs
    did not keep at first.
    """

    stage: str
    media: str | None
    reward: float
    advantage: float
    failed: str | None
    children: list[SampleNode] = field(default_factory=list)
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedGroup:
    """All samples of one prompt in one iteration.

    Its mean reward was the ``rank``-th highest of ``ranked``; both are None in older runs, and
    where no sample has a reward.
    """

    prompt: str
    reward_mean: float
    children: list[SampleNode]
    rank: int | None = None
    ranked: int | None = None


@dataclass(frozen=True)
class SavedRollout:
    """The groups saved of one iteration."""

    iteration: int
    groups: list[SavedGroup]


@dataclass(frozen=True)
class GuardBaseline:
    """What a guard measured at the start, and how many deviations from it raise an alarm.

    ``quantiles`` are of the samples, ascending; older runs did not keep them.
    """

    mean: float
    std: float
    threshold: float
    quantiles: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class GuardAlarm:
    """A guard's measure that drifted too far; ``action`` is ``warn`` or ``stop``.

    ``iteration`` is the number of iterations done, from 1.
    """

    iteration: int
    guard: str
    value: float
    deviations: float
    action: str


@dataclass(frozen=True)
class RunData:
    """Everything in a run directory that the report shows.

    ``iterations`` are numbers of iterations done, from 1 as in the log and in evaluations.
    ``metrics`` maps a name to one value per entry of ``iterations``, NaN where it was not written.
    ``causes`` counts why rewards failed, by reward and reason, and ``lost`` why media of rollouts
    were not written. What older runs did not write is empty.
    """

    name: str
    config_text: str
    config: RunConfig
    identity: Mapping[str, Any]
    iterations: list[int]
    metrics: dict[str, list[float]]
    evaluations: list[EvaluationRecord]
    rollouts: list[SavedRollout]
    causes: dict[str, dict[str, int]] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    guards: dict[str, GuardBaseline] = field(default_factory=dict)
    alarms: list[GuardAlarm] = field(default_factory=list)

    @property
    def stages(self) -> list[str]:
        """Names of the stages, first stage first."""
        return list(self.config.stages)

    @property
    def videos(self) -> int:
        """Samples of the last stage that were made for training."""
        per_prompt = math.prod(stage.samples for stage in self.config.stages.values())
        return len(self.iterations) * self.config.data.prompts_per_iteration * per_prompt


def read_run(run_dir: Path) -> RunData:
    """Read a run directory.

    Raises
    ------
    UserError
        When it is missing, holds no run or nothing to show yet, or a file in it is damaged.
    """
    config = load_run_config(run_dir)
    lines = read_jsonl(run_dir / "metrics.jsonl")
    names = list(dict.fromkeys(name for line in lines for name in line if name != "iteration"))
    metrics = {name: [_number(line.get(name)) for line in lines] for name in names}
    metrics |= _without_kl(config, metrics)
    evaluations, rollouts = [], []
    for number, line in enumerate(read_jsonl(run_dir / EVALUATIONS), start=1):
        with _as_a_run_writes(f"{run_dir / EVALUATIONS} line {number}"):
            evaluations.append(_evaluation(line))
    for path in sorted((run_dir / "rollouts").glob("iteration_*.json")):
        with _as_a_run_writes(str(path)):
            rollouts.append(_rollout(_read_json(path)))
    with _as_a_run_writes(str(run_dir / "guards.json")):
        guards = _guards(run_dir / "guards.json")
    return RunData(
        name=run_dir.resolve().name,
        config_text=(run_dir / CONFIG_FILE).read_text(encoding="utf-8"),
        config=config,
        identity=_read_json(run_dir / RUN_FILE),
        iterations=[int(line["iteration"]) + 1 for line in lines],
        metrics=metrics,
        evaluations=evaluations,
        rollouts=rollouts,
        causes=_reward_causes(lines),
        lost=_summed(line.get("media_failure_causes") for line in lines),
        guards=guards,
        alarms=[_alarm(line) for line in read_jsonl(run_dir / "guard_alarms.jsonl")],
    )


@contextmanager
def _as_a_run_writes(what: str) -> Iterator[None]:
    """Raise a UserError where ``what`` is JSON, but not of the form that a run writes."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{what} is not as a run writes it ({type(error).__name__}: {error}): remove it, or "
            "restore what the run wrote"
        ) from error


def _without_kl(
    config: RunConfig, metrics: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """Return NaN for the KL of stages that do not measure it: older runs wrote 0."""
    return {
        name: [math.nan] * len(metrics[name])
        for stage, settings in config.stages.items()
        for name in (f"kl/{stage}", f"guard/kl/{stage}", f"guard_z/kl/{stage}")
        if settings.kl_weight == 0 and name in metrics
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file with one JSON object with an ``iteration`` per line; none if it is not there.

    A last line without its end is being written, or was when the run was killed: it is left out.

    Raises
    ------
    UserError
        When another line is damaged.
    """
    if not path.is_file():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    lines = []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{path} line {number} is no JSON: remove that line") from error
        if not isinstance(line, dict) or "iteration" not in line:
            raise UserError(f"{path} line {number} has no iteration: remove that line")
        lines.append(line)
    return lines


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no JSON: remove it, or restore what the run wrote") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object: remove it, or restore what the run wrote")
    return value


def _number(value: object) -> float:
    """Return a number as float, and NaN for anything that is none or not finite."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def _evaluation(line: dict[str, Any]) -> EvaluationRecord:
    scores = [_number(score) for score in line["scores"]]
    measures = {**line.get("components", {}), **line.get("extra", {})}
    media = line.get("media", {})
    for values in (line["prompts"], line["seeds"], *measures.values()):
        if len(values) != len(scores):
            raise ValueError(f"{len(values)} values beside {len(scores)} scores")
    shown = max((len(paths) for paths in media.values()), default=0)
    return EvaluationRecord(
        iteration=int(line["iteration"]),
        prompts=tuple(line["prompts"]),
        seeds=tuple(line["seeds"]),
        scores=scores,
        measures={name: [_number(v) for v in values] for name, values in measures.items()},
        failures=list(line.get("failures", {}).values()),
        media_rows=list(line.get("media_rows", range(shown))),
        media=media,
        lost=dict(line.get("media_failure_causes", {})),
        diversity=[_number(value) for value in line.get("diversity", [])],
    )


def _rollout(record: dict[str, Any]) -> SavedRollout:
    groups = [
        SavedGroup(
            prompt=group["prompt"],
            reward_mean=_number(group["reward_mean"]),
            children=[_node(child) for child in group["children"]],
            rank=group.get("rank"),
            ranked=group.get("ranked"),
        )
        for group in record["groups"]
    ]
    return SavedRollout(int(record["iteration"]), groups)


def _node(node: dict[str, Any]) -> SampleNode:
    return SampleNode(
        stage=node.get("stage", ""),
        media=node["media"],
        reward=_number(node.get("reward")),
        advantage=_number(node.get("advantage")),
        failed=node.get("failed"),
        children=[_node(child) for child in node.get("children", [])],
        components={name: _number(v) for name, v in node.get("components", {}).items()},
    )


def _summed(counts: Iterable[Mapping[str, int] | None]) -> dict[str, int]:
    """Add up counts by name."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part or {})
    return dict(total)


def _reward_causes(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Add up why each reward failed, over all iterations."""
    told = [line.get("reward_failure_causes") or {} for line in lines]
    labels = dict.fromkeys(label for causes in told for label in causes)
    return {label: _summed(causes.get(label) for causes in told) for label in labels}


def _guards(path: Path) -> dict[str, GuardBaseline]:
    if not path.is_file():
        return {}
    return {
        name: GuardBaseline(
            mean=_number(guard.get("mean")),
            std=_number(guard.get("std")),
            threshold=_number(guard.get("threshold")),
            quantiles=[_number(value) for value in guard.get("quantiles", [])],
        )
        for name, guard in _read_json(path).get("guards", {}).items()
    }


def _alarm(line: Mapping[str, Any]) -> GuardAlarm:
    return GuardAlarm(
        iteration=int(line["iteration"]) + 1,
        guard=str(line.get("guard", "")),
        value=_number(line.get("value")),
        deviations=_number(line.get("deviations")),
        action=str(line.get("action", "warn")),
    )
