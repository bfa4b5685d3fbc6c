"""What goes into a sampler and what comes out of it."""

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
    the last), or None for a model without experts or when nothing was sampled.
    """

    key: Key
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routes: NDArray[np.unsignedinteger] | None
    finish: Finish
