"""A run as training leaves it, without the training: shaken weights in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.models.contract import STEPS, FamilyCase, StockCall, random_latents
from workflow_rl.config import RunConfig
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.enums import ExecutionProfile
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_card
from workflow_rl.request import TaskType
from workflow_rl.serving.chain import load_chain, publish_run
from workflow_rl.training.checkpoint import save_checkpoint
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.weight_sync import WeightRole

ITERATION = 7
LORA = {"rank": 3, "alpha": 5.0, "targets": "all-linear"}


@dataclass(frozen=True)
class TinyRun:
    """A run directory of a one-stage chain, whose stage is named by its task."""

    case: FamilyCase
    dir: Path
    config: RunConfig

    @property
    def stage(self) -> str:
        """Name of the stage."""
        return self.case.task

    @property
    def model(self) -> Path:
        """The base model's folder."""
        folder = self.config.stages[self.stage].model
        assert folder is not None
        return folder

    def served(self, role: WeightRole) -> ModelInstance:
        """Return an instance that serves the run's weights."""
        chain = load_chain(self.config.workflow, self.config.stages, "cpu")
        publish_run(chain, self.dir, role, on_skip=print)
        return chain.instances[self.stage]

    def made_by_us(self, role: WeightRole = WeightRole.STUDENT) -> torch.Tensor:
        """Return what the served run makes, for the case's two requests."""
        instance = self.served(role)
        latents = random_latents(instance, self.case.requests()[0])
        requests = self.case.requests(latents, sampler="checkpoint")
        return rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)[0]

    @property
    def untrained(self) -> ModelInstance:
        """An instance of the base model."""
        return _untrained(self.case.task, self.model, self.config.stages[self.stage].variant)

    @property
    def made_by_base(self) -> torch.Tensor:
        """What the stock pipeline of the base model makes."""
        return _made_by_base(self.model, lambda: self.made_by_stock(self.base()))

    def made_by_stock(self, pipeline: Any) -> torch.Tensor:
        """Return what a stock pipeline makes of the same requests and latents."""
        instance, requests = self.untrained, self.case.requests()
        latents = random_latents(instance, requests[0])
        pipeline.set_progress_bar_config(disable=True)
        made = [
            self.case.stock(
                StockCall(
                    pipeline,
                    request.prompt,
                    row,
                    request.image_CHW,
                    instance.adapter.resolve(request),
                    request.negative_prompt,
                )
            )
            for request, row in zip(requests, latents, strict=True)
        ]
        return torch.stack(made)

    def base(self) -> Any:
        """Return the stock pipeline of the base model."""
        return self.case.pipeline_class.from_pretrained(self.model)


@cache
def _untrained(task: str, model: Path, variant: str | None) -> ModelInstance:
    return load_card(replace(build_card(model, TaskType(task)), variant=variant))


_bases: dict[Path, torch.Tensor] = {}


def _made_by_base(model: Path, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what runs of one model begin with, made once."""
    if model not in _bases:
        _bases[model] = make()
    return _bases[model]


def make_run(
    case: FamilyCase,
    model: Path,
    run_dir: Path,
    *,
    top: Mapping[str, Any] | None = None,
    **stage: Any,
) -> TinyRun:
    """Make a run of ``model`` with one checkpoint, student and EMA weights apart.

    ``stage`` is the rest of the stage's configuration, ``top`` that of the run's.
    """
    name = case.task
    options = {"task": name, "model": model, "num_inference_steps": STEPS, "samples": 2, **stage}
    options.setdefault("ema", {"decay": 0.9})
    config = RunConfig.model_validate(
        {
            "output_dir": run_dir,
            "workflow": "tiny",
            "stages": {name: options},
            "data": {"prompts": "prompts.txt"},
            "rewards": [{"name": "constant"}],
            "training": {"iterations": ITERATION},
            **(top or {}),
        }
    )
    create_run_dir(config)
    checkpoint(config, ITERATION)
    return TinyRun(case, run_dir, config)


def checkpoint(config: RunConfig, iteration: int, *, noise: float = 0.03) -> Path:
    """Save a checkpoint of weights ``noise`` away from where the stage begins.

    Much more of it makes a random model so steep that (W + BA) x and W x + B (A x), which round
    differently, part by over 1e-5.
    """
    name = next(iter(config.stages))
    begin = load_chain(config.workflow, config.stages, "cpu").instances[name]
    generator = torch.Generator().manual_seed(iteration)
    tensors = {}
    for folder in ("weights", "ema"):
        for component in begin.card.policies:
            for parameter, value in begin.adapter.trainable(component).items():
                shaken = value.detach().float()
                shaken = shaken + noise * torch.randn(shaken.shape, generator=generator)
                tensors[f"{name}/{folder}/{component}.{parameter}"] = shaken
    return save_checkpoint(
        config.output_dir / "checkpoints", iteration, tensors, {"method": {}}, keep=2
    )
