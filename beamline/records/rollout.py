"""A sampled sequence and its judgement."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from beamline.records.problem import Problem
from beamline.records.sampling import Finish, Key, Support

GradeStatus = Literal["graded", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict. Only ``status="graded"`` counts; anything else is left out of every mean and group.

    ``reward`` is the sum of ``parts`` (for instance ``answer`` and ``overlong``). ``error`` says why there is
    no verdict.
    """

    correct: bool
    reward: float
    parts: dict[str, float]
    status: GradeStatus = "graded"
    well_formed: bool = False
    parsed: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens ``start:stop`` of a rollout, and who wrote them."""

    author: Literal["prompt", "policy", "tool"]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a problem, over one or many turns.

    ``policy_mask [S]`` is true where the policy chose the token (the sampled stop token included).
    ``logprobs [S]`` is 0 and ``versions [S]`` is -1 wherever the mask is false.
    ``routes [S - 1, L, K]`` line up with the predicting row: row t holds the experts of token t.
    ``support``, if it was recorded, has an entry for each of the S tokens, empty wherever the mask is false.
    """

    key: Key
    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    routes: NDArray[np.unsignedinteger] | None
    turns: tuple[Turn, ...]
    finish: Finish
    temperature: float
    grade: Grade | None = None
    support: Support | None = None

    @property
    def verdict(self) -> Grade | None:
        """The grade if it counts: what means, votes and groups look at, and nothing else."""
        return self.grade if self.grade is not None and self.grade.status == "graded" else None

    @property
    def response_logprobs(self) -> NDArray[np.float32]:
        """Log-probabilities of the tokens that the policy chose, as the sampler wrote them down."""
        return self.logprobs[self.policy_mask]

    @property
    def response_tokens(self) -> int:
        """How many tokens the policy chose."""
        return int(self.policy_mask.sum())


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one problem, with their advantages (``[]`` until they are computed)."""

    problem: Problem
    rollouts: tuple[Rollout, ...]
    advantages: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
