"""Rewards that cannot make the stages' credit are refused before anything is loaded."""

import dataclasses
from pathlib import Path

import pytest

from tests.config.conftest import LoadWith
from workflow_rl.cli.preflight import check_inputs
from workflow_rl.config.reward_checks import credit_fault, media_fault
from workflow_rl.errors import UserError
from workflow_rl.rewards.media_needs import MediaNeeds

SAMPLES = {"t2i": 4, "i2v": 2}


@dataclasses.dataclass(frozen=True)
class Term:
    weight: float = 1.0
    on: str | None = None
    credit_to: tuple[str, ...] | None = None
    group: str | None = None


def fault(*terms: Term, samples: dict[str, int] | None = None, combine: str = "sum") -> str | None:
    samples = samples or SAMPLES
    return credit_fault(terms, samples, list(samples), combine)


@pytest.mark.parametrize(
    "terms",
    [
        (Term(),),
        (Term(), Term(on="t2i", credit_to=("t2i",))),
        (Term(credit_to=("i2v",)), Term(on="t2i", credit_to=("t2i", "i2v"))),
        (Term(credit_to=("t2i",)), Term(group="parent", credit_to=("i2v",))),
        (Term(group="prompt"), Term(on="t2i", group="parent")),
        (Term(weight=0.0, on="t2i", credit_to=("t2i",)), Term()),
    ],
)
@pytest.mark.parametrize("combine", ["sum", "zscore", "rank", "advantages"])
def test_what_works_is_not_refused(terms: tuple[Term, ...], combine: str) -> None:
    assert fault(*terms, combine=combine) is None


def test_one_reward_works_with_every_combination() -> None:
    for combine in ("sum", "zscore", "rank", "advantages"):
        assert fault(Term(), combine=combine) is None


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ((Term(credit_to=()),), "rewards.0.credit_to names no stage"),
        ((Term(), Term(credit_to=("t2v",))), "rewards.1.credit_to has 't2v', which is no stage"),
        ((Term(), Term(on="t2i", credit_to=("i2v",))), "cannot change; name 't2i'"),
        ((Term(credit_to=("t2i",)),), "stage 'i2v' trains, but no reward"),
        ((Term(credit_to=("i2v",)), Term(weight=0.0)), "stage 't2i' trains, but no reward"),
        ((Term(group="parent"),), "says nothing of stage 't2i'; set credit_to: [i2v]"),
    ],
)
def test_what_credits_nobody_is_refused(terms: tuple[Term, ...], words: str) -> None:
    assert words in (fault(*terms) or "")


def test_a_frozen_stage_needs_no_reward() -> None:
    assert credit_fault([Term(credit_to=("i2v",))], SAMPLES, ["i2v"], "sum") is None


