"""What an evaluation is asked to do, checked as far as that needs no PyTorch and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError

from workflow_rl.config import PromptRecord, load_prompts
from workflow_rl.config.run import EvaluationConfig, RewardConfig
from workflow_rl.config.yaml_text import parse_yaml
from workflow_rl.enums import MediaKind
from workflow_rl.errors import UserError
from workflow_rl.evaluation.candidates import Candidate, FolderCandidate, RunCandidate
from workflow_rl.evaluation.folders import Files, match_files
from workflow_rl.rewards.registry import REWARDS, nearest

STAGES = ("t2i", "i2v")
"""Keys of a .jsonl prompt file beside ``prompt``, where no run says its own."""


@dataclass(frozen=True)
class Row:
    """One sample of every candidate."""

    record: PromptRecord
    seed: int


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation, ready to be done.

    Attributes
    ----------
    candidates, baseline
        What to compare, and the index of what it is compared with.
    rows
        Prompts x seeds, prompt-major; without those that a folder lacks.
    left_out
        Prompts and seeds that a folder lacks, where that is allowed.
    files
        Per index of a folder, its files.
    kind
        What every candidate ends in.
    rewards
        Terms in order. ``weighted``: their weights mean something, because a configuration and no
        list of names gave them.
    options
        Steps, batch size and intervals.
    """

    candidates: Sequence[Candidate]
    baseline: int
    prompts_file: Path
    rows: Sequence[Row]
    left_out: int
    files: Mapping[int, Files]
    kind: MediaKind
    rewards: Sequence[RewardConfig]
    weighted: bool
    options: EvaluationConfig = field(default_factory=EvaluationConfig)

    @property
    def runs(self) -> list[RunCandidate]:
        """The candidates that are runs."""
        return [c for c in self.candidates if isinstance(c, RunCandidate)]

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt of each row."""
        return tuple(row.record.prompt for row in self.rows)


def make_job(
    candidates: Sequence[Candidate],
    baseline: int = 0,
    *,
    prompts: Path | None = None,
    rewards: Sequence[str] = (),
    seeds_per_prompt: int | None = None,
    common: bool = False,
) -> EvaluationJob:
    """Collect what an evaluation needs.

    Parameters
    ----------
    prompts : Path, optional
        Default: the held-out prompts of the first run.
    rewards : sequence of str
        Names, ``module:function`` or YAML files; default: those of the runs.
    seeds_per_prompt : int, optional
        Default: the first run's.
    common : bool
        Compare what all candidates have, instead of refusing a folder that lacks some.

    Raises
    ------
    UserError
    """
    runs = [c for c in candidates if isinstance(c, RunCandidate)]
    options = runs[0].config.evaluation if runs else EvaluationConfig()
    if prompts is None and not runs:
        raise UserError("there is no run whose prompts to take; give them with --prompts")
    path = prompts or runs[0].config.data.eval_prompts or runs[0].config.data.prompts
    stages = list(dict.fromkeys(name for run in runs for name in run.config.stages)) or STAGES
    if_missing = "check --prompts" if prompts else "go to where the run began, or give --prompts"
    records = load_prompts(path, stages, if_missing=if_missing)
    _check_no_twins(path, records)
    kind = _kind_of_runs(runs)
    terms, weighted = _reward_terms(rewards, runs)
    seeds = range(seeds_per_prompt or options.seeds_per_prompt)
    files: dict[int, Files] = {}
    for index, candidate in enumerate(candidates):
        if isinstance(candidate, FolderCandidate):
            files[index], kind = match_files(candidate.path, path, records, seeds, kind)
    if kind is None:
        raise ValueError("an evaluation needs a candidate")
    rows = [Row(record, seed) for record in records for seed in seeds]
    kept = [row for row in rows if all((row.record.prompt, row.seed) in f for f in files.values())]
    if len(kept) < len(rows):
        _check_missing(candidates, files, rows, kept, kind, common)
    _check_stages(candidates, terms)
    return EvaluationJob(
        candidates,
        baseline,
        path,
        kept,
        len(rows) - len(kept),
        files,
        kind,
        terms,
        weighted,
        options,
    )


def _check_no_twins(path: Path, records: Sequence[PromptRecord]) -> None:
    """Two equal prompts would have the same noise, and count twice."""
    seen = set()
    for record in records:
        key = (record.prompt, record.first_frame and record.first_frame.digest)
        if key in seen:
            raise UserError(
                f"{path}: {record.prompt!r} is there twice and would count twice; keep one, and "
                "take more seeds with --seeds-per-prompt"
            )
        seen.add(key)


def _kind_of_runs(runs: Sequence[RunCandidate]) -> MediaKind | None:
    kinds = {}
    for run in runs:
        task = list(run.config.stages.values())[-1].task
        kinds[MediaKind.IMAGE if task == "t2i" else MediaKind.VIDEO] = run.argument
    if len(kinds) > 1:
        raise UserError(
            f"{kinds[MediaKind.IMAGE]} makes images and {kinds[MediaKind.VIDEO]} makes videos; "
            "compare like with like"
        )
    return next(iter(kinds), None)


def _check_missing(
    candidates: Sequence[Candidate],
    files: Mapping[int, Files],
    rows: Sequence[Row],
    kept: Sequence[Row],
    kind: MediaKind,
    common: bool,
) -> None:
    missing, index = next(
        (row, index)
        for row in rows
        for index in files
        if (row.record.prompt, row.seed) not in files[index]
    )
    if not common:
        raise UserError(
            f"{candidates[index].path} has no {kind.value} of {missing.record.prompt!r} with seed "
            f"{missing.seed}; add it, ask for other seeds with --seeds-per-prompt, or compare what "
            "all have with --common"
        )
    if not kept:
        raise UserError(
            "the candidates have no prompt and seed in common; compare folders of the same prompts"
        )


def _check_stages(candidates: Sequence[Candidate], terms: Sequence[RewardConfig]) -> None:
    """A reward on an earlier stage needs that stage of every candidate."""
    for term in terms:
        for candidate in candidates:
            if term.on is None:
                continue
            label = f"{term.name or term.callable}@{term.on}"
            if isinstance(candidate, FolderCandidate):
                raise UserError(
                    f"reward {label} scores stage {term.on!r}, but {candidate.argument} is a "
                    "folder of final outputs; name other rewards with --rewards"
                )
            if term.on not in candidate.config.stages:
                raise UserError(
                    f"reward {label} scores stage {term.on!r}, which {candidate.argument} lacks; "
                    "name other rewards with --rewards"
                )


def _reward_terms(
    asked: Sequence[str], runs: Sequence[RunCandidate]
) -> tuple[list[RewardConfig], bool]:
    """Return the rewards to score by, and whether their weights are a configuration's."""
    if not asked:
        if not runs:
            raise UserError("there is no run whose rewards to take; name some with --rewards")
        own = [list(run.config.rewards) for run in runs]
        terms: list[RewardConfig] = []
        for term in (term for terms_of_run in own for term in terms_of_run):
            if not any(_same_reward(term, other) for other in terms):
                terms.append(term)
        return terms, all(rewards == own[0] for rewards in own)
    terms, weighted = [], True
    for text in (part.strip() for argument in asked for part in argument.split(",")):
        if Path(text).suffix in (".yaml", ".yml"):
            terms += _read_rewards(Path(text))
        elif ":" in text:
            terms.append(RewardConfig(callable=text))
            weighted = False
        elif text in REWARDS:
            terms.append(RewardConfig(name=text))
            weighted = False
        else:
            raise UserError(
                f"--rewards: unknown reward {text!r}; {nearest(text, list(REWARDS))}, or give a "
                "callable (module:function) or a .yaml with rewards"
            )
    return terms, weighted


