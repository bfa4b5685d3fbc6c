"""Generated problems fall into three disjoint pools by a hash of what they ask.

Training can so never see an evaluation problem, and the warm start has seen neither, whatever the seeds.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

Pool = Literal["train", "eval", "warmup"]
T = TypeVar("T")

_POOLS: tuple[Pool, ...] = ("eval", "train", "train", "train", "train", "warmup", "warmup", "warmup")
_PATIENCE = 20_000  # candidates in a row that are nothing new: there are no more, or as good as


def pool_of(asked: str) -> Pool:
    """The pool of what is asked: one eighth evaluation, half training, the rest warm start."""
    return _POOLS[hashlib.sha256(asked.encode()).digest()[0] % len(_POOLS)]


def take_distinct(candidates: Iterator[tuple[T, str]], pool: Pool, count: int, key: Callable[[T], str]) -> list[T]:
    """The first ``count`` candidates of a pool with different keys, or all where there are fewer.

    A candidate comes with what it asks, which is the same text for all ways to ask the same.
    """
    made: dict[str, T] = {}
    in_vain = 0
    for candidate, asked in candidates:
        name = key(candidate)
        if name in made or pool_of(asked) != pool:
            in_vain += 1
            if in_vain == _PATIENCE:
                break
            continue
        in_vain = 0
        made[name] = candidate
        if len(made) == count:
            break
    return list(made.values())
