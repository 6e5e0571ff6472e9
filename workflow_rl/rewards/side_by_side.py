"""Calls that wait for somebody else, several at a time, none longer than it may take."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

Result = TypeVar("Result")


def side_by_side(
    calls: Sequence[Callable[[], Result]], at_once: int, limit_s: float
) -> list[Result | Exception]:
    """Make all calls, ``at_once`` of them at a time.

    Each runs in a thread of its own that can be given up: it is a daemon, and does not keep the
    process alive.

    Parameters
    ----------
    limit_s
        Seconds that a call may take from its start; then the next one has its place.

    Returns
    -------
    list
        Per call its result or what it raised; TimeoutError where it took too long.
    """
    outcomes: list[Result | Exception] = [TimeoutError(f"timed out after {limit_s:g} s")] * len(
        calls
    )
    waiting = list(reversed(range(len(calls))))
    running: dict[Future[Result], tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            index = waiting.pop()
            running[_start(calls[index])] = index, time.monotonic() + limit_s
        first_deadline = min(deadline for _, deadline in running.values())
        wait(running, max(0.0, first_deadline - time.monotonic()), FIRST_COMPLETED)
        for future, (index, deadline) in list(running.items()):
            if future.done():
                error = future.exception()
                outcomes[index] = error if isinstance(error, Exception) else future.result()
            if future.done() or time.monotonic() >= deadline:
                del running[future]
    return outcomes


def _start(call: Callable[[], Result]) -> Future[Result]:
    """Make a call in a thread of its own."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  whatever it raises is its outcome
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
