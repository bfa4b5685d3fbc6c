"""Log-probabilities of a frozen batch under any setup, by the learner or by the sampler."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from beamline.kernels.parallel import over_items
from beamline.learner.torch.evaluation import Evaluation, every_row
from beamline.mismatch.attention import torch_attention
from beamline.mismatch.frozen import Floats, FrozenBatch
from beamline.mismatch.setup import RoutesOf, Setup, learner_setup
from beamline.model.beam import BeamShape
from beamline.policy import parity
from beamline.policy.positions import rope_theta
from beamline.policy.weights import named_tensors
from beamline.records import Rollout
from beamline.rollout.local.beam import BeamDecoder
from beamline.rollout.local.worker import Routes, Worker
from beamline.runtime.console import PhaseBar, RunConsole
from beamline.runtime.engines import check_model, positions
from beamline.runtime.subject import Subject, Weights


class Evaluator:
    """Evaluates a batch; what was found once is kept. ``recorded [T]`` is what the sampler wrote down of it.

    Args:
        subject: whose engines.
        weights: the weights of both, by the names of :class:`Setup`.
        batch: the sequences.
        console: where progress is shown.
    """

    def __init__(self, subject: Subject, weights: dict[str, Weights], batch: FrozenBatch, console: RunConsole) -> None:
        self._config, self._weights, self._batch, self._console = subject.config, weights, batch, console
        self._learner = learner_setup(subject.config)
        self._found: dict[Setup, Floats] = {}
        self._routes: dict[RoutesOf, Sequence[Routes]] = {"recorded": batch.routes}
        self.shape = check_model(subject.config)
        self.recorded, self.tokens_B = batch.logprobs, batch.tokens

    def __call__(self, setup: Setup) -> Floats:
        """Log-probabilities ``[T]`` of all response tokens."""
        if setup not in self._found:
            self._found[setup] = self._evaluated(setup)
        return self._found[setup]

    def routes(self, of: RoutesOf) -> Sequence[Routes]:
        """The experts ``[S - 1, L, K]`` of each sequence."""
        if of not in self._routes:
            dtype = "bfloat16" if of == "bfloat16" else self._learner.dtype
            free = replace(self._learner, engine="sampler", packed=False, routes=of, dtype=dtype)
            self._found[free], self._routes[of] = self.chosen(free)
        return self._routes[of]

    def chosen(self, setup: Setup) -> tuple[Floats, list[Routes]]:
        """Log-probabilities ``[T]`` and experts that a sampler with this setup finds, whose routers choose."""
        return self._decoded(setup, [None] * len(self._batch.rollouts))

    def _evaluated(self, setup: Setup) -> Floats:
        if setup.engine == "sampler":
            return self._decoded(setup, self.routes(setup.routes))[0]
        module, adapters = self._weights[setup.weights]
        policy = self._config.policy.model_copy(
            update={"parity": setup.engine != "module", "r3": setup.routes == "recorded"}
        )
        own = partial(parity.hidden_states, attend=torch_attention) if setup.engine == "torch attention" else None
        evaluation = Evaluation(module, policy, adapters, own)
        limit = self._config.learner.micro_batch_tokens if setup.packed else 1
        with self._console.phase("evaluating", len(self._batch.rollouts)) as bar:
            found, _ = evaluation.of_sequences(self._batch.experiences, limit, every_row)
            for rollout in self._batch.rollouts:
                bar.advance(rollout.response_tokens)
        return _of_responses(self._batch.rollouts, found)

    def _decoded(self, setup: Setup, routes: Sequence[Routes | None]) -> tuple[Floats, list[Routes]]:
        """What a sampler with this setup makes of the sequences, with given routes or (None) with its own."""
        rollouts, threads = self._batch.rollouts, torch.get_num_threads()
        decoder = _decoder(self.shape, setup, self._weights[setup.weights], positions(self._config))
        longest = max(len(rollout.token_ids) for rollout in rollouts)
        with self._console.phase("evaluating", len(rollouts)) as bar:

            def share(thread: int) -> list[tuple[Any, Routes]]:
                worker = Worker(decoder, longest)
                places = range(thread, len(rollouts), threads)
                return [_evaluate(worker, rollouts[i], setup.temperature, routes[i], bar) for i in places]

            shares = over_items(range(threads), threads, share)
        found = [shares[i % threads][i // threads] for i in range(len(rollouts))]
        return _of_responses(rollouts, [logprobs for logprobs, _ in found]), [taken for _, taken in found]


def _evaluate(
    worker: Worker, rollout: Rollout, temperature: float, routes: Routes | None, bar: PhaseBar
) -> tuple[NDArray[np.float32], Routes]:
    support = None if rollout.support is None else rollout.support.take(np.arange(1, len(rollout.token_ids)))
    evaluated = worker.evaluate(rollout.token_ids, temperature, routes, support)
    bar.advance(rollout.response_tokens)
    return evaluated


def _of_responses(rollouts: Sequence[Rollout], logprobs: Iterable[NDArray[np.float32]]) -> Floats:
    """Of the log-probabilities of all tokens but the first of each sequence, those that the policy chose."""
    parts = [values[rollout.policy_mask[1:]] for rollout, values in zip(rollouts, logprobs, strict=True)]
    return np.concatenate(parts).astype(np.float64)


@torch.no_grad()
def _decoder(shape: BeamShape, setup: Setup, weights: Weights, room: int) -> BeamDecoder:
    """A sampler's decoder with these weights, rounded as a sampler rounds what it receives."""
    module, adapters = weights
    lora = None if adapters is None else adapters.lora
    decoder = BeamDecoder(shape, setup.numerics, rope_theta(cast(Any, module).config), room, lora)
    given = named_tensors(module) | ({} if adapters is None else named_tensors(adapters))
    for name, tensor in decoder.named.items():
        tensor.copy_(given[name])
    decoder.round_weights(decoder.named)
    return decoder
