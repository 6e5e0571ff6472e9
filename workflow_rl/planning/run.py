"""What a whole run needs, on given GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from workflow_rl.config import RunConfig, StageConfig
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.model_folder import check_model_json
from workflow_rl.errors import UserError
from workflow_rl.planning.architecture import Architecture
from workflow_rl.planning.costs import StageModel, passes_of
from workflow_rl.planning.inputs import TRANSFORMER_INPUTS
from workflow_rl.planning.modules import build_modules, policies_of, select_trained
from workflow_rl.planning.sizes import Geometry, geometry
from workflow_rl.planning.stage import StageNumbers, count_stage
from workflow_rl.planning.texts import TextLengths
from workflow_rl.planning.work import Prompts, stage_work

GIGABYTE = 10**9
HOST_BANDWIDTH = 25 * GIGABYTE
"""Bytes a second between the memories of CPU and GPU: PCIe 4.0 x16 as it is reached in practice."""
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Hardware:
    """What the run would have.

    ``gpu_memory`` are bytes per GPU, ``peak_tflops`` the GPU's, of which ``utilisation`` is
    reached.
    """

    gpus: int
    gpu_memory: int
    peak_tflops: float
    utilisation: float


@dataclass(frozen=True)
class Bottleneck:
    """The peak of a run: its bytes, and the stage and the phase that need them."""

    bytes: int
    stage: str
    phase: str


@dataclass(frozen=True)
class RunNumbers:
    """The plan: every stage, and the chain on one GPU. Every GPU holds the whole chain."""

    stages: tuple[StageNumbers, ...]
    swap_stages: bool
    hardware: Hardware

    @property
    def embeddings(self) -> int:
        """Bytes of cached text embeddings, which stay on the GPU."""
        return sum(stage.memory.embeddings for stage in self.stages)

    def bottleneck(self, *, swapped: bool) -> Bottleneck:
        """Return the peak per GPU, with only the working stage on it or with all of them."""
        return max(self.bottlenecks(swapped=swapped), key=lambda bottleneck: bottleneck.bytes)

    def bottlenecks(self, *, swapped: bool) -> list[Bottleneck]:
        """Return the peak per GPU of every phase of every stage."""
        found = []
        for stage in self.stages:
            others = [s.memory for s in self.stages if s is not stage and not swapped]
            for phase, extra in stage.memory.phases.items():
                held = sum(memory.resident for memory in others)
                if phase == "evaluation":
                    held += sum(memory.evaluation_copy for memory in others)
                if phase == "start":  # all stages are loaded before text encoders are dropped
                    held += sum(memory.dropped for memory in others)
                total = self.embeddings + held + stage.memory.resident + extra
                found.append(Bottleneck(total, stage.name, phase))
        return found

    @property
    def peak(self) -> Bottleneck:
        """The peak per GPU of the run as configured."""
        return self.bottleneck(swapped=self.swap_stages)

    @property
    def fits(self) -> bool:
        """Say whether the peak is within the memory of a GPU."""
        return self.peak.bytes <= self.hardware.gpu_memory

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory per GPU: trajectories, media, and stages that sleep."""
        resident = [stage.memory.resident for stage in self.stages]
        asleep = sum(resident) - min(resident) if self.swap_stages else 0
        return asleep + max(self.iteration_host_bytes, self.evaluation_host_bytes)

    @property
    def iteration_host_bytes(self) -> int:
        """Bytes of CPU memory that an iteration takes: it keeps most of them until the next one."""
        made, most = 0, 0
        for stage in self.stages:
            made += stage.memory.trajectories + stage.memory.media
            most = max(most, made + stage.memory.joining)
        return most

    @property
    def evaluation_host_bytes(self) -> int:
        """Bytes of CPU memory of an evaluation, with those of the iteration before it."""
        memories = [stage.memory for stage in self.stages]
        held = sum(m.trajectories + m.media + m.evaluation_media for m in memories)
        return held + max(m.evaluation_joining for m in memories)

    def host_bytes_in(self, phase: Bottleneck) -> int:
        """Return the bytes of CPU memory in one phase of an iteration.

        While a stage samples, what was made before its last batch is there; then, what all made.
        """
        made = 0
        for stage in self.stages:
            memory = stage.memory
            if stage.name == phase.stage and phase.phase in ("encode", "rollout", "decode"):
                several = stage.work.samples > stage.work.rollout_batch
                made += memory.trajectories - memory.captured
                return made + (memory.media if several else 0)
            made += memory.trajectories + memory.media
        return made

    @property
    def total_flops(self) -> int:
        """FLOPs of one iteration on the busiest GPU."""
        return sum(stage.total_flops for stage in self.stages)

    @property
    def compute_seconds(self) -> float:
        """Estimated time of the FLOPs of an iteration."""
        return self.total_flops / (self.hardware.peak_tflops * 1e12 * self.hardware.utilisation)

    @property
    def swap_seconds(self) -> float:
        """Estimated time of moving stages in an iteration: each works twice, but for frozen ones.

        A stage goes to sleep before the next one wakes.
        """
        if not self.swap_stages or len(self.stages) < 2:
            return 0.0
        moved = 0
        for stage in self.stages:
            turns = 2 if stage.trainable else 1
            moved += 2 * turns * stage.memory.resident
        return moved / HOST_BANDWIDTH

    @property
    def seconds(self) -> float:
        """Estimated time of an iteration, without rewards and the exchange of gradients."""
        return self.compute_seconds + self.swap_seconds