def test_groups_and_ranks_of_one_are_refused() -> None:
    one = {"t2i": 1, "i2v": 4}
    grouped = fault(Term(on="t2i", group="prompt"), Term(), samples=one)
    assert "of which there is 1; raise stages.t2i.samples" in (grouped or "")
    single = {"t2i": 4, "i2v": 1}
    siblings = fault(Term(group="parent", credit_to=("i2v",)), Term(), samples=single)
    assert "of one parent, of which there is 1" in (siblings or "")
    for combine in ("zscore", "rank", "advantages"):
        terms = (Term(on="t2i"), Term())
        assert "has nothing to compare" in (fault(*terms, samples=one, combine=combine) or "")
        assert fault(Term(on="t2i", weight=0.0), Term(), samples=one, combine=combine) is None
    assert fault(Term(on="t2i"), Term(), samples=one) is None  # runs of old do that


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rewards.0.credit_to=[t2v]", "rewards.0.credit_to has 't2v'"),
        ("rewards.0.credit_to=[]", "names no stage"),
        ("credit.combine=ranks", "did you mean 'rank'"),
        ("credit.combine_over=batch", "credit: combine_over is 'batch', but combine 'sum'"),
        ("rewards.0.group=batch", "rewards.0.group"),
    ],
)
def test_the_configuration_says_so_in_one_line(
    load_with: LoadWith, override: str, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_with(override)
    assert words in str(caught.value)


def test_the_names_are_those_of_the_code() -> None:
    import typing

    from workflow_rl.config.run import CreditConfig
    from workflow_rl.rewards.registry import GroupKind
    from workflow_rl.training.combine import COMBINATIONS, Combine, CombineOver

    def choices(field: str) -> set[str]:
        annotation = CreditConfig.model_fields[field].annotation
        nested = [typing.get_args(a) or (a,) for a in typing.get_args(annotation)]
        return {name for names in nested for name in names if isinstance(name, str)}

    assert choices("combine") == set(COMBINATIONS) == set(typing.get_args(Combine))
    assert choices("combine_over") == set(typing.get_args(CombineOver))
    assert set(typing.get_args(GroupKind)) == {"prompt", "parent"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("name=motion_smoothness", "frames=2"), "(motion_smoothness) needs 3 frames or more"),
        (("name=videoalign", "frames=1"), "stages.i2v.num_frames is 1; raise it"),
        (("name=dynamic_degree", "frames=9", "fps=240"), "it looks at 1 at 240 fps"),
        (("name=motion_amount", "side=8"), "needs 12 x 12 pixels or more, but stage 'i2v' makes"),
        (("name=directed_motion", "side=64"), "needs 32 x 32 pixels, but stage 'i2v' makes 64 x"),
        (("name=sharpness", "side=2"), "set stages.t2i.width and height"),
        (("name=motion_amount", "on=t2i"), "scores videos, but stage 't2i' makes images"),
    ],
)
def test_what_a_reward_could_never_score_is_told_before_a_model_is_looked_at(
    load_with: LoadWith, tmp_path: Path, overrides: tuple[str, ...], words: str
) -> None:
    keys = {
        "name": "rewards.0.name",
        "on": "rewards.0.on",
        "frames": "stages.i2v.num_frames",
        "fps": "stages.i2v.fps",
    }
    (tmp_path / "prompts.txt").write_text("a\nb\nc\nd\n")
    written = [f"data.prompts={tmp_path}/prompts.txt", f"stages.t2i.model={tmp_path}/no_model"]
    for override in overrides:
        key, _, value = override.partition("=")
        if key == "side":
            written += [f"stages.t2i.{side}={value}" for side in ("width", "height")]
        else:
            written.append(f"{keys[key]}={value}")
    with pytest.raises(UserError) as caught:
        check_inputs(load_with(*written))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Made:
    """What a stage makes, as far as the configuration says it."""

    task: str = "i2v"
    num_frames: int | None = None
    fps: float | None = None
    width: int | None = None
    height: int | None = None


IMAGES = Made("t2i", width=20, height=14)
SMALL, LARGE = MediaNeeds(side=12), MediaNeeds(side=16)
SQUARE = MediaNeeds(side=20, exact=True)


@pytest.mark.parametrize(
    ("needs", "stages", "words"),
    [
        # the shorter side counts, and both where the size is exact
        (SMALL, [IMAGES, Made()], None),
        (LARGE, [IMAGES, Made()], "makes 20 x 14; set stages.s0.width and height"),
        (SQUARE, [IMAGES, Made()], "needs 20 x 20 pixels, but stage 's1' makes 20 x 14"),
        (SQUARE, [Made("t2i", width=20, height=20)], None),
        # a video has the size that its own stage sets, else that of what it is given
        (LARGE, [IMAGES, Made(width=40, height=40)], None),
        (LARGE, [Made("t2i", width=40, height=40), Made(width=8, height=8)], "set stages.s1.width"),
        (LARGE, [IMAGES, Made(), Made()], "set stages.s0.width"),
        # of what is left to a model nothing is known
        (LARGE, [Made("t2i"), Made()], None),
        (LARGE, [Made("t2i", width=8), Made(height=8)], None),
        (LARGE, [IMAGES, Made("t2i"), Made()], None),
        (MediaNeeds(video=True, frames=3), [IMAGES, Made()], None),
        (MediaNeeds(frames=2, looks_per_s=8.0), [IMAGES, Made(num_frames=9)], None),
        # as many frames as are needed are enough
        (MediaNeeds(video=True, frames=3), [IMAGES, Made(num_frames=3)], None),
        (MediaNeeds(video=True, frames=3), [IMAGES, Made(num_frames=2)], "num_frames is 2; raise"),
        (MediaNeeds(video=True), [IMAGES], "scores videos, but stage 's0' makes images"),
    ],
)
def test_only_what_could_never_be_scored_is_refused(
    needs: MediaNeeds, stages: list[Made], words: str | None
) -> None:
    found = media_fault("r", needs, None, {f"s{i}": stage for i, stage in enumerate(stages)})
    assert (found is None) if words is None else words in (found or "")


def test_the_stage_that_a_reward_is_on_is_looked_at() -> None:
    stages = {"t2i": IMAGES, "i2v": Made(num_frames=2)}
    assert media_fault("r", MediaNeeds(video=True, frames=2), None, stages) is None
    assert "makes images" in (media_fault("r", MediaNeeds(video=True), "t2i", stages) or "")
