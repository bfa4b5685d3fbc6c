from collections.abc import Callable
from types import SimpleNamespace

import pytest

from beamline.runtime import timing
from beamline.runtime.timing import Timings, peak_memory


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the timings, which stands still otherwise."""
    now = [100.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_seconds_add_up_under_their_name(advance: Callable[[float], None]) -> None:
    timings = Timings()
    for seconds in (1.0, 2.5):
        with timings("update"):
            advance(seconds)
        advance(10.0)
    with timings("sampling"):
        advance(4.0)
    assert timings.take() == {"timing/update": 3.5, "timing/sampling": 4.0}


def test_what_was_taken_begins_anew(advance: Callable[[float], None]) -> None:
    timings = Timings()
    with timings("update"):
        advance(1.0)
    timings.take()
    assert timings.take() == {}
    with timings("update"):
        advance(2.0)
    assert timings.take() == {"timing/update": 2.0}


def test_a_block_that_failed_counts_too(advance: Callable[[float], None]) -> None:
    timings = Timings()

    def fail() -> None:
        advance(3.0)
        raise KeyError

    with pytest.raises(KeyError), timings("update"):
        fail()
    assert timings.take() == {"timing/update": 3.0}


def test_phases_may_lie_in_one_another(advance: Callable[[float], None]) -> None:
    timings = Timings()
    with timings("step"):
        advance(1.0)
        with timings("update"):
            advance(2.0)
    assert timings.take() == {"timing/update": 2.0, "timing/step": 3.0}


def test_peak_memory_counts_what_was_held_in_bytes_and_never_falls() -> None:
    size = 200 * 2**20
    before = peak_memory()
    block = bytearray(size)
    for page in range(0, size, 4096):
        block[page] = 1
    held = peak_memory()
    del block
    assert held - 2**20 <= peak_memory() < before + 2 * size  # the kernel counts pages in batches
    assert held >= size
