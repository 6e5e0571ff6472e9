"""Runs a chain: grows a tree of samples under each prompt, threading artifacts through stages.

Serving and training both grow their trees here; they differ in the profile alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from workflow_rl.config import PromptRecord
from workflow_rl.enums import ExecutionProfile, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance
from workflow_rl.loop.contracts import LoopOutput
from workflow_rl.loop.record import BehaviourRecord
from workflow_rl.request import DiffusionParams, Request, SampleId, make_request
from workflow_rl.runtime.driver import OnProgress
from workflow_rl.runtime.engine import run_requests
from workflow_rl.workflow.first_frames import load_first_frames
from workflow_rl.workflow.workflow import TAKES_IMAGE, Workflow, WorkflowStage


@dataclass(frozen=True)
class StagePlan:
    """How one stage of a chain is sampled.

    Parameters
    ----------
    params
        Sampling parameters.
    samples
        Outputs per input: K images per prompt, M videos per image.
    slots
        Requests per batch.
    negative_prompt
        Text to steer away from, where guidance is classifier-free.
    """

    params: DiffusionParams
    samples: int = 1
    slots: int = 16
    negative_prompt: str | None = None


@dataclass(frozen=True)
class StageOutput:
    """What one stage made for all prompts, in tree order.

    ``media`` [N, ...] in [0, 1] on CPU; ``parents`` are rows of the stage before (of the prompts,
    for the first stage); ``fps`` is the frames per second of videos.
    """

    stage: WorkflowStage
    media_kind: MediaKind
    requests: tuple[Request, ...]
    parents: tuple[int, ...]
    media: torch.Tensor
    record: BehaviourRecord | None
    fps: float | None = None


def conditioning_image(media: torch.Tensor, kind: MediaKind) -> torch.Tensor:
    """Return what the next stage is conditioned on: the image, or a video's last frame.

    ``media`` [C, H, W] or [C, T, H, W]; the result is [C, H, W].
    """
    return media if kind is MediaKind.IMAGE else media[:, -1].contiguous()


def run_chain(
    workflow: Workflow,
    instances: Mapping[str, ModelInstance],
    plans: Mapping[str, StagePlan],
    prompts: Sequence[PromptRecord],
    seeds: Sequence[int],
    *,
    profiles: Mapping[str, ExecutionProfile],
    draw: int = 0,
    on_progress: Callable[[str], OnProgress] | None = None,
    wake: Callable[[str], None] | None = None,
    on_made: Callable[[StageOutput], None] | None = None,
) -> list[StageOutput]:
    """Sample a tree under each prompt.

    Parameters
    ----------
    instances, plans, profiles
        By stage name; a profile is ``SERVE`` or ``ROLLOUT``.
    prompts, seeds
        One of each per tree; the seed is the run seed of the tree's noise identities. Where the
        first stage is conditioned on an image, each prompt has a first frame.
    draw
        Which visit of the prompts this is; another draw gives other noise.
    on_progress
        Gives a progress callback for a stage's name.
    wake
        Called with a stage's name before it works.
    on_made
        Given each batch of a stage as soon as it is made: the next rows of the stage's output,
        without a record.

    Returns
    -------
    list of StageOutput
        One per stage; sample (p, i, j) is at row ``(p * K + i) * M + j`` of the second.

    Raises
    ------
    UserError
        If there is no prompt, prompts and seeds differ in number, or first frames are missing,
        cannot be read, differ in size or are given to a stage that takes none.
    """
    _check_prompts(prompts, seeds)
    first = workflow.stages[0]
    images = load_first_frames(first, plans[first.name].params, prompts)
    outputs: list[StageOutput] = []
    ids = [_root(prompt, seed, draw) for prompt, seed in zip(prompts, seeds, strict=True)]
    texts: list[PromptRecord] = list(prompts)
    for stage in workflow.stages:
        plan = plans[stage.name]
        parents = [row for row in range(len(ids)) for _ in range(plan.samples)]
        ids = _children(ids, plan.samples)
        texts = [texts[row] for row in parents]
        takes_image = stage.task in TAKES_IMAGE
        conditions = [images[row] if takes_image else None for row in parents]
        requests = _stage_requests(stage, plan, ids, texts, conditions)
        instance = instances[stage.name]
        if wake is not None:
            wake(stage.name)
        made = StageOutput(
            stage,
            instance.adapter.media_kind,
            tuple(requests),
            tuple(parents),
            torch.empty(0),
            None,
            instance.adapter.resolve(requests[0]).fps,
        )
        media, record = run_requests(
            instance,
            stage.loop_id,
            requests,
            slots=plan.slots,
            profile=profiles[stage.name],
            on_progress=on_progress(stage.name) if on_progress else None,
            on_output=partial(_tell, on_made, made) if on_made else None,
        )
        outputs.append(replace(made, media=media, record=record))
        images = [conditioning_image(sample, made.media_kind) for sample in media]
    return outputs


def _tell(
    on_made: Callable[[StageOutput], None], stage: StageOutput, start: int, output: LoopOutput
) -> None:
    """Tell of the rows of a stage that a batch made; ``stage`` has no media yet."""
    rows = slice(start, start + len(output.media))
    on_made(
        replace(
            stage,
            requests=stage.requests[rows],
            parents=stage.parents[rows],
            media=output.media,
        )
    )


def _check_prompts(prompts: Sequence[PromptRecord], seeds: Sequence[int]) -> None:
    if len(prompts) != len(seeds):
        raise UserError(f"{len(prompts)} prompts but {len(seeds)} seeds; give one seed per prompt")
    if not prompts:
        raise UserError("there is no prompt; give at least one")


def _root(prompt: PromptRecord, seed: int, draw: int) -> SampleId:
    """Return the identity that a prompt's tree grows from: the prompt and its first frame."""
    frame = prompt.first_frame
    return SampleId(seed, prompt.prompt, () if frame is None else (frame.digest,), draw)


def _children(parents: Sequence[SampleId], samples: int) -> list[SampleId]:
    """Return ``samples`` children of each parent, in order.

    A prompt that is in a batch twice has two equal roots: the children of the second are numbered
    on from those of the first, so that no two samples are twins.
    """
    made: Counter[SampleId] = Counter()
    children = []
    for parent in parents:
        children += [parent.child(made[parent] + i) for i in range(samples)]
        made[parent] += samples
    return children


def _stage_requests(
    stage: WorkflowStage,
    plan: StagePlan,
    ids: Sequence[SampleId],
    texts: Sequence[PromptRecord],
    images: Sequence[torch.Tensor | None],
) -> list[Request]:
    """Return one request per sample, with its own text for the stage."""
    return [
        make_request(
            stage.task,
            text.text_for(stage.name),
            sample=sample,
            params=plan.params,
            negative_prompt=plan.negative_prompt,
            image=image,
            stage=stage.name,
        )
        for sample, text, image in zip(ids, texts, images, strict=True)
    ]


def joined_shots(outputs: Sequence[StageOutput], row: int) -> torch.Tensor:
    """Return the videos that lead to sample ``row`` of the last stage as one [C, T, H, W].

    Every video but the first begins with the last frame of the one before it, which is shown once.

    Parameters
    ----------
    outputs
        The stages of a chain, in order; those that make images are passed over.
    """
    shots: list[torch.Tensor] = []
    for output in reversed(outputs):
        if output.media_kind is MediaKind.VIDEO:
            shots.insert(0, output.media[row])
        row = output.parents[row]
    return torch.cat([shots[0], *(shot[:, 1:] for shot in shots[1:])], dim=1)
