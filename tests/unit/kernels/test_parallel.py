import threading

import pytest

from beamline.kernels.parallel import over_items, over_rows


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_chunks(threads: int) -> None:
    assert over_rows(10, threads, lambda a, b: (a, b), chunk=4) == [(0, 4), (4, 8), (8, 10)]


def test_no_rows_are_no_work() -> None:
    assert over_rows(0, 2, lambda a, b: (a, b), chunk=4) == []


def test_work_is_shared_out() -> None:
    """Two items that wait for each other end only if two threads do them."""
    barrier = threading.Barrier(2, timeout=30)
    assert over_items([1, 2], 2, lambda item: (item, barrier.wait() >= 0)) == [(1, True), (2, True)]


def test_an_error_comes_when_nothing_works_any_more() -> None:
    first_failed, done = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            first_failed.set()
            raise ValueError("item 0")
        assert first_failed.wait(30)
        done.append(item)

    with pytest.raises(ValueError, match="item 0"):
        over_items([0, 1], 2, work)
    assert done == [1]


def test_an_error_of_another_thread_is_raised() -> None:
    def work(item: int) -> None:
        if item == 1:
            raise ValueError("item 1")

    with pytest.raises(ValueError, match="item 1"):
        over_items([0, 1], 2, work)
