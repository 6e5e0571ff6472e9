"""The checkpoints and the resident models of an evaluation, and who is told of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Protocol

import torch

from workflow_rl.errors import UserError
from workflow_rl.evaluation.candidates import RunCandidate
from workflow_rl.evaluation.job import EvaluationJob
from workflow_rl.runtime.driver import ProgressEvent
from workflow_rl.serving.chain import ServedChain, load_chain, publish_checkpoint
from workflow_rl.training.checkpoint import check_checkpoint, latest_valid
from workflow_rl.training.checkpoint_folders import checkpoint_folders
from workflow_rl.training.weight_sync import WeightRole


class EvaluationListener(Protocol):
    """Who is told how an evaluation goes."""

    def message(self, text: str) -> None:
        """Take one line for the user."""
        ...

    def begin(self, label: str, samples: int) -> None:
        """A candidate's turn has come."""
        ...

    def step(self, stage: str, event: ProgressEvent) -> None:
        """A denoising step of a batch is done."""
        ...

    def scored(self, samples: int) -> None:
        """So many more samples of the candidate are scored."""
        ...


class SilentListener:
    """Says nothing."""

    def message(self, text: str) -> None:
        """Drop the line."""

    def begin(self, label: str, samples: int) -> None:
        """Drop the news."""

    def step(self, stage: str, event: ProgressEvent) -> None:
        """Drop the event."""

    def scored(self, samples: int) -> None:
        """Drop the news."""


def find_checkpoints(job: EvaluationJob, listener: EvaluationListener) -> dict[int, Path]:
    """Return the checkpoint of each run, but for starts.

    Raises
    ------
    UserError
        If there is none, or it is damaged: told before anything is loaded or sampled.
    """
    found = {}
    for index, candidate in enumerate(job.candidates):
        if not isinstance(candidate, RunCandidate) or candidate.iteration == 0:
            continue
        root = candidate.path / "checkpoints"
        kept = {int(path.name.rpartition("_")[2]): path for path in checkpoint_folders(root)}
        if candidate.iteration is None:
            path = latest_valid(root, on_skip=listener.message)
        else:
            path = kept.get(candidate.iteration)
        if path is None and not kept:
            raise UserError(
                f"{candidate.path} has no checkpoint yet; let `workflow-rl train` go on"
            )
        if path is None:
            raise UserError(
                f"{candidate.path} keeps no checkpoint of iteration {candidate.iteration}, only "
                f"of {', '.join(map(str, kept))}; training.checkpoint.keep says how many are kept"
            )
        if candidate.iteration is not None:
            check_checkpoint(path)
        found[index] = path
    return found


class ResidentModels:
    """The resident chain: one at a time."""

    def __init__(self, listener: EvaluationListener) -> None:
        self._listener = listener
        self._chain: ServedChain | None = None
        self._start_of: Path | None = None

    def chain(self, candidate: RunCandidate, checkpoint: Path | None) -> ServedChain:
        """Return the candidate's chain, with the checkpoint's weights unless it is the start."""
        chain = self._chain if self._start_of == candidate.path else None
        if chain is None:
            self.free()
            self._listener.message(f"loading {candidate.path}")
            config = candidate.config
            chain = load_chain(
                config.workflow,
                config.stages,
                config.training.device,
                swap=config.training.swap_stages,
            )
            self._chain, self._start_of = chain, candidate.path
        if checkpoint is not None:
            # Only the weights that one checkpoint holds are replaced: another needs a fresh start.
            self._start_of = None
            publish_checkpoint(chain, checkpoint, WeightRole(candidate.weights))
        return chain

    def free(self) -> None:
        """Give the memory back."""
        self._chain = self._start_of = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
