"""What goes into a sampler and what comes out of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "eval"]
Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The name of one sample; together with the run's seed it fixes the sample's random stream."""

    split: Split
    step: int
    problem: str
    sample: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn: temperature first, then min-p, top-k and top-p on the tempered distribution.

    ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch a filter off; ``temperature=0`` takes the most likely token.
    A token of ``stop_ids`` ends the response and is part of it; it cannot be drawn before ``min_tokens`` others.
    ``record_support`` keeps the tokens that each draw could have given, so that a learner can renormalize over them.

    Raises:
        ValueError: a value is out of its range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    record_support: bool = False

    def __post_init__(self) -> None:
        rules = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (
                self.temperature == 0.0 or 1e-3 <= self.temperature <= 1e3,
                "0 (greedy) or in [0.001, 1000]",
            ),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0.0 <= self.min_p < 1.0, "in [0, 1)"),
            "min_tokens": (0 <= self.min_tokens <= self.max_tokens, f"between 0 and max_tokens={self.max_tokens}"),
        }
        for name, (valid, rule) in rules.items():
            if not valid:
                raise ValueError(f"SamplingParams.{name} must be {rule}, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Support:
    """The tokens that could be drawn at each of T places (ragged): ``ids[borders[t]:borders[t + 1]]`` at place t.

    An empty entry stands for the whole vocabulary: nothing restricted the draw, or nothing was drawn. ``ids`` are
    int32 ``[M]``, in any order and each at most once in an entry; ``borders`` are int64 ``[T + 1]``.

    Raises:
        ValueError: the borders do not rise from 0 to M.
    """

    ids: NDArray[np.int32]
    borders: NDArray[np.int64]

    def __post_init__(self) -> None:
        ends = self.borders[[0, -1]].tolist() if len(self.borders) else None
        if ends != [0, len(self.ids)] or (np.diff(self.borders) < 0).any():
            raise ValueError(f"Support.borders must rise from 0 to {len(self.ids)}, not as {self.borders}")

    @classmethod
    def of(cls, entries: Sequence[NDArray[np.int32]]) -> "Support":
        """One place for each array of ids."""
        sizes = [len(entry) for entry in entries]
        return cls(np.concatenate([np.zeros(0, np.int32), *entries]), _borders(np.array(sizes, np.int64)))

    @classmethod
    def unrestricted(cls, places: int) -> "Support":
        """Places at which every token could be drawn."""
        return cls(np.zeros(0, np.int32), np.zeros(places + 1, np.int64))

    @classmethod
    def joined(cls, parts: Sequence["Support"]) -> "Support":
        """The places of all parts, in their order: of a response that was interrupted, of sequences packed together."""
        sizes = np.concatenate([np.zeros(0, np.int64), *(part.sizes for part in parts)])
        return cls(np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]), _borders(sizes))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many ids each entry has, ``[T]``; 0 for the whole vocabulary."""
        return np.diff(self.borders)

    def __len__(self) -> int:
        """The number of places, ``T``."""
        return len(self.borders) - 1

    def __getitem__(self, place: int) -> NDArray[np.int32]:
        """The entry of one place."""
        return self.ids[self.borders[place] : self.borders[place + 1]]

    def take(self, places: NDArray[np.int64]) -> "Support":
        """The entries of some places (each in 0..T-1), in the order given; a copy."""
        sizes = self.sizes[places]
        borders = _borders(sizes)
        at = np.arange(borders[-1]) + np.repeat(self.borders[places] - borders[:-1], sizes)
        return Support(self.ids[at], borders)

    def allows(self, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether each place could give its one of ``tokens [T]``."""
        sizes = self.sizes
        places = np.repeat(np.arange(len(self)), sizes)
        found = np.bincount(places[self.ids == np.repeat(tokens, sizes)], minlength=len(self))
        allowed: NDArray[np.bool_] = (sizes == 0) | (found > 0)
        return allowed


def _borders(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class Request:
    """Ask for one continuation of ``prefix_ids [P]``: a prompt, or a prompt with a partial response to go on from."""

    key: Key
    prefix_ids: NDArray[np.int32]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler made of a request.

    ``token_ids``, ``logprobs`` and ``versions`` have one entry for each new token: the token, the log-probability
    under the distribution that it was drawn from, and the version of the weights that drew it.
    ``routes [P + T - 1, L, K]`` are the experts of every position that was evaluated (prefix and all new tokens but
    the last), or None for a model without experts, when nothing was sampled, or from an engine that was not asked for
    them. ``support`` has an entry for each new token, or is None where ``record_support`` was not asked for; those of
    partial responses are :meth:`Support.joined`.
    """

    key: Key
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routes: NDArray[np.unsignedinteger] | None
    finish: Finish
    support: Support | None = None
