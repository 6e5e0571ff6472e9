"""What an evaluation compares: checkpoints of runs, and folders of media made elsewhere.

Nothing here imports PyTorch: a wrong path is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from workflow_rl.config import RunConfig
from workflow_rl.config.run_dir import CONFIG_FILE, RUN_FILE, load_run_config
from workflow_rl.errors import UserError

Weights = Literal["student", "ema"]
_SELECTOR = re.compile(r"@(\d+|student|ema)$")


@dataclass(frozen=True)
class RunCandidate:
    """A checkpoint of a run.

    Attributes
    ----------
    argument : str
        As the user wrote it.
    iteration : int or None
        0 is the start, before any training; None the newest whole checkpoint.
    weights : {"student", "ema"}
        Whose weights; the run's ``evaluation.weights`` unless the argument says so.
    named_weights : bool
        Whether the argument says so.
    """

    argument: str
    path: Path
    config: RunConfig
    iteration: int | None
    weights: Weights
    named_weights: bool = False


@dataclass(frozen=True)
class FolderCandidate:
    """A folder of images or videos."""

    argument: str
    path: Path


Candidate = RunCandidate | FolderCandidate


def parse_candidates(
    arguments: Sequence[str], baseline: str | None = None
) -> tuple[list[Candidate], int]:
    """Read the arguments of an evaluation.

    One run alone is compared with its own start.

    Parameters
    ----------
    arguments : sequence of str
        ``RUN``, ``RUN@20``, ``RUN@ema``, ``RUN@20@ema``, ``RUN@0`` or a folder.
    baseline : str, optional
        One of the arguments, or another one; by default the first.

    Returns
    -------
    (list of Candidate, int)
        What to compare, and which of it is the baseline.

    Raises
    ------
    UserError
        A path that is not there, a run that is damaged, weights that the run does not keep, the
        same thing twice, or nothing to compare with.
    """
    texts = list(arguments)
    if baseline is not None and baseline not in texts:
        texts.insert(0, baseline)
    for text in texts:
        if texts.count(text) > 1:
            raise UserError(f"{text} is given twice; compare it with something else")
    found = [parse_candidate(text) for text in texts]
    if len(found) == 1:
        only = found[0]
        if isinstance(only, FolderCandidate) or only.iteration == 0:
            raise UserError(
                f"{only.argument} alone has nothing to be compared with; give a second run or "
                "folder"
            )
        start = replace(
            only,
            argument=f"{only.path}@0",
            iteration=0,
            weights="student",
            named_weights=False,
        )
        return [start, only], 0
    return found, 0 if baseline is None else texts.index(baseline)


def parse_candidate(argument: str) -> Candidate:
    """Read one argument.

    Raises
    ------
    UserError
        As :func:`parse_candidates`.
    """
    path_text = argument
    selectors: list[str] = []
    # A path that holds an @ of its own is taken as it is.
    while not Path(path_text).exists() and (found := _SELECTOR.search(path_text)):
        selectors.insert(0, found[1])
        path_text = path_text[: found.start()]
    path = Path(path_text)
    if not path.is_dir():
        raise UserError(
            f"no run or folder at {path}; give a run directory, RUN@ITERATION, RUN@ema or a folder "
            "of videos"
        )
    if not (path / RUN_FILE).is_file() and not (path / CONFIG_FILE).is_file():
        if selectors or not _has_media(path):
            raise UserError(
                f"{path} holds no run, nor videos or images; give the output_dir of a "
                "`workflow-rl train`, or the folder in which the files themselves lie"
            )
        return FolderCandidate(argument, path)
    return _run(argument, path, selectors)


def _has_media(path: Path) -> bool:
    from workflow_rl.evaluation.folders import MEDIA_SUFFIXES

    return any(file.suffix.lower() in MEDIA_SUFFIXES for file in path.iterdir())


def _run(argument: str, path: Path, selectors: list[str]) -> RunCandidate:
    config = load_run_config(path)
    iterations = [int(s) for s in selectors if s.isdecimal()]
    roles = [s for s in selectors if not s.isdecimal()]
    if len(iterations) > 1 or len(roles) > 1:
        raise UserError(f"{argument} selects twice; write RUN@ITERATION, RUN@ema or RUN@20@ema")
    iteration = iterations[0] if iterations else None
    if iteration == 0 and roles:
        raise UserError(
            f"{argument}: the start of a run has only one set of weights; write {path}@0"
        )
    weights: Weights = config.evaluation.weights
    if roles:
        weights = "ema" if roles[0] == "ema" else "student"
    if iteration == 0:
        weights = "student"
    elif weights == "ema":
        for name, stage in config.stages.items():
            if stage.ema.decay is None and not stage.freeze:
                raise UserError(
                    f"{argument}: the run keeps no ema weights of stage {name!r} "
                    f"(stages.{name}.ema.decay is null); write {path}@student"
                )
    return RunCandidate(argument, path, config, iteration, weights, bool(roles))


def run_label(candidate: RunCandidate, iteration: int) -> str:
    """Return a run's short name in tables, such as ``quickstart@110``."""
    role = f"@{candidate.weights}" if candidate.named_weights else ""
    return f"{candidate.path.resolve().name}@{iteration}{role}"


def distinct(labels: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """Return the labels, with the whole argument in place of one that is not alone."""
    return [
        argument if labels.count(label) > 1 else label
        for label, argument in zip(labels, arguments, strict=True)
    ]