@dataclass
class Planner:
    """Counts configurations that name the same models; what they share is counted once.

    Parameters
    ----------
    architectures
        By stage.
    num_prompts, num_evaluated
        Distinct prompts of the run, and those of an evaluation.
    texts
        Lengths of the run's texts, by stage; a stage that is not there is counted at the limit.
    on_stage
        Called with a stage's name before a model is built.
    """

    architectures: Mapping[str, Architecture]
    num_prompts: int
    num_evaluated: int
    texts: Mapping[str, TextLengths] = field(default_factory=dict)
    on_stage: Callable[[str], None] = lambda name: None
    _models: dict[tuple[Any, ...], StageModel] = field(default_factory=dict)

    def count(self, config: RunConfig, hardware: Hardware) -> RunNumbers:
        """Return the plan of a run.

        Raises
        ------
        UserError
            For a model that can't be planned, a size that it can't make, or a LoRA or
            ``train_modules`` that name nothing.
        """
        per_gpu = -(-config.data.prompts_per_iteration // hardware.gpus)
        prompts = Prompts(per_gpu, self.num_prompts, self.num_evaluated)
        parents = per_gpu
        before: Geometry | None = None
        stages = []
        for name, stage in config.stages.items():
            model = self._model(name, stage, before)
            guided = passes_of(stage, model) != "one"
            work = stage_work(config, stage, parents, prompts, guided=guided)
            source = self.architectures[name].source
            stages.append(count_stage(name, source, stage, model, work, config.evaluation.weights))
            parents, before = work.samples, model.size
        return RunNumbers(tuple(stages), config.training.swap_stages, hardware)

    def _model(self, name: str, stage: StageConfig, before: Geometry | None) -> StageModel:
        """Return the stage's model; one whose configuration differs in what it is not made of."""
        parts = stage.model_dump_json(
            include={"task", "dtype", "lora", "train_modules", "freeze"}
            | {"height", "width", "num_frames", "max_sequence_length"}
        )
        key = (name, parts, before)
        if key not in self._models:
            self.on_stage(name)
            architecture = self.architectures[name]
            family = FAMILIES.get(architecture.pipeline)
            if family is not None:
                check_model_json(
                    architecture.read, architecture.source, f"stages.{name}.model", stage
                )
            modules = build_modules(architecture, DTYPES[stage.dtype])
            check_modules(name, architecture, modules)
            texts = self.texts.get(name)
            longest = None if texts is None else texts.longest
            size = geometry(name, architecture, stage, modules, before, longest)
            targets = lora_targets(architecture, stage, name)
            trained = select_trained(policies_of(modules), stage, targets, f"stages.{name}")
            cfg_above = 1.0 if family is None else family.cfg_above
            self._models[key] = StageModel(modules, trained, size, cfg_above, texts)
        return self._models[key]


def check_modules(
    name: str, architecture: Architecture, modules: Mapping[str, torch.nn.Module]
) -> None:
    """Raise a UserError unless the model has what is planned, in classes that can be."""
    family = FAMILIES.get(architecture.pipeline)
    parts = ("transformer", "vae") if family is None else family.parts(architecture.read)
    planned = [part for part in parts if part in ("transformer", "vae") or "encoder" in part]
    missing = [part for part in planned if part not in modules]
    if missing:
        raise UserError(
            f"stages.{name}.model: {architecture.source} has no {missing[0]}/config.json; "
            "download the model's JSON files again"
        )
    found = type(modules["transformer"]).__name__
    if found not in TRANSFORMER_INPUTS:
        raise UserError(
            f"stages.{name}.model: {architecture.source} has a {found}, which can't be planned; "
            f"those that can are {', '.join(TRANSFORMER_INPUTS)}"
        )


def lora_targets(architecture: Architecture, stage: StageConfig, name: str) -> tuple[str, ...]:
    """Return the family's default targets; they matter only where the stage names none.

    Raises
    ------
    UserError
        If it names none and there are no defaults.
    """
    family = FAMILIES.get(architecture.pipeline)
    if family is not None:
        return tuple(family.lora_targets)
    if stage.lora is not None and stage.lora.targets is None and stage.lora.init is None:
        raise UserError(
            f"stages.{name}.lora.targets is null, but {architecture.pipeline} has no default; "
            "name endings of layers such as to_q"
        )
    return ()
