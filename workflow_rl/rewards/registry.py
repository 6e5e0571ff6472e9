"""The rewards that a configuration can name, and how a configuration's entry becomes one.

Importing this module is cheap (no torch): a wrong name is told at once.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from workflow_rl.errors import UserError
from workflow_rl.rewards.python_callable import PythonCallable, check_arguments, import_dotted

if TYPE_CHECKING:
    from workflow_rl.rewards.base import Reward
    from workflow_rl.rewards.composite import CompositeReward

GroupKind = Literal["prompt", "parent"]

# name -> class, imported when used. A new reward is one file and one line here.
REWARDS: dict[str, str] = {
    "aesthetic": "workflow_rl.rewards.aesthetic:Aesthetic",
    "clipscore": "workflow_rl.rewards.clip_scores:ClipScore",
    "constant": "workflow_rl.rewards.constant:ConstantReward",
    "directed_motion": "workflow_rl.rewards.directed_motion:DirectedMotion",
    "dynamic_degree": "workflow_rl.rewards.motion:DynamicDegree",
    "first_frame_consistency": "workflow_rl.rewards.feature_consistency:FirstFrameConsistency",
    "frame_change": "workflow_rl.rewards.frame_change:FrameChange",
    "hpsv2": "workflow_rl.rewards.hpsv2:HPSv2",
    "hpsv3": "workflow_rl.rewards.hpsv3:HPSv3",
    "imagereward": "workflow_rl.rewards.image_reward:ImageReward",
    "jpeg_size": "workflow_rl.rewards.jpeg_size:JpegSize",
    "motion_amount": "workflow_rl.rewards.motion:MotionAmount",
    "motion_smoothness": "workflow_rl.rewards.motion:MotionSmoothness",
    "ocr": "workflow_rl.rewards.ocr:OcrTextMatch",
    "pickscore": "workflow_rl.rewards.clip_scores:PickScore",
    "sharpness": "workflow_rl.rewards.sharpness:Sharpness",
    "subject_consistency": "workflow_rl.rewards.feature_consistency:SubjectConsistency",
    "temporal_flickering": "workflow_rl.rewards.temporal_flickering:TemporalFlickering",
    "videoalign": "workflow_rl.rewards.videoalign:VideoAlign",
    "vlm_judge": "workflow_rl.rewards.vlm_judge:VlmJudge",
    "vlm_pairwise": "workflow_rl.rewards.vlm_pairwise:PairwiseVlmJudge",
}


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a configuration.

    Attributes
    ----------
    name : str or None
        A name in ``REWARDS``; either this or ``callable``.
    callable : str or None
        A Python function, ``pkg.mod:fn``.
    weight : float
        Its factor in the sum; with 0 it is logged and changes nothing.
    on : str or None
        The stage whose output it scores; None is the last.
    timeout_s : float or None
        Seconds after which a call has failed.
    args : mapping
        Keyword arguments of the reward.
    credit_to : sequence of str or None
        The stages that it is credited to; None is every stage.
    group : {"prompt", "parent"} or None
        What a reward that compares samples compares: all of a prompt, or those of one sample of the
        stage before; None is the prompt. A callable with a group gets one whole group at a time.
    process, server : mapping or None
        Where it runs, if not in this process: keyword arguments of
        :class:`~workflow_rl.rewards.remote.process.ProcessReward` or
        :class:`~workflow_rl.rewards.remote.client.ServerReward`.
    """

    name: str | None = None
    callable: str | None = None
    weight: float = 1.0
    on: str | None = None
    timeout_s: float | None = None
    args: Mapping[str, object] = field(default_factory=dict)
    credit_to: Sequence[str] | None = None
    group: GroupKind | None = None
    process: Mapping[str, Any] | None = None
    server: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class RewardTerm:
    """A reward with its place in the sum; fields as in :class:`RewardSpec`.

    ``group`` is None exactly where the reward scores each sample alone. A reward with a group must
    be called with whole groups, named in the batch's ``group_ids``.
    """

    reward: "Reward"
    weight: float = 1.0
    on: str | None = None
    timeout_s: float | None = None
    credit_to: Sequence[str] | None = None
    group: GroupKind | None = None


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint naming the known word most like ``word``, and all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def spec_from_mapping(entry: Mapping[str, object]) -> RewardSpec:
    """A spec from an entry as written in YAML.

    Raises
    ------
    UserError
        An unknown key.
    """
    known = [item.name for item in fields(RewardSpec)]
    for key in entry:
        if key not in known:
            raise UserError(f"unknown reward key {key!r}: {nearest(key, known)}")
    return RewardSpec(**entry)  # type: ignore[arg-type]


