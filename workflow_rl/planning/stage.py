"""One stage of the plan: its size, its parameters, its bytes and its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workflow_rl.config import StageConfig
from workflow_rl.planning.costs import Passes, StageModel, passes_of
from workflow_rl.planning.memory import StageMemory, stage_memory
from workflow_rl.planning.modules import num_parameters
from workflow_rl.planning.texts import TextLengths
from workflow_rl.planning.work import Work


@dataclass(frozen=True)
class StageNumbers:
    """One stage of the plan.

    ``parameters`` are by component, those of a LoRA not among them; ``flops`` are of one iteration
    on the busiest GPU, by cause.
    """

    name: str
    source: str
    size: str
    dtype: str
    parameters: Mapping[str, int]
    trainable: int
    trains: str
    work: Work
    memory: StageMemory
    flops: Mapping[str, int]

    @property
    def total_flops(self) -> int:
        """FLOPs of one iteration."""
        return sum(self.flops.values())


def count_stage(
    name: str,
    source: str,
    stage: StageConfig,
    model: StageModel,
    work: Work,
    weights_evaluated: str,
) -> StageNumbers:
    """Return the numbers of one stage; ``source`` says where its architecture is from."""
    parameters = {n: num_parameters(m) for n, m in model.modules.items()}
    if stage.lora is not None:
        for name_, parameter in model.trained.items():
            parameters[name_.partition(".")[0]] -= parameter.numel()
    return StageNumbers(
        name=name,
        source=source,
        size=model.size.text,
        dtype=stage.dtype,
        parameters=parameters,
        trainable=sum(p.numel() for p in model.trained.values()),
        trains=_trains(stage),
        work=work,
        memory=stage_memory(stage, model, work, weights_evaluated),
        flops=stage_flops(stage, model, work),
    )


def stage_flops(stage: StageConfig, model: StageModel, work: Work) -> dict[str, int]:
    """Return the FLOPs of an iteration by cause; a multiply-add is 2."""
    passes = passes_of(stage, model)
    rolled, trained_on = (
        usual_tokens(model.texts, passes, -(-batch * work.prompts // work.samples))
        for batch in (work.rollout_batch, work.training_batch)
    )
    step = model.step(work.rollout_batch, passes, rolled).flops // work.rollout_batch
    plain, used = (
        model.training_step(
            work.training_batch, passes, trained_on, checkpointing=checkpointing
        ).flops
        // work.training_batch
        for checkpointing in (False, stage.memory.gradient_checkpointing)
    )
    trained = work.samples * work.trained_steps * work.updates
    images = max(1, min(work.rollout_batch, work.conditions))
    return {
        "text": work.texts * model.text().flops,
        "image": work.conditions * model.image().flops,
        "encode": work.conditions * model.encode(images, stage).flops // images,
        "rollout": work.samples * work.steps * step,
        "decode": work.samples
        * model.decode(work.rollout_batch, stage).flops
        // work.rollout_batch,
        "reference": trained * step if work.with_reference else 0,
        "training": trained * plain,
        "recomputation": trained * (used - plain),
    }


def usual_tokens(texts: TextLengths | None, passes: Passes, prompts: int) -> int | None:
    """Return the text tokens of a pass of a batch of ``prompts``, on average; None: the limit.

    Of two passes in one the longer text counts for both.
    """
    if texts is None:
        return None
    usual = texts.usual(prompts)
    if passes == "sequential":
        return -(-(usual + texts.negative) // 2)
    return max(usual, texts.negative) if passes == "batched" else usual


def _trains(stage: StageConfig) -> str:
    if stage.freeze:
        return "nothing (frozen)"
    if stage.lora is not None:
        return f"LoRA of rank {stage.lora.rank}"
    return ", ".join(stage.train_modules) if stage.train_modules else "all weights"
