"""Laws of stopping: the first signal asks, the second Ctrl-C insists, handlers come back."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from workflow_rl.training.signals import graceful_stop


def send(number: signal.Signals) -> None:
    """Send a signal to this process; it arrives before the next line."""
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def harmless_handlers() -> Iterator[list[int]]:
    """Stand in for the handlers outside, so that a failing test does not end the test run."""
    arrived: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {n: signal.signal(n, lambda got, _frame: arrived.append(got)) for n in numbers}
    yield arrived
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number: signal.Signals, harmless_handlers: list[int]) -> None:
    told: list[str] = []
    with graceful_stop(told.append) as stop:
        assert (stop.requested, stop.signal_name, told) == (False, None, [])
        send(number)
        assert (stop.requested, stop.signal_name, told) == (True, number.name, [number.name])
        send(signal.SIGTERM)
        assert (stop.signal_name, told) == (number.name, [number.name])
    assert harmless_handlers == []


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_after_that_interrupts(first: signal.Signals, harmless_handlers: list[int]) -> None:
    with graceful_stop():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert harmless_handlers == []


def test_handlers_come_back(harmless_handlers: list[int]) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), graceful_stop():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
    send(signal.SIGTERM)
    assert harmless_handlers == [signal.SIGTERM]


def test_another_thread_is_left_alone(harmless_handlers: list[int]) -> None:
    seen: list[bool] = []

    def work() -> None:
        with graceful_stop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