def build_reward(spec: RewardSpec | Mapping[str, object]) -> RewardTerm:
    """The reward that an entry of a configuration describes.

    Raises
    ------
    UserError
        Unknown key, name or argument; neither or both of ``name`` and ``callable``; a callable
        that cannot be imported; a weight that is not finite; a time-out that is not positive.
    """
    if isinstance(spec, Mapping):
        spec = spec_from_mapping(spec)
    if (spec.name is None) == (spec.callable is None):
        raise UserError(
            f"a reward has either a name or a callable, found name={spec.name!r} and "
            f"callable={spec.callable!r}: give one of them"
        )
    if spec.callable in REWARDS:
        raise UserError(
            f"reward callable {spec.callable!r} is a reward of this project: write "
            f"name: {spec.callable}, or module:function for one of yours"
        )
    label = spec.name or spec.callable
    if not math.isfinite(spec.weight):
        raise UserError(f"reward {label!r} has weight {spec.weight}: give a finite number")
    if spec.timeout_s is not None and not spec.timeout_s > 0:
        raise UserError(
            f"reward {label!r} has timeout_s {spec.timeout_s}: give seconds above 0, or null"
        )
    if spec.group not in (None, "prompt", "parent"):
        raise UserError(f"reward {label!r} has group {spec.group!r}: give prompt or parent")
    if spec.process is None and spec.server is None:
        reward, group = _build_here(spec)
    else:
        from workflow_rl.rewards.remote.build import build_elsewhere

        reward, group = build_elsewhere(spec)
    return RewardTerm(reward, spec.weight, spec.on, spec.timeout_s, spec.credit_to, group)


def _build_here(spec: RewardSpec) -> "tuple[Reward, GroupKind | None]":
    """The reward in this process, and what it compares."""
    reward: Reward = (
        PythonCallable(spec.callable, spec.args)
        if spec.callable is not None
        else _build_named(str(spec.name), spec.args)
    )
    return _with_group(reward, spec)


def _with_group(reward: "Reward", spec: RewardSpec) -> "tuple[Reward, GroupKind | None]":
    """The reward, a callable with a group wrapped, and what it compares."""
    if spec.callable is not None and spec.group is None:
        return reward, None
    from workflow_rl.rewards.groupwise import Groupwise, GroupwiseCallable

    if isinstance(reward, PythonCallable):
        return GroupwiseCallable(reward), spec.group
    if isinstance(reward, Groupwise):
        return reward, spec.group or "prompt"
    if spec.group is not None:
        raise UserError(
            f"reward {spec.name!r} scores each sample alone, so it has no group: leave group out"
        )
    return reward, None


def reward_class(name: str) -> Any:
    """The class that a name in ``REWARDS`` stands for; imports its module, loads no weights.

    Raises
    ------
    UserError
        There is no such name.
    """
    if name not in REWARDS:
        raise UserError(
            f"unknown reward {name!r}: {nearest(name, list(REWARDS))}, or give a callable "
            f"(module:function)"
        )
    builder = import_dotted(REWARDS[name])
    if not callable(builder):
        raise TypeError(f"REWARDS[{name!r}] names {builder!r}, not a class")
    return builder


def _build_named(name: str, args: Mapping[str, object]) -> "Reward":
    """A registered reward with its arguments."""
    builder = reward_class(name)
    check_arguments(builder, (), args, name)
    try:
        reward: Reward = builder(**args)
    except (TypeError, ValueError) as error:
        if not args:
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"reward {name!r} cannot be made with args {dict(args)} ({what}): give each argument "
            f"what its class in {REWARDS[name].partition(':')[0]} says"
        ) from error
    return reward


def build_rewards(specs: Sequence[RewardSpec | Mapping[str, object]]) -> "CompositeReward":
    """The weighted sum that a configuration's list of rewards describes.

    Raises
    ------
    UserError
        As :func:`build_reward`; where no reward has a weight other than 0; where every reward
        compares the samples of a group, which leaves nothing to evaluate by.
    """
    terms = [build_reward(spec) for spec in specs]
    from workflow_rl.rewards.composite import CompositeReward

    composite = CompositeReward(terms)
    composite.pointwise()
    return composite
