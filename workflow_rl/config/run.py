"""A whole run: the chain, its data, rewards, credit, training, evaluation and logging."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from workflow_rl.config.base import ConfigModel
from workflow_rl.config.guards import GuardsConfig, unknown_threshold
from workflow_rl.config.prompts import FIRST_FRAME_KEY
from workflow_rl.config.reward_checks import credit_fault
from workflow_rl.config.reward_location import ProcessConfig, ServerConfig
from workflow_rl.config.stage import StageConfig
from workflow_rl.config.yaml_text import dump_yaml

STAGE_NAME = re.compile(r"[a-z][a-z0-9_]*")


class DataConfig(ConfigModel):
    """The prompts, with first frames where the chain begins with an i2v stage."""

    prompts: Path = Field(
        description="Training prompts, relative to the working directory: a .txt or .jsonl file, "
        "or a folder of first frames, each `fox.png` with its prompt in `fox.txt`."
    )
    eval_prompts: Path | None = Field(
        None, description="Held-out prompts, likewise; null evaluates on the training prompts."
    )
    prompts_per_iteration: int = Field(4, ge=1, description="Prompts P in each iteration.")


class RewardConfig(ConfigModel):
    """One term of the reward, a weighted sum."""

    name: str | None = Field(None, description="A reward that ships with the project.")
    callable: str | None = Field(
        None, description="Any Python callable, as `package.module:function`."
    )
    weight: float = Field(1.0, description="Factor of this term in the sum.")
    on: str | None = Field(
        None, description="Stage whose output is scored; null is the last stage."
    )
    timeout_s: float | None = Field(
        600.0,
        gt=0,
        description="Seconds for all samples of a stage, from when the last was made; what has no "
        "score then has failed. null waits for ever.",
    )
    args: dict[str, Any] = Field({}, description="Keyword arguments of the reward.")
    credit_to: tuple[str, ...] | None = Field(
        None, description="Stages that this term is credited to, such as [t2i]; null is every one."
    )
    group: Literal["prompt", "parent"] | None = Field(
        None,
        description="What a reward that compares samples compares: all of a prompt, or those of "
        "one sample of the stage before; null is prompt. A callable with a group gets one whole "
        "group at a time.",
    )
    process: ProcessConfig | None = Field(
        None, description="Compute it in a process of its own, which may crash; null: in the run's."
    )
    server: ServerConfig | None = Field(
        None, description="Have a reward server compute it; null: compute it here."
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.process is not None and self.server is not None:
            raise ValueError(
                "process and server are both set, but a reward runs in one place; leave one out"
            )
        if (self.name is None) == (self.callable is None):
            raise ValueError(
                "give either name (a reward of this project) or callable (package.module:function)"
            )
        return self


class RewardsConfig(ConfigModel):
    """What a reward server is told, where it is not a whole run."""

    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="Rewards to serve.")


class CreditConfig(ConfigModel):
    """How the reward of the last stage becomes an advantage of every stage."""

    rule: Literal["shared", "nested"] = Field(
        "nested",
        description="shared: one advantage for all stages; nested: each stage is judged against "
        "its own siblings.",
    )
    normalisation: Literal["group", "batch", "none"] = Field(
        "batch", description="Standard deviation that advantages are divided by."
    )
    leave_one_out: bool = Field(
        False, description="Leave a sample out of the mean that it is compared with (RLOO)."
    )
    advantage_clip: float = Field(5.0, gt=0, description="Advantages are clipped to ± this.")
    combine: Literal["sum", "zscore", "rank", "advantages"] = Field(
        "sum",
        description="What of several rewards is weighted and summed: their values, z-scores or "
        "ranks, or the advantages that each has alone, whatever its scale.",
    )
    combine_over: Literal["prompt", "batch"] | None = Field(
        None, description="Samples that zscore and rank compare with each other; null is prompt."
    )

    @model_validator(mode="after")
    def _check_over(self) -> Self:
        if self.combine_over is not None and self.combine not in ("zscore", "rank"):
            raise ValueError(
                f"combine_over is {self.combine_over!r}, but combine {self.combine!r} compares "
                "nothing; leave combine_over out, or use combine: zscore or rank"
            )
        return self


class CheckpointConfig(ConfigModel):
    """When the whole state is written."""

    every: int = Field(10, ge=1, description="Iterations between two checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints that are kept.")


class TrainingConfig(ConfigModel):
    """The outer loop."""

    iterations: int = Field(100, ge=1, description="Iterations: generate, score, update, publish.")
    updates_per_iteration: int = Field(
        1, ge=1, description="Optimiser steps per stage and iteration."
    )
    c2_tolerance: float = Field(
        0.0,
        ge=0,
        description="Largest |log-ratio| allowed before the first update; past it the run stops.",
    )
    max_skipped_updates: int = Field(
        10, ge=1, description="Non-finite updates in a row after which the run ends."
    )
    max_unscored_iterations: int = Field(
        3,
        ge=1,
        description="Iterations in a row without a single score, every reward having failed, "
        "after which the run ends.",
    )
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Checkpoints.")
    swap_stages: bool = Field(
        False,
        description="While one stage works, the others' weights and optimiser states sleep in the "
        "CPU's memory; the result is the same to the bit.",
    )
    device: str | None = Field(
        None, description="Torch device such as cpu or cuda:0; null is CUDA where there is one."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of torch; null: its choice.")


class EvaluationConfig(ConfigModel):
    """Deterministic evaluation (ODE, fixed seeds), paired before and after."""

    every: int = Field(
        0, ge=0, description="Iterations between two evaluations; 0: only before and after."
    )
    seeds_per_prompt: int = Field(4, ge=1, description="Chains evaluated per prompt.")
    num_inference_steps: int | None = Field(
        None, ge=1, description="Denoising steps; null: each stage's own."
    )
    batch_size: int = Field(16, ge=1, description="Samples per forward pass.")
    bootstrap_samples: int = Field(2000, ge=100, description="Resamples behind an interval.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Level of the intervals.")
    weights: Literal["student", "ema"] = Field(
        "student", description="Which weights are evaluated: the trained ones or their average."
    )


class WandbConfig(ConfigModel):
    """Weights & Biases."""

    project: str = Field(description="Project name.")
    entity: str | None = Field(None, description="User or team; null: the default.")
    name: str | None = Field(None, description="Name of the run; null: the run directory's.")


class TrackioConfig(ConfigModel):
    """Trackio."""

    project: str = Field(description="Project name.")
    name: str | None = Field(None, description="Name of the run; null: the run directory's.")


class RolloutsConfig(ConfigModel):
    """Groups of training samples that are kept for the report, with rewards and advantages."""

    every: int | None = Field(
        None, ge=1, description="Iterations between two savings; null: as often as an evaluation."
    )
    groups: int = Field(
        2,
        ge=0,
        description="Prompts kept each time: the best, the worst, then evenly between; 0: none.",
    )


class LoggingConfig(ConfigModel):
    """Where metrics go besides metrics.jsonl, and what is kept to look at."""

    tensorboard: bool = Field(True, description="Write TensorBoard events to the run directory.")
    wandb: WandbConfig | None = Field(None, description="Weights & Biases; null: off.")
    trackio: TrackioConfig | None = Field(None, description="Trackio; null: off.")
    rollouts: RolloutsConfig = Field(RolloutsConfig(), description="Samples kept to look at.")


_NO_NUMBERS_AT_FIRST: Mapping[str, Any] = {"output_dir": True, "logging": True, "guards": True}
"""What the fingerprints of older run directories leave out."""
_SERVING = {"url", "in_flight", "retries", "request_timeout_s", "wait_s"}
_NO_NUMBERS: Mapping[str, Any] = {
    **_NO_NUMBERS_AT_FIRST,
    "training": {"max_unscored_iterations"},
    "rewards": {"__all__": {"server": _SERVING}},
}
"""What can differ between runs that give the same numbers."""


class RunConfig(ConfigModel):
    """Everything that a run is told."""

    seed: int = Field(0, ge=0, description="Seed of the run; every draw of noise derives from it.")
    output_dir: Path = Field(description="Run directory; relative to the working directory.")
    workflow: str = Field(
        "image_video.t2i_i2v", min_length=1, description="Id under which the chain is served."
    )
    stages: dict[str, StageConfig] = Field(
        min_length=1, description="The chain in order: stage name → stage."
    )
    data: DataConfig = Field(description="Prompts.")
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="Terms of the reward.")
    credit: CreditConfig = Field(CreditConfig(), description="Credit assignment.")
    training: TrainingConfig = Field(TrainingConfig(), description="The outer loop.")
    evaluation: EvaluationConfig = Field(EvaluationConfig(), description="Evaluation.")
    guards: GuardsConfig = Field(GuardsConfig(), description="What shows that a reward is hacked.")
    logging: LoggingConfig = Field(LoggingConfig(), description="Metrics.")

    @model_validator(mode="after")
    def _check_chain(self) -> Self:
        for position, (name, stage) in enumerate(self.stages.items()):
            if STAGE_NAME.fullmatch(name) is None:
                raise ValueError(
                    f"stage name {name!r} is not usable; use lower-case letters, digits and _"
                )
            if name in self._prompt_keys():
                raise ValueError(
                    f"a stage cannot be called {name!r}, which is a key of prompt files; rename it"
                )
            if position > 0 and stage.task == "t2i":
                before = list(self.stages)[position - 1]
                raise ValueError(
                    f"stage '{name}' (t2i) comes after stage '{before}', but an image stage takes "
                    "no picture; put it first"
                )
        if all(stage.freeze for stage in self.stages.values()):
            raise ValueError("every stage is frozen, so nothing trains; unfreeze one")
        return self

    def _prompt_keys(self) -> tuple[str, ...]:
        """Return the keys of a ``.jsonl`` line that name no stage."""
        first = next(iter(self.stages.values()))
        return ("prompt", FIRST_FRAME_KEY) if first.task == "i2v" else ("prompt",)

    @model_validator(mode="after")
    def _check_credit(self) -> Self:
        samples = {name: stage.samples for name, stage in self.stages.items()}
        if self.credit.rule == "nested":
            for position, (name, count) in enumerate(samples.items()):
                if count == 1 and (position > 0 or not self.stages[name].freeze):
                    raise ValueError(
                        f"stages.{name}.samples is 1, but credit.rule 'nested' compares siblings "
                        "and needs at least 2; raise it or use credit.rule: shared"
                    )
        elif all(count == 1 for count in samples.values()):
            raise ValueError(
                "every stage makes 1 sample, so there is nothing to compare a reward with; "
                "raise stages.*.samples"
            )
        trained = [name for name, stage in self.stages.items() if not stage.freeze]
        fault = credit_fault(self.rewards, samples, trained, self.credit.combine)
        if fault is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for index, reward in enumerate(self.rewards):
            if reward.on is not None and reward.on not in self.stages:
                raise ValueError(
                    f"rewards.{index}.on is {reward.on!r}, which is no stage; "
                    f"expected one of {', '.join(self.stages)}"
                )
        fault = unknown_threshold(self.guards, {name: s.task for name, s in self.stages.items()})
        if fault is not None:
            raise ValueError(fault)
        if self.evaluation.weights == "ema":
            missing = [
                name
                for name, stage in self.stages.items()
                if not stage.freeze and stage.ema.decay is None
            ]
            if missing:
                raise ValueError(
                    f"evaluation.weights is 'ema', but stages.{missing[0]}.ema.decay is null; "
                    "set it or use evaluation.weights: student"
                )
        return self

    def fingerprint(self, *, as_written: bool = False, as_at_first: bool = False) -> str:
        """Return a digest of what decides the run's numbers.

        That is all but output, logs, guards, patience, and where and how servers are asked.

        Parameters
        ----------
        as_written
            Leave out what the file does not say: of a file that a run wrote before a key was
            added, it is the fingerprint of that time.
        as_at_first
            Count patience and servers' addresses, as the first run directories did.
        """
        exclude = _NO_NUMBERS_AT_FIRST if as_at_first else _NO_NUMBERS
        content = self.model_dump(mode="json", exclude=dict(exclude), exclude_unset=as_written)
        content["stages"] = list(content["stages"].items())  # their order is part of the chain
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def fingerprints(self) -> set[str]:
        """Return every fingerprint that a run of this configuration may have, older ones too."""
        return {
            self.fingerprint(as_written=as_written, as_at_first=as_at_first)
            for as_written in (False, True)
            for as_at_first in (False, True)
        }

    def dump_yaml(self) -> str:
        """Return the configuration as YAML that `load_config` reads back to an equal one."""
        return dump_yaml(self.model_dump(mode="json"))
