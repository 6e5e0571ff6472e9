"""What to change in a run that does not fit, each change counted before it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.planning.run import Bottleneck, Hardware, Planner, RunNumbers

LORA_RANK = 32


@dataclass(frozen=True)
class Change:
    """One key to change, as an override of the command line, and what it costs.

    ``peak`` are the bytes per GPU after it and all changes before it.
    """

    key: str
    value: Any
    cost: str
    peak: int

    @property
    def override(self) -> str:
        """``key=value`` for the command line."""
        value = self.value
        if isinstance(value, bool):
            value = str(value).lower()
        return f"{self.key}={'null' if value is None else value}"


Candidate = tuple[str, Any, str]
"""Key, value, and what the change costs."""


@dataclass(frozen=True)
class Advice:
    """Changes in order, and the plan after all of them, which may still not fit."""

    changes: tuple[Change, ...]
    after: RunNumbers


def advise(planner: Planner, config: RunConfig, hardware: Hardware, now: RunNumbers) -> Advice:
    """Return changes that make a run fit, or as many as help.

    At each step it is what the peak needs that is changed, by the cheapest change that lowers the
    peak. A larger video, another model or more GPUs are the user's to choose.
    """
    found: dict[str, Candidate] = {}
    changed = config
    while not now.fits:
        step = _next_change(planner, changed, hardware, now)
        if step is None:
            break
        candidate, changed, now = step
        found[candidate[0]] = candidate  # a batch may be halved more than once
    changes = []
    for key, value, cost in found.values():
        config = _set(config, key, value)
        changes.append(Change(key, value, cost, planner.count(config, hardware).peak.bytes))
    return Advice(tuple(changes), now)


def _next_change(
    planner: Planner, config: RunConfig, hardware: Hardware, now: RunNumbers
) -> tuple[Candidate, RunConfig, RunNumbers] | None:
    for candidate in _candidates(config, now):
        key, value, _ = candidate
        changed = _set(config, key, value)
        after = planner.count(changed, hardware)
        if after.peak.bytes < now.peak.bytes:
            return candidate, changed, after
    return None


def _candidates(config: RunConfig, now: RunNumbers) -> list[Candidate]:
    """Return changes that may lower the peak, the cheapest first."""
    return [*_of_phase(config, now.peak), *_of_everything_held(config, now)]


def _of_phase(config: RunConfig, peak: Bottleneck) -> list[Candidate]:
    """Return changes to the phase that peaks."""
    stage, where = config.stages[peak.stage], f"stages.{peak.stage}"
    memory = f"{where}.memory"
    if peak.phase == "evaluation" and config.evaluation.batch_size > 1:
        half = config.evaluation.batch_size // 2
        return [("evaluation.batch_size", half, "evaluations take smaller batches")]
    candidates: list[Candidate] = []
    if peak.phase in ("encode", "decode", "evaluation"):
        if not stage.memory.vae_slicing and stage.rollout_batch_size > 1:
            candidates.append((f"{memory}.vae_slicing", True, "the VAE takes one sample at a time"))
        if stage.rollout_batch_size > 1:
            candidates.append(_smaller_rollout(where, stage))
        if not stage.memory.vae_tiling:
            candidates.append((f"{memory}.vae_tiling", True, "frames are blended from tiles"))
    if peak.phase == "rollout" and stage.rollout_batch_size > 1:
        candidates.append(_smaller_rollout(where, stage))
    if peak.phase == "training":
        if not stage.memory.gradient_checkpointing:
            candidates.append(
                (f"{memory}.gradient_checkpointing", True, "a third more time in training")
            )
        if stage.training_batch_size > 1:
            half = stage.training_batch_size // 2
            candidates.append(
                (f"{where}.micro_batch_size", half, "smaller batches; see training.c2_tolerance")
            )
    return candidates


def _smaller_rollout(where: str, stage: StageConfig) -> Candidate:
    half = stage.rollout_batch_size // 2
    return f"{where}.rollout_batch_size", half, "rollout takes smaller batches"


def _of_everything_held(config: RunConfig, now: RunNumbers) -> list[Candidate]:
    """Return changes to what is held all the time: first what changes no result."""
    stages = [(f"stages.{name}", stage) for name, stage in config.stages.items()]
    dropped: list[Candidate] = [
        (f"{where}.memory.drop_text_encoders", True, "prompts are encoded before the run")
        for where, stage in stages
        if not stage.memory.drop_text_encoders
    ]
    cached: list[Candidate] = [
        (f"{where}.memory.embedding_cache", True, "embeddings are kept on disk")
        for where, stage in stages
        if stage.memory.drop_text_encoders and stage.memory.embedding_cache is False
    ]
    swapped: list[Candidate] = []
    if len(stages) > 1 and not config.training.swap_stages:
        seconds = replace(now, swap_stages=True).swap_seconds
        swapped = [("training.swap_stages", True, f"about {seconds:.0f} s more per iteration")]
    ordered = sorted(stages, key=lambda pair: pair[0] != f"stages.{now.peak.stage}")
    rules: list[Callable[[str, StageConfig], Candidate | None]] = [_bfloat16, _lora]
    if config.evaluation.weights != "ema":
        rules.append(_no_average)
    return [*dropped, *swapped, *cached, *_from_rules(rules, ordered)]


def _from_rules(
    rules: Sequence[Callable[[str, StageConfig], Candidate | None]],
    stages: Sequence[tuple[str, StageConfig]],
) -> list[Candidate]:
    """Return what ``rules`` change of the stages; all of it changes what is learnt."""
    found = [rule(where, stage) for rule in rules for where, stage in stages]
    return [candidate for candidate in found if candidate is not None]


def _bfloat16(where: str, stage: StageConfig) -> Candidate | None:
    if stage.dtype == "bfloat16":
        return None
    return f"{where}.dtype", "bfloat16", "the model computes in 16 bits"


def _lora(where: str, stage: StageConfig) -> Candidate | None:
    if stage.lora is not None or stage.freeze or stage.train_modules:
        return None
    return f"{where}.lora.rank", LORA_RANK, "adapters train, not the weights themselves"


def _no_average(where: str, stage: StageConfig) -> Candidate | None:
    if stage.ema.decay is None or stage.freeze:
        return None
    return f"{where}.ema.decay", None, "no average of the weights"


def _set(config: RunConfig, key: str, value: Any) -> RunConfig:
    """Return the configuration with one dotted key changed."""
    content = config.model_dump(mode="json")
    node = content
    *parents, last = key.split(".")
    for parent in parents:
        node[parent] = node[parent] or {}
        node = node[parent]
    node[last] = value
    return RunConfig.model_validate_json(json.dumps(content), strict=True)
