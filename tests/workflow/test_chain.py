"""A chain grows a tree: its order, its identities, and what passes from stage to stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from PIL import Image

from tests.fake_models import NUM_FRAMES, fake_instance
from workflow_rl.config import PromptRecord
from workflow_rl.config.first_frames import FirstFrame, find_first_frame
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.evaluation.chain import stage_media
from workflow_rl.request import DiffusionParams, SampleId, TaskType
from workflow_rl.runtime.driver import OnProgress, ProgressEvent
from workflow_rl.workflow import (
    StageOutput,
    StagePlan,
    Workflow,
    WorkflowStage,
    joined_shots,
    run_chain,
)

PROMPTS = [PromptRecord("a cat"), PromptRecord("a dog")]
SEEDS = [3, 4]
SAMPLES = {"t2i": 2, "i2v": 3, "more": 2}
THREE = Workflow(
    "three",
    (
        WorkflowStage("t2i", TaskType.T2I),
        WorkflowStage("i2v", TaskType.I2V),
        WorkflowStage("more", TaskType.I2V),
    ),
)


def _run(
    workflow: Workflow = THREE,
    prompts: list[PromptRecord] = PROMPTS,
    slots: int = 4,
    on_progress: OnProgress | None = None,
    profile: ExecutionProfile = ExecutionProfile.SERVE,
    draw: int = 0,
    seeds: list[int] = SEEDS,
    size: tuple[int, int] | None = None,
    fps: float | None = None,
) -> list[StageOutput]:
    height, width = size or (None, None)
    params = DiffusionParams(
        num_inference_steps=2, sde_steps=(0,), height=height, width=width, fps=fps
    )
    return run_chain(
        workflow,
        {stage.name: fake_instance(stage.task, stage.name) for stage in workflow.stages},
        {s.name: StagePlan(params, SAMPLES[s.name], slots) for s in workflow.stages},
        prompts,
        seeds[: len(prompts)],
        profiles={stage.name: profile for stage in workflow.stages},
        draw=draw,
        on_progress=None if on_progress is None else lambda stage: on_progress,
    )


def test_sample_p_i_j_is_at_its_row() -> None:
    t2i, i2v, more = _run()
    images, videos, last = (SAMPLES[name] for name in ("t2i", "i2v", "more"))
    assert [len(output.media) for output in (t2i, i2v, more)] == [4, 12, 24]
    for p, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        for i in range(images):
            row = p * images + i
            assert t2i.requests[row].sample == SampleId(seed, prompt.prompt, (i,))
            assert t2i.parents[row] == p
            for j in range(videos):
                row = (p * images + i) * videos + j
                assert i2v.requests[row].sample == SampleId(seed, prompt.prompt, (i, j))
                assert i2v.parents[row] == p * images + i
                for k in range(last):
                    leaf = row * last + k
                    assert more.requests[leaf].sample.path == (i, j, k)
                    assert more.parents[leaf] == row


def test_each_stage_starts_from_what_its_parent_made() -> None:
    t2i, i2v, more = _run()
    for request, parent in zip(i2v.requests, i2v.parents, strict=True):
        assert request.image_CHW is not None
        assert torch.equal(request.image_CHW, t2i.media[parent])
    for request, parent in zip(more.requests, more.parents, strict=True):
        assert request.image_CHW is not None
        assert torch.equal(request.image_CHW, i2v.media[parent][:, -1])
    assert all(request.image_CHW is None for request in t2i.requests)


def test_siblings_share_one_image_object() -> None:
    """Else the image is encoded once per video, not once per image."""
    for output in _run()[1:]:
        objects: dict[int, set[int]] = {}
        for request, parent in zip(output.requests, output.parents, strict=True):
            objects.setdefault(parent, set()).add(id(request.image_CHW))
        assert all(len(ids) == 1 for ids in objects.values())
        assert len(set.union(*objects.values())) == len(objects)


def test_a_stage_gets_its_own_text_and_the_identity_the_chain_s_prompt() -> None:
    own = PromptRecord("a fox runs", MappingProxyType({"t2i": "a fox, photo", "more": "go on"}))
    t2i, i2v, more = _run(prompts=[own])
    assert {request.prompt for request in t2i.requests} == {"a fox, photo"}
    assert {request.prompt for request in i2v.requests} == {"a fox runs"}
    assert {request.prompt for request in more.requests} == {"go on"}
    for output in (t2i, i2v, more):
        assert {request.sample.prompt for request in output.requests} == {"a fox runs"}
        assert {request.stage for request in output.requests} == {output.stage.name}


def test_the_tree_does_not_depend_on_the_batches_but_on_the_draw() -> None:
    one, many, other = _run(slots=1), _run(slots=5), _run(draw=1)
    for a, b, c in zip(one, many, other, strict=True):
        assert torch.equal(a.media, b.media)
        assert not torch.equal(a.media, c.media)


def test_only_a_rollout_leaves_records() -> None:
    assert [output.record for output in _run()] == [None] * 3
    for output in _run(profile=ExecutionProfile.ROLLOUT):
        assert output.record is not None
        assert output.record.samples == tuple(request.sample for request in output.requests)


def test_progress_counts_every_step_of_every_batch() -> None:
    events: list[ProgressEvent] = []
    _run(slots=4, on_progress=events.append)
    for stage, samples in (("t2i", 4), ("i2v", 12), ("more", 24)):
        mine = [event for event in events if event.model_id == stage]
        assert [event.step for event in mine] == [1, 2] * (samples // 4)
        assert {(event.num_steps, event.batch_size) for event in mine} == {(2, 4)}


def test_the_frame_rate_comes_with_the_videos_to_the_rewards() -> None:
    outputs = _run(prompts=PROMPTS[:1], fps=24.0)
    assert [output.fps for output in outputs] == [24.0] * 3
    assert [media.batch.fps for media in stage_media(outputs).values()] == [24.0] * 3


VIDEOS = Workflow(
    "videos", (WorkflowStage("i2v", TaskType.I2V), WorkflowStage("more", TaskType.I2V))
)


@pytest.fixture
def frame(tmp_path: Path) -> Callable[..., FirstFrame]:
    def make(name: str, colour: str, size: tuple[int, int] = (6, 4)) -> FirstFrame:
        Image.new("RGB", size, colour).save(tmp_path / name)
        return find_first_frame(tmp_path / name, "test")

    return make


def test_a_chain_begins_with_given_frames(frame: Callable[..., FirstFrame]) -> None:
    prompts = [PromptRecord("a cat", first_frame=frame(f"{c}.png", c)) for c in ("red", "blue")]
    i2v, more = _run(VIDEOS, prompts, seeds=[3, 3])
    pixels = [request.image_CHW for request in i2v.requests]
    assert all(image is not None and image.shape == (3, 4, 6) for image in pixels)
    means = [image.mean((1, 2)).tolist() for image in pixels if image is not None]
    assert means == [[1, 0, 0]] * SAMPLES["i2v"] + [[0, 0, 1]] * SAMPLES["i2v"]
    assert len({id(image) for image in pixels}) == 2
    for request, parent in zip(more.requests, more.parents, strict=True):
        assert request.image_CHW is not None
        assert torch.equal(request.image_CHW, i2v.media[parent][:, -1])


def test_the_frame_is_part_of_who_a_sample_is(
    frame: Callable[..., FirstFrame], tmp_path: Path
) -> None:
    red, blue = (PromptRecord("a cat", first_frame=frame(f"{c}.png", c)) for c in ("red", "blue"))
    (one, _), (other, _) = _run(VIDEOS, [red, blue], seeds=[3, 3]), _run(VIDEOS, [blue])
    videos = SAMPLES["i2v"]
    assert len({request.sample for request in one.requests}) == 2 * videos
    assert not torch.equal(one.media[:videos], one.media[videos:])
    assert torch.equal(one.media[videos:], other.media)
    moved = PromptRecord("a cat", first_frame=frame("moved.png", "blue"))
    assert torch.equal(_run(VIDEOS, [moved])[0].media, other.media)


def test_seeds_of_one_frame_share_its_object(frame: Callable[..., FirstFrame]) -> None:
    red = PromptRecord("a cat", first_frame=frame("red.png", "red"))
    i2v, _ = _run(VIDEOS, [red, red], size=(8, 2))
    assert len({id(request.image_CHW) for request in i2v.requests}) == 1
    assert i2v.requests[0].image_CHW is not None
    assert i2v.requests[0].image_CHW.shape == (3, 8, 2)


def test_a_prompt_that_comes_twice_in_a_batch_makes_other_samples() -> None:
    twice = _run(prompts=[PROMPTS[0], PROMPTS[0]], seeds=[3, 3])
    once = _run(prompts=[PROMPTS[0]])
    for two, one in zip(twice, once, strict=True):
        half = len(one.media)
        assert torch.equal(two.media[:half], one.media)
        assert [r.sample for r in two.requests[:half]] == [r.sample for r in one.requests]
        assert len({request.sample for request in two.requests}) == 2 * half
        assert len(two.media.unique(dim=0)) == 2 * half
    other_seed = _run(prompts=[PROMPTS[0], PROMPTS[0]])
    assert [r.sample.path for r in other_seed[0].requests] == [(0,), (1,)] * 2


def test_two_stages_of_one_task_draw_their_own_noise() -> None:
    first, second = (
        _run(Workflow(name, (THREE.stages[0], WorkflowStage(name, TaskType.I2V))))[1]
        for name in ("i2v", "more")
    )
    assert first.requests[0].sample == second.requests[0].sample
    assert not torch.equal(first.media[0], second.media[0])


def test_joined_shots_show_the_shared_frame_once() -> None:
    outputs = _run()
    _, i2v, more = outputs
    row = 9
    joined = joined_shots(outputs, row)
    first = i2v.media[more.parents[row]]
    assert joined.shape[1] == 2 * NUM_FRAMES - 1
    assert torch.equal(joined[:, :NUM_FRAMES], first)
    assert torch.equal(joined[:, NUM_FRAMES:], more.media[row][:, 1:])


def test_what_cannot_be_run_is_refused(frame: Callable[..., FirstFrame]) -> None:
    small = PromptRecord("a cat", first_frame=frame("small.png", "red", size=(2, 2)))
    large = PromptRecord("a dog", first_frame=frame("large.png", "red", size=(4, 4)))
    with pytest.raises(UserError, match="stage 'i2v' starts from an image, but 'a dog' has no"):
        _run(VIDEOS, [small, PROMPTS[1]])
    with pytest.raises(UserError, match=r"small\.png, but stage 't2i' .t2i. takes none"):
        _run(prompts=[PROMPTS[0], small])
    with pytest.raises(UserError, match=r"large\.png is 4 x 4 pixels, but .*small\.png is 2 x 2"):
        _run(VIDEOS, [small, large])
    with pytest.raises(UserError, match="there is no prompt"):
        _run(prompts=[])