def _same_reward(one: RewardConfig, other: RewardConfig) -> bool:
    """Whether two terms give the same score, whatever their weights."""
    fields = ("name", "callable", "on", "args", "group")
    return all(getattr(one, name) == getattr(other, name) for name in fields)


def _read_rewards(path: Path) -> list[RewardConfig]:
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--rewards: no file {path}; check the path") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--rewards: {path} is not YAML ({reason}); mend it") from None
    entries = content.get("rewards") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"--rewards: {path} has no list 'rewards'; write `rewards: [{{name: ...}}]`"
        )
    terms = []
    for index, entry in enumerate(entries):
        try:
            terms.append(RewardConfig.model_validate_json(json.dumps(entry), strict=True))
        except (ValidationError, TypeError) as error:
            raise UserError(f"--rewards: {path}: rewards.{index}: {_first_fault(error)}") from None
        name = terms[-1].name
        if name is not None and name not in REWARDS:
            raise UserError(
                f"--rewards: {path}: rewards.{index}.name is {name!r}; "
                f"{nearest(name, list(REWARDS))}"
            )
    return terms


def _first_fault(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return " ".join(str(error).split())
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    known = ", ".join(RewardConfig.model_fields)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {place!r}; {nearest(place, known.split(', '))}"
    return f"{place}: {' '.join(fault['msg'].split())}; valid keys: {known}"
