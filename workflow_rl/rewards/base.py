"""What a reward is, and how one is called so that no failure can turn into a score."""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

MediaKind = Literal["image", "video"]
AcceptedKind = Literal["image", "video", "any"]

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RewardBatch:
    """What a reward sees.

    Attributes
    ----------
    prompts, sample_ids : sequence of str
        One per sample.
    media : Tensor
        float in [0, 1]: ``images_BCHW`` or ``videos_BCTHW``, RGB. Not to be written to.
    media_kind : {"image", "video"}
    fps : float or None
        Frames per second of a video.
    group_ids : sequence of str
        One per sample, equal where samples are of one group, for a reward that compares them
        (:class:`workflow_rl.rewards.groupwise.Groupwise`): then every group is whole. Empty for
        the others.
    """

    prompts: Sequence[str]
    sample_ids: Sequence[str]
    media: Tensor
    media_kind: MediaKind
    fps: float | None = None
    group_ids: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse media of the wrong number of axes, or prompts and ids that do not match them."""
        axes = 4 if self.media_kind == "image" else 5
        if self.media.dim() != axes:
            raise ValueError(
                f"{self.media_kind}s have {axes} axes, got media of shape {tuple(self.media.shape)}"
            )
        if not len(self.prompts) == len(self.sample_ids) == len(self.media):
            raise ValueError(
                f"{len(self.media)} samples with {len(self.prompts)} prompts and "
                f"{len(self.sample_ids)} ids"
            )
        if self.group_ids and len(self.group_ids) != len(self.media):
            raise ValueError(f"{len(self.media)} samples with {len(self.group_ids)} group ids")

    def __len__(self) -> int:
        return len(self.sample_ids)

    def row(self, index: int) -> "RewardBatch":
        """Sample ``index`` as a batch of one."""
        rows = slice(index, index + 1)
        return replace(
            self,
            prompts=self.prompts[rows],
            sample_ids=self.sample_ids[rows],
            media=self.media[rows],
            group_ids=self.group_ids[rows],
        )


@dataclass(frozen=True)
class RewardScores:
    """Scores of a batch.

    Attributes
    ----------
    scores : Tensor
        float32 ``[B]`` on the CPU; NaN exactly where the sample failed.
    failures : dict of int to str
        Why, per failed sample.
    components : dict of str to Tensor
        Parts worth a look of their own, float32 ``[B]``, NaN where unknown.
    """

    scores: Tensor
    failures: dict[int, str] = field(default_factory=dict)
    components: dict[str, Tensor] = field(default_factory=dict)


class Reward(Protocol):
    """A reward: from a batch to one score or failure per sample.

    ``media_kind`` is what it accepts. Anything that it raises fails the samples it was called
    with, see :func:`score_safely`.
    """

    @property
    def name(self) -> str:
        """What it is logged as."""
        ...

    @property
    def media_kind(self) -> str:
        """What it accepts: ``image``, ``video`` or ``any``."""
        ...

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score the samples of ``batch``."""
        ...


@runtime_checkable
class LoadsWeights(Protocol):
    """A reward that must fetch something before it can score: weights, a package, an API key."""

    def load(self) -> None:
        """Make ready to score; once it has succeeded, calling it again costs nothing.

        Raises
        ------
        UserError
            It cannot: no sample is at fault, so the run ends instead of failing them all.
        """
        ...


@runtime_checkable
class ScoresElsewhere(Protocol):
    """A reward that another process or machine computes while this one goes on.

    ``batch_size`` is the number of samples that it is sent at a time.
    """

    @property
    def batch_size(self) -> int:
        """Samples per request."""
        ...

    def submit(self, batch: RewardBatch) -> Future[RewardScores]:
        """Hand a batch over; never raises. Cancelling the result ends the work on it."""
        ...

    def score(self, batch: RewardBatch, timeout_s: float | None) -> RewardScores:
        """Score a batch of any size; what has no score ``timeout_s`` seconds later has failed."""
        ...


def all_failed(size: int, reason: str) -> RewardScores:
    """Scores of ``size`` samples that all failed for one reason."""
    return RewardScores(torch.full((size,), math.nan), dict.fromkeys(range(size), reason))


def scores_from_raw(raw: object, size: int) -> RewardScores:
    """Scores from what a foreign function returned.

    Parameters
    ----------
    raw : object
        ``size`` numbers in a list, tuple, array or tensor; or a mapping of names to such, whose
        sum is the score and whose entries are the components. ``None`` is a failed sample.

    Returns
    -------
    RewardScores
        All failed where type or length is wrong; failed alone where a number is missing or not
        finite.
    """
    if isinstance(raw, Mapping):
        if not raw:
            return all_failed(size, "returned an empty mapping")
        parts = {str(name): _column(values, size, f"{name!r}: ") for name, values in raw.items()}
        failures: dict[int, str] = {}
        for part in parts.values():
            failures = part.failures | failures
        total = torch.stack([part.scores for part in parts.values()]).sum(0)
        return checked(
            RewardScores(total, failures, {name: part.scores for name, part in parts.items()}), size
        )
    return _column(raw, size, "")


