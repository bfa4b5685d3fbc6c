import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import beamline
from beamline.runtime.interrupt import Interrupt, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def passed_on() -> Iterator[list[int]]:
    """Signals that reached the handlers from before; those handlers are put back after the test."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in SIGNALS}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_remembered_and_stops_nothing(number: signal.Signals, passed_on: list[int]) -> None:
    with Interrupt() as interrupt:
        assert interrupt.received is None
        send(number)
        assert interrupt.received == number
    assert passed_on == []


@pytest.mark.parametrize("number", SIGNALS)
def test_the_run_is_left_with_the_exit_code_of_the_signal(number: signal.Signals, passed_on: list[int]) -> None:
    with Interrupt() as interrupt:
        send(number)
        with pytest.raises(Interrupted, match=rf"stopped by {number.name}; .*checkpoint\.resume=latest") as caught:
            interrupt.raise_if_received()
    assert caught.value.exit_code == 128 + number


def test_without_a_signal_the_run_goes_on() -> None:
    with Interrupt() as interrupt:
        interrupt.raise_if_received()


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_signal_acts_as_before(first: signal.Signals, second: signal.Signals, passed_on: list[int]) -> None:
    with Interrupt() as interrupt:
        send(first)
        send(second)
        assert interrupt.received == first
    assert passed_on == [second]


def test_handlers_are_back_afterwards_also_after_an_error(passed_on: list[int]) -> None:
    with pytest.raises(KeyError), Interrupt():
        raise KeyError
    for number in SIGNALS:
        send(number)
    assert passed_on == list(SIGNALS)


@pytest.mark.parametrize("second", SIGNALS)
def test_in_a_process_of_its_own_the_second_signal_ends_it(second: signal.Signals) -> None:
    program = f"""
import os
from beamline.runtime.interrupt import Interrupt
with Interrupt() as interrupt:
    os.kill(os.getpid(), {signal.SIGINT:d})
    print("first", interrupt.received, flush=True)
    os.kill(os.getpid(), {second:d})
    print("still here")
"""
    root = Path(beamline.__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert ended.stdout == f"first {signal.SIGINT:d}\n"
    assert ended.returncode == -second
