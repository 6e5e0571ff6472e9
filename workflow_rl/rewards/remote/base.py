"""What rewards that run elsewhere share: requests in the background, and a thread for all of them.

The thread runs an event loop, so that a request that takes too long can be ended, whatever it
waits for. It is a daemon: nothing that hangs keeps a run from ending.
"""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.pending import PendingScores
from workflow_rl.rewards.weights import Lazy

T = TypeVar("T")
_THREAD = "remote rewards"


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=_THREAD, daemon=True).start()
    return loop


_LOOP = Lazy(_start_loop)


def in_background(work: Coroutine[Any, Any, T]) -> "Future[T]":
    """Run a coroutine on the thread of the remote rewards; cancelling the result cancels it.

    Raises
    ------
    RuntimeError
        On that thread, which would wait for itself: what a reward needs is to be loaded before.
    """
    loop = _LOOP.get()
    if threading.current_thread().name == _THREAD:
        work.close()
        raise RuntimeError("a remote reward was asked before it was loaded: call its load() first")
    return asyncio.run_coroutine_threadsafe(work, loop)


class RemoteReward(ABC):
    """A reward that another process or machine computes.

    Parameters
    ----------
    name : str
        What it is logged as.
    media_kind : {"image", "video", "any"}
        What it accepts.
    batch_size : int
        Samples per request.
    """

    def __init__(self, name: str, media_kind: AcceptedKind, batch_size: int) -> None:
        self.name = name
        self.media_kind: AcceptedKind = media_kind
        self.batch_size = batch_size

    @abstractmethod
    def load(self) -> None:
        """Have it ready; called before samples are handed over."""

    @abstractmethod
    async def ask(self, batch: RewardBatch) -> RewardScores:
        """Ask for the scores of one request's samples."""

    def submit(self, batch: RewardBatch) -> "Future[RewardScores]":
        """Hand over a request's samples; the result comes in the background."""
        return in_background(self.ask(batch))

    def score(self, batch: RewardBatch, timeout_s: float | None) -> RewardScores:
        """Score a batch of any size; what has no score ``timeout_s`` seconds later has failed."""
        self.load()
        pending = PendingScores(self)
        pending.add(batch)
        return pending.result(timeout_s)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score a batch, however long it takes."""
        return self.score(batch, None)