def _column(values: object, size: int, where: str) -> RewardScores:
    """Scores from one sequence of numbers; ``where`` opens the reasons."""
    items = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
    if not isinstance(items, list | tuple):
        found = "None" if values is None else type(values).__name__
        return all_failed(
            size,
            f"{where}returned {found}, not a sequence of numbers: return a list with one for each "
            f"sample, None in place of one that cannot be scored",
        )
    if len(items) != size:
        return all_failed(size, f"{where}returned {len(items)} scores for {size} samples")
    scores = torch.full((size,), math.nan)
    failures: dict[int, str] = {}
    for index, raw_item in enumerate(items):
        one = isinstance(raw_item, np.generic) or (
            isinstance(raw_item, Tensor) and raw_item.numel() == 1
        )
        item = raw_item.item() if one else raw_item
        if item is None:
            failures[index] = f"{where}returned None for this sample: return a number to score it"
        elif not isinstance(item, int | float):
            failures[index] = f"{where}returned {type(item).__name__}, not a number"
        elif not abs(item) <= FLOAT32_MAX:
            failures[index] = f"{where}returned {str(item)[:40]}, not a finite float32"
        else:
            scores[index] = float(item)
    return checked(RewardScores(scores, failures), size)


def checked(result: object, size: int) -> RewardScores:
    """Make what a reward returned keep its promises: shape, dtype, NaN exactly where failed."""
    if not isinstance(result, RewardScores):
        return all_failed(size, f"returned {type(result).__name__}, not RewardScores")
    if not isinstance(result.scores, Tensor) or result.scores.shape != (size,):
        found = tuple(result.scores.shape) if isinstance(result.scores, Tensor) else "no tensor"
        return all_failed(size, f"returned scores of shape {found} for {size} samples")
    scores = result.scores.detach().to("cpu", torch.float32, copy=True)
    failures = {int(index): reason for index, reason in result.failures.items()}
    if not all(0 <= index < size for index in failures):
        return all_failed(size, f"named failed samples {sorted(failures)} of {size}")
    for index in (~scores.isfinite()).nonzero().flatten().tolist():
        failures.setdefault(index, f"returned {float(scores[index])}")
    scores[list(failures)] = math.nan
    components: dict[str, Tensor] = {}
    for name, values in result.components.items():
        if values.shape != (size,):
            return all_failed(size, f"component {name!r} has shape {tuple(values.shape)}")
        components[name] = values.detach().to("cpu", torch.float32, copy=True)
    return RewardScores(scores, dict(sorted(failures.items())), components)


class _RewardError(Exception):
    """A call of a reward did not end well; the message is the reason of the failure."""


class _RewardTimeoutError(_RewardError):
    """A call of a reward did not end in time."""


def _call(
    reward: Reward, batch: RewardBatch, deadline: float | None, limit_s: float | None
) -> RewardScores:
    """Call a reward; with a deadline in a thread of its own that can be given up.

    The thread is a daemon: a reward that hangs for ever does not keep the process alive.
    """
    outcome: list[RewardScores] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():  # the grad mode belongs to the thread
                outcome.append(checked(reward(batch), len(batch)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is a failure
            errors.append(error)

    if deadline is None:
        work()
    else:
        thread = threading.Thread(target=work, name=f"reward {reward.name}", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise _RewardTimeoutError(f"timed out after {limit_s:g} s")
    if errors:
        raise _RewardError(one_line(errors[0]))
    return outcome[0]


def one_line(error: BaseException) -> str:
    """Type and message of an exception, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def score_safely(
    reward: Reward, batch: RewardBatch, timeout_s: float | None = None
) -> RewardScores:
    """Score a batch so that whatever goes wrong is a failure of a sample, never a score.

    A reward that raises on the batch is called again for each sample alone, so that one bad
    sample of 64 fails alone. ``timeout_s`` limits all of that together: what has no score by then
    has failed.

    Parameters
    ----------
    timeout_s : float or None
        Seconds; None waits for ever (and calls the reward in this thread). Loading weights, which
        happens once, is not counted.

    Returns
    -------
    RewardScores
        Scores float32 ``[B]``, NaN exactly where failed, with the reasons.

    Raises
    ------
    UserError
        The reward cannot load, see :class:`LoadsWeights`.
    """
    size = len(batch)
    if reward.media_kind not in ("any", batch.media_kind):
        return all_failed(size, f"scores {reward.media_kind}s, was given {batch.media_kind}s")
    if isinstance(reward, LoadsWeights):
        reward.load()
    if isinstance(reward, ScoresElsewhere):
        return reward.score(batch, timeout_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        return _call(reward, batch, deadline, timeout_s)
    except _RewardTimeoutError as error:
        return all_failed(size, str(error))
    except _RewardError as error:
        if size == 1:
            return all_failed(1, str(error))
    return join_rows([_score_row(reward, batch.row(i), deadline, timeout_s) for i in range(size)])


def _score_row(
    reward: Reward, row: RewardBatch, deadline: float | None, limit_s: float | None
) -> RewardScores:
    """Score a batch of one."""
    if deadline is not None and time.monotonic() >= deadline:
        return all_failed(1, f"timed out after {limit_s:g} s")
    try:
        return _call(reward, row, deadline, limit_s)
    except _RewardError as error:
        return all_failed(1, str(error))


def join_rows(rows: Sequence[RewardScores]) -> RewardScores:
    """One result of many batches of one; a component that a row lacks is NaN there."""
    names = list(dict.fromkeys(name for row in rows for name in row.components))
    missing = torch.full((1,), math.nan)
    return RewardScores(
        scores=torch.cat([row.scores for row in rows]),
        failures={i: row.failures[0] for i, row in enumerate(rows) if row.failures},
        components={
            name: torch.cat([row.components.get(name, missing) for row in rows]) for name in names
        },
    )
