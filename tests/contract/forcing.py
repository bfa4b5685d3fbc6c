"""Routes that are given, and the Hugging Face module made to follow them by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BeamForCausalLM

from beamline.learner.learner import Learner
from beamline.records import Experience
from tests.adapters import Routes, random_routes
from tests.contract.learning import batch
from tests.tiny_beam import beam_shape, reference, teacher_forced


def with_routes(sequence: Experience, routes: Routes | None) -> Experience:
    return replace(sequence, rollout=replace(sequence.rollout, routes=routes))


def routed_batch(**changes: Any) -> list[Experience]:
    """The sequences of :func:`batch`, each with routes at random."""
    return [with_routes(e, random_routes(beam_shape(**changes), e.rows, seed)) for seed, e in enumerate(batch())]


@contextmanager
def forced(plain: BeamForCausalLM, sequences: Sequence[Experience]) -> Iterator[None]:
    """Sequences that are evaluated meanwhile, one by one and in this order, follow their routes.

    An expert weighs what its router scores it, over the sum of the row's scores where the model normalizes them.
    """
    gates = [layer.mlp.gate for layer in plain.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(_forcing(layer, sequences)) for layer, gate in enumerate(gates)]
    yield
    for hook in hooks:
        hook.remove()


def _forcing(layer: int, sequences: Sequence[Experience]) -> Any:
    following = iter(sequences)

    def force(gate: Any, _: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        routes = next(following).rollout.routes
        assert routes is not None
        experts_NK = torch.from_numpy(routes[:, layer].astype(np.int64))
        weights_NK = output[0].sigmoid().gather(1, experts_NK)
        if gate.norm_topk_prob:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return output[0], weights_NK, experts_NK

    return force


def forced_logprobs(plain: BeamForCausalLM, sequence: Experience) -> NDArray[np.float32]:
    """Log-probability of each target ``[S - 1]`` under the sequence's routes, at its temperature."""
    with forced(plain, [sequence]):
        return free_logprobs(plain, sequence)


def free_logprobs(plain: BeamForCausalLM, sequence: Experience) -> NDArray[np.float32]:
    """The same with the experts that the routers choose."""
    return teacher_forced(plain, sequence.rollout.token_ids, sequence.rollout.temperature)


def logprobs_of(learner: Learner[Any], sequences: Sequence[Experience]) -> list[NDArray[np.float32]]:
    found = learner.forward(sequences, ["logprobs"]).logprobs
    assert found is not None
    return list(found)


def assert_follows(learner: Learner[Any], module: nn.Module, sequences: Sequence[Experience]) -> None:
    """Log-probabilities are those of the module with its experts forced, as near as float32 sums in another order."""
    plain = reference(module)
    for sequence, found in zip(sequences, logprobs_of(learner, sequences), strict=True):
        np.testing.assert_allclose(found, forced_logprobs(plain, sequence), rtol=1e-5, atol=2e-5)
