"""Calls side by side: each has its own outcome, its own time, and a place for the next."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable

from workflow_rl.rewards.side_by_side import side_by_side


def _raise() -> int:
    raise KeyError("x")


def test_each_call_has_its_own_outcome() -> None:
    calls: list[Callable[[], int]] = [lambda: 1, _raise, lambda: 3]
    first, second, third = side_by_side(calls, at_once=2, limit_s=10)
    assert (first, third) == (1, 3)
    assert isinstance(second, KeyError)
    assert side_by_side([], at_once=2, limit_s=10) == []


def test_as_many_run_at_once_as_may() -> None:
    both = threading.Barrier(2)
    assert side_by_side([both.wait, both.wait], at_once=2, limit_s=10) in ([0, 1], [1, 0])
    running, most = 0, 0
    lock = threading.Lock()

    def call() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1

    side_by_side([call] * 12, at_once=3, limit_s=10)
    assert most == 3


def test_what_takes_too_long_is_given_up_and_the_next_has_its_place() -> None:
    released = threading.Event()
    hung, done = side_by_side([released.wait, lambda: True], at_once=1, limit_s=0.2)
    released.set()
    assert isinstance(hung, TimeoutError)
    assert str(hung) == "timed out after 0.2 s"
    assert done is True


def test_what_was_given_up_does_not_keep_the_process_alive() -> None:
    code = (
        "import time; from workflow_rl.rewards.side_by_side import side_by_side; "
        "print(side_by_side([lambda: time.sleep(600)], 1, 0.1))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode == 0
    assert b"TimeoutError" in result.stdout
