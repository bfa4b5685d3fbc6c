"""Sharing rows out over threads, in chunks whose size does not depend on how many threads there are."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def over_rows(rows: int, threads: int, work: Callable[[int, int], T], chunk: int) -> list[T]:
    """Do ``work(start, stop)`` for each chunk of so many rows; results in the order of the chunks."""
    borders = [(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]
    return over_items(borders, threads, lambda border: work(*border))


def over_items(items: Sequence[S], threads: int, work: Callable[[S], T]) -> list[T]:
    """Do ``work`` for each item; thread t takes every ``threads``-th from t on."""
    results: list[T | None] = [None] * len(items)

    def share(thread: int) -> None:
        for i in range(thread, len(items), threads):
            results[i] = work(items[i])

    others = [_pool(threads).submit(share, t) for t in range(1, min(threads, len(items)))]
    try:
        share(0)
    finally:
        wait(others)  # none may work on behind the back of whoever sees an error
    for other in others:
        other.result()
    return results  # type: ignore[return-value]


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")
