"""The batch that stays: what the next step would sample, or its beginning."""

from contextlib import closing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.records import Experience, Rollout
from beamline.rollout.collect import Job, sample
from beamline.rollout.local.worker import Routes
from beamline.rollout.strategies import training_params
from beamline.runtime.console import RunConsole
from beamline.runtime.data import training_set
from beamline.runtime.engines import load_chat, sampler_of
from beamline.runtime.subject import Subject, Weights

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FrozenBatch:
    """Sequences with what the sampler wrote down of them: tokens, log-probabilities, experts, support."""

    rollouts: tuple[Rollout, ...]

    @property
    def experiences(self) -> list[Experience]:
        """The sequences as a learner is given them."""
        return [Experience(rollout, advantage=0.0) for rollout in self.rollouts]

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Response tokens of each sequence, ``[B]``."""
        return np.array([rollout.response_tokens for rollout in self.rollouts])

    @property
    def routes(self) -> list[Routes]:
        """The experts of each sequence, ``[S - 1, L, K]``; of no layer where the model has none."""
        return [
            np.zeros((len(r.token_ids) - 1, 0, 1), np.uint8) if r.routes is None else r.routes for r in self.rollouts
        ]

    @property
    def logprobs(self) -> Floats:
        """What the sampler wrote down of all response tokens, ``[T]``."""
        return np.concatenate([rollout.response_logprobs for rollout in self.rollouts]).astype(np.float64)


def freeze(subject: Subject, weights: Weights, sequences: int, console: RunConsole) -> FrozenBatch:
    """Have the run's sampler draw the first ``sequences`` sequences of the next step.

    Equal weights, settings and seeds give an equal batch.

    Raises:
        DataError: there are no problems to draw for.
        SamplingStalledError: no response finished in time.
    """
    config, chat = subject.config, load_chat(subject.config)
    samples = min(config.algorithm.samples_per_prompt, sequences)
    problems = training_set(config, chat).take(config.seed, subject.problems_drawn, -(-sequences // samples))
    job = Job("train", subject.step + 1, problems, samples, training_params(config.rollout, chat.stop_ids))
    sampler = sampler_of(config, weights.module, subject.step, weights.adapters)
    with closing(sampler), console.phase("sampling", job.size) as bar:
        deadline = config.rollout.deadline_seconds
        groups = sample(sampler, job, chat, deadline, lambda done: bar.advance(len(done.token_ids)))
    return FrozenBatch(tuple(rollout for group in groups for rollout in group.rollouts)[:sequences])
