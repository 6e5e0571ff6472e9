"""Stopping a run at the end of its iteration rather than in the middle of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopRequest:
    """Whether the run was asked to stop, and the name of the signal that asked."""

    requested: bool = False
    signal_name: str | None = None


@contextmanager
def graceful_stop(
    on_request: Callable[[str], None] = lambda signal_name: None,
) -> Iterator[StopRequest]:
    """Turn the first SIGTERM or SIGINT (Ctrl-C) into a request to stop.

    A SIGINT after that raises `KeyboardInterrupt`, for who cannot wait. The previous handlers
    come back on exit. Python delivers signals to the main thread only: in any other this changes
    nothing and the request is never set.

    Parameters
    ----------
    on_request
        Is told the name of the signal that asked, at once and in the main thread, which may be
        in the middle of anything: it must take no lock.

    Yields
    ------
    StopRequest
        Look at `requested` where the run can stop.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not stop.requested:
            stop.requested = True
            stop.signal_name = signal.Signals(number).name
            on_request(stop.signal_name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            # None: installed by code outside Python, which cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
