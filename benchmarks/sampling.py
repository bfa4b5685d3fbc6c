"""Sampling: the embedded sampler against ``generate`` of transformers, useful tokens a second.

    python -m benchmarks.sampling

The same model, prompts and response lengths at temperature 1. Ours records log-probabilities and routes, the peer
neither. The peer runs all prompts as one batch, with the cache that is faster in a trial on ragged-64. Every run checks
that each sequence has exactly the tokens that were asked for. Loading, tokenizing and making the sampler's buffers are
outside the clock.
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from beamline.chat import BeamChat
from beamline.runtime.engines import load_module, sampler_of
from beamline.starter import STARTER
from benchmarks.harness import PEER, Apart, Comparison, Figures, both, comparison_table, parser, record, write
from benchmarks.workload import (
    LONGEST,
    PAD,
    SEED,
    ForcedLengths,
    as_ours,
    as_peer,
    left_padded,
    lengths,
    peer_module,
    problems,
    requests,
    run_config,
    sample,
)

WORKLOADS = {"ragged-64": lengths(64), "ragged-512": lengths(512), "even-512": [64] * 512}
TARGETS = {"ragged-64": 4.0, "ragged-512": 2.5, "even-512": 2.5}
CACHES = {"dynamic": None, "static": "static"}  # `cache_implementation` of generate


class Ours:
    """The embedded sampler."""

    def __init__(self, tokens: Sequence[int]) -> None:
        as_ours()
        config = run_config(LONGEST)
        self._sampler = sampler_of(config, load_module(config), version=0)
        self._asked = requests(problems(len(tokens)), prompts(len(tokens)), tokens)

    def __call__(self) -> Figures:
        start = time.perf_counter()
        sample(self._sampler, self._asked)
        return _figures([request.params.max_tokens for request in self._asked], time.perf_counter() - start)


class Peer:
    """``generate``, all prompts as one batch, with a kind of cache."""

    def __init__(self, tokens: Sequence[int], cache: str | None) -> None:
        as_peer()
        self._module, self._tokens = peer_module().eval(), tokens
        self._ids, self._mask = left_padded(prompts(len(tokens)))
        self._config = GenerationConfig(
            max_new_tokens=max(tokens), do_sample=True, top_k=0, pad_token_id=PAD, cache_implementation=cache
        )

    def __call__(self) -> Figures:
        torch.manual_seed(SEED)
        width = self._ids.shape[1]
        stop = StoppingCriteriaList([ForcedLengths(width, self._tokens)])
        start = time.perf_counter()
        out = self._module.generate(
            self._ids, attention_mask=self._mask, generation_config=self._config, stopping_criteria=stop
        )
        seconds = time.perf_counter() - start
        _check(out[:, width:], self._tokens)
        return _figures(self._tokens, seconds)


def main() -> None:
    """Run every workload and write the results."""
    arguments = parser(__doc__, rounds=5).parse_args()
    trial = _trial(WORKLOADS["ragged-64"])
    cache = CACHES[min(trial, key=lambda name: trial[name])]
    comparisons: dict[str, Comparison] = {}
    for name, tokens in WORKLOADS.items():
        comparisons[name] = both(partial(Ours, tokens), partial(Peer, tokens, cache), arguments.rounds, name)
    workloads = {
        name: record(comparison, TARGETS[name]) | {"prompts": len(WORKLOADS[name]), "tokens": sum(WORKLOADS[name])}
        for name, comparison in comparisons.items()
    }
    table = comparison_table("sampling", comparisons, TARGETS, "tokens_per_s", "tokens/s")
    write("sampling", {"workloads": workloads, "peer_seconds_by_cache": trial}, table, arguments.results)


def _trial(tokens: Sequence[int]) -> dict[str, float]:
    """The peer's seconds with each cache, after a run that warms up."""
    seconds = {}
    for name, cache in CACHES.items():
        with Apart(partial(Peer, tokens, cache), PEER) as peer:
            peer()
            seconds[name] = peer()["seconds"]
    return seconds


def prompts(count: int) -> list[NDArray[np.int32]]:
    """The prompts of the first problems."""
    chat = BeamChat(STARTER)
    return [chat.prompt_ids(problem.messages) for problem in problems(count)]


def _figures(tokens: Sequence[int], seconds: float) -> Figures:
    return {"seconds": seconds, "tokens_per_s": sum(tokens) / seconds}


def _check(drawn: Tensor, tokens: Sequence[int]) -> None:
    """Raise unless each row was filled exactly from its own length on."""
    after = torch.arange(drawn.shape[1]) >= torch.tensor(tokens)[:, None]
    if drawn.shape[1] != max(tokens) or not bool((drawn[after] == PAD).all()):
        raise RuntimeError(f"generate gave {tuple(drawn.shape)} tokens, which do not end where they were asked to")


if __name__ == "__main__":
    main()
