"""What rewards and stages of a chain can be combined."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class Stage(Protocol):
    """A stage, as far as it decides what a reward is given."""

    @property
    def task(self) -> str:
        """``t2i`` or ``i2v``."""
        ...

    @property
    def num_frames(self) -> int | None:
        """Of its videos; None is the model's own."""
        ...

    @property
    def fps(self) -> float | None:
        """Of its videos; None is the model's own."""
        ...

    @property
    def width(self) -> int | None:
        """In pixels; None is the model's own, or that of the image it is given."""
        ...

    @property
    def height(self) -> int | None:
        """In pixels, likewise."""
        ...


Stages = Mapping[str, Stage]


class CreditedTerm(Protocol):
    """A term of the reward, as far as it decides whose credit it is."""

    @property
    def weight(self) -> float:
        """Its factor."""
        ...

    @property
    def on(self) -> str | None:
        """The stage that it scores; None is the last."""
        ...

    @property
    def credit_to(self) -> Sequence[str] | None:
        """The stages that it is credited to; None is every stage."""
        ...

    @property
    def group(self) -> str | None:
        """What it compares, ``prompt`` or ``parent``; None: it scores each sample alone."""
        ...


def credit_fault(
    terms: Sequence[CreditedTerm],
    samples: Mapping[str, int],
    trained: Collection[str],
    combine: str,
) -> str | None:
    """Return why these rewards cannot make the credit of these stages, in one line, or None.

    Parameters
    ----------
    samples
        Samples per parent of each stage, first stage first.
    trained
        The stages that are not frozen.
    combine
        The way that rewards are combined.
    """
    for index, term in enumerate(terms):
        if term.on is not None and term.on not in samples:
            continue  # told by who checks the stages' names
        fault = (
            _credit_to_fault(term, samples)
            or _group_fault(term, samples)
            or _size_fault(term, samples, combine)
        )
        if fault is not None:
            return f"rewards.{index}{fault}"
    weighted = [term for term in terms if term.weight]
    for stage in trained:
        if weighted and all(t.credit_to is not None and stage not in t.credit_to for t in weighted):
            return (
                f"stage {stage!r} trains, but no reward with a weight is credited to it; name it "
                f"in a credit_to, or set stages.{stage}.freeze: true"
            )
    return None


class Needs(Protocol):
    """The least that a reward can score, see ``workflow_rl.rewards.media_needs``."""

    @property
    def video(self) -> bool:
        """It scores videos only."""
        ...

    @property
    def frames(self) -> int:
        """Of a video."""
        ...

    @property
    def side(self) -> int:
        """Pixels of the shorter side."""
        ...

    @property
    def exact(self) -> bool:
        """Both sides are ``side`` pixels."""
        ...

    def frames_seen(self, frames: int, fps: float | None) -> int:
        """Frames that it looks at, of a video of ``frames``."""
        ...


def media_fault(name: str, needs: Needs, on: str | None, stages: Stages) -> str | None:
    """Return why a reward would fail whatever the stage makes that it scores, or None.

    Only what the configuration says is looked at: a frame count or size that is left to the model
    is not. Frames per second every video model has.

    Parameters
    ----------
    name
        The reward's.
    on
        The stage that it scores; None is the last.
    stages
        The chain, first stage first.
    """
    stage_name = on if on is not None else list(stages)[-1]
    stage = stages[stage_name]
    if needs.video and stage.task == "t2i":
        return f" ({name}) scores videos, but stage {stage_name!r} makes images; set on to another"
    frames = stage.num_frames
    if frames is not None and needs.frames_seen(frames, stage.fps) < needs.frames:
        looks = (
            ""
            if needs.frames_seen(frames, stage.fps) == frames
            else (
                f" of which it looks at {needs.frames_seen(frames, stage.fps)} at {stage.fps:g} fps"
            )
        )
        return (
            f" ({name}) needs {needs.frames} frames or more, but stages.{stage_name}.num_frames is "
            f"{frames}{looks}; raise it"
        )
    where, size = _size(stage_name, stages)
    if size is None or (min(size) >= needs.side and not needs.exact) or set(size) == {needs.side}:
        return None
    wanted = "" if needs.exact else " or more"
    return (
        f" ({name}) needs {needs.side} x {needs.side} pixels{wanted}, but stage {stage_name!r} "
        f"makes {size[0]} x {size[1]}; set stages.{where}.width and height"
    )


def _size(name: str, stages: Stages) -> tuple[str, tuple[int, int] | None]:
    """Return the stage that sets the width and height of what ``name`` makes, and them if known."""
    names = list(stages)
    for position in range(names.index(name), -1, -1):
        stage = stages[names[position]]
        if stage.width is not None and stage.height is not None:
            return names[position], (stage.width, stage.height)
        if stage.task == "t2i":
            break
    return name, None


def _position(term: CreditedTerm, samples: Mapping[str, int]) -> int:
    """Return the place of the stage that a term scores."""
    return len(samples) - 1 if term.on is None else list(samples).index(term.on)


def _credit_to_fault(term: CreditedTerm, samples: Mapping[str, int]) -> str | None:
    if term.credit_to is None:
        return None
    stages = list(samples)
    if not term.credit_to:
        return f".credit_to names no stage; name some of {', '.join(stages)}, or leave it out"
    unknown = [name for name in term.credit_to if name not in samples]
    if unknown:
        return f".credit_to has {unknown[0]!r}, which is no stage; name some of {', '.join(stages)}"
    position = _position(term, samples)
    if all(stages.index(name) > position for name in term.credit_to):
        return (
            f".credit_to is {list(term.credit_to)}, but the reward scores stage "
            f"{stages[position]!r}, which comes before and which they cannot change; name "
            f"{stages[position]!r} or a stage before it"
        )
    return None


def _group_fault(term: CreditedTerm, samples: Mapping[str, int]) -> str | None:
    if term.group is None:
        return None
    stages, position = list(samples), _position(term, samples)
    own = stages[position]
    if term.group == "parent":
        size = samples[own]
        before = stages[:position]
        if before and (term.credit_to is None or set(term.credit_to) & set(before)):
            return (
                f".group is 'parent': the samples of one parent are compared, which says nothing "
                f"of stage {before[-1]!r}; set credit_to: [{own}], or group: prompt"
            )
    else:
        size = math.prod(list(samples.values())[: position + 1])
    if size == 1:
        return (
            f" compares the samples of stage {own!r} of one {term.group}, of which there is 1; "
            f"raise stages.{own}.samples"
        )
    return None


def _size_fault(term: CreditedTerm, samples: Mapping[str, int], combine: str) -> str | None:
    position = _position(term, samples)
    alone = math.prod(list(samples.values())[: position + 1]) == 1
    if combine == "sum" or not term.weight or not alone:
        return None
    stage = list(samples)[position]
    return (
        f" scores stage {stage!r}, of which a prompt has 1 sample, so credit.combine "
        f"{combine!r} has nothing to compare; raise stages.{stage}.samples, or set its weight to 0"
    )
