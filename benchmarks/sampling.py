"""Sampling: the embedded sampler against ``generate`` of transformers, useful tokens a second.

    python -m benchmarks.sampling

The same model, prompts and response lengths at temperature 1. Ours records log-probabilities and routes, the peer
neither. The peer runs all prompts as one batch, with the cache that is faster in a trial on ragged-64. Every run checks
that each sequence has exactly the tokens that were asked for. Loading, tokenizing and making the sampler's buffers are
outside the clock.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

from beamline.chat import BeamChat
from beamline.runtime.engines import load_module, sampler_of
from beamline.starter import STARTER
from benchmarks.harness import Comparison, Figures, comparison_table, paired, parser, record, write
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


@dataclass(frozen=True, slots=True)
class Workload:
    """Both sides' engines, prompts, and how many tokens each prompt gets."""

    sampler: Any
    module: Any
    prompts: list[NDArray[np.int32]]
    tokens: Sequence[int]

    def ours(self) -> Figures:
        as_ours()
        asked = requests(problems(len(self.tokens)), self.prompts, self.tokens)
        start = time.perf_counter()
        sample(self.sampler, asked)
        return self._figures(time.perf_counter() - start)

    def peer(self, cache: str | None) -> Figures:
        as_peer()
        torch.manual_seed(SEED)
        ids, mask = left_padded(self.prompts)
        config = GenerationConfig(
            max_new_tokens=max(self.tokens),
            do_sample=True,
            top_k=0,
            pad_token_id=PAD,
            cache_implementation=cache,
        )
        stop = StoppingCriteriaList([ForcedLengths(ids.shape[1], self.tokens)])
        start = time.perf_counter()
        out = self.module.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=stop)
        seconds = time.perf_counter() - start
        _check(out[:, ids.shape[1] :], self.tokens)
        return self._figures(seconds)

    def _figures(self, seconds: float) -> Figures:
        return {"seconds": seconds, "tokens_per_s": sum(self.tokens) / seconds}


def main() -> None:
    """Run every workload and write the results."""
    arguments = parser(__doc__, rounds=5).parse_args()
    trial = _trial(_workload(WORKLOADS["ragged-64"]))
    cache = CACHES[min(trial, key=lambda name: trial[name])]
    comparisons: dict[str, Comparison] = {}
    for name, tokens in WORKLOADS.items():
        workload = _workload(tokens)
        comparisons[name] = paired(workload.ours, partial(workload.peer, cache), arguments.rounds, label=name)
    workloads = {
        name: record(comparison, TARGETS[name]) | {"prompts": len(WORKLOADS[name]), "tokens": sum(WORKLOADS[name])}
        for name, comparison in comparisons.items()
    }
    table = comparison_table("sampling", comparisons, TARGETS, "tokens_per_s", "tokens/s")
    write("sampling", {"workloads": workloads, "peer_seconds_by_cache": trial}, table, arguments.results)


def _trial(workload: Workload) -> dict[str, float]:
    """The peer's seconds with each cache, after a run that warms up."""
    workload.peer(CACHES["dynamic"])
    return {name: workload.peer(cache)["seconds"] for name, cache in CACHES.items()}


def _workload(tokens: Sequence[int]) -> Workload:
    config, chat = run_config(LONGEST), BeamChat(STARTER)
    sampler = sampler_of(config, load_module(config), version=0)
    prompts = [chat.prompt_ids(problem.messages) for problem in problems(len(tokens))]
    return Workload(sampler, peer_module().eval(), prompts, tokens)


def _check(drawn: Tensor, tokens: Sequence[int]) -> None:
    """Raise unless each row was filled exactly from its own length on."""
    after = torch.arange(drawn.shape[1]) >= torch.tensor(tokens)[:, None]
    if drawn.shape[1] != max(tokens) or not bool((drawn[after] == PAD).all()):
        raise RuntimeError(f"generate gave {tuple(drawn.shape)} tokens, which do not end where they were asked to")


if __name__ == "__main__":
    main()
