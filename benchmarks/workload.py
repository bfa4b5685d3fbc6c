"""What both sides are given: the starter model, prompts of the arithmetic task, and the lengths of the responses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from beamline.config.schema import RunConfig
from beamline.records import Completion, Key, Problem, Request, SamplingParams
from beamline.records.random import stream
from beamline.rollout.sampler import Sampler
from beamline.runtime.determinism import make_deterministic
from beamline.starter import STARTER
from beamline.tasks.arithmetic import generate
from benchmarks.harness import THREADS

SEED = 0
SHORTEST, LONGEST = 8, 256  # tokens of a ragged response
PROMPT_TOKENS = 32  # most of a prompt
PAD = 263  # <|endoftext|> of the starter


def problems(count: int) -> list[Problem]:
    """The first training problems of the quickstart's difficulty."""
    return generate(SEED, "train", count, levels=[3])


def lengths(count: int, draw: int = 0) -> list[int]:
    """Response lengths, uniform from ``SHORTEST`` to ``LONGEST``; another ``draw`` gives others."""
    rng = np.random.Generator(stream(SEED, "benchmark lengths", draw))
    return [int(n) for n in rng.integers(SHORTEST, LONGEST + 1, size=count)]


def run_config(response_tokens: int, prompt_tokens: int = PROMPT_TOKENS, **optimizer: float) -> RunConfig:
    """A run with default engines. ``optimizer`` are fields of OptimizerConfig."""
    return RunConfig.model_validate(
        {
            "seed": SEED,
            "rollout": {"max_prompt_tokens": prompt_tokens, "max_response_tokens": response_tokens},
            "learner": {"optimizer": optimizer},
            "runtime": {"threads": THREADS},
        }
    )


def requests(
    asked: Sequence[Problem], prompts: Sequence[NDArray[np.int32]], tokens: Sequence[int], step: int = 0
) -> list[Request]:
    """One request for each response length, spread evenly over the problems; only the limit ends a response."""
    samples = len(tokens) // len(asked)
    made = []
    for i, limit in enumerate(tokens):
        problem, sample = divmod(i, samples)
        key = Key("train", step, asked[problem].id, sample)
        made.append(Request(key, prompts[problem], SamplingParams(max_tokens=limit)))
    return made


def sample(sampler: Sampler, asked: Sequence[Request]) -> list[Completion]:
    """All completions, in the order of the requests.

    Raises:
        RuntimeError: a response has another length than was asked for, or lacks routes or log-probabilities.
    """
    sampler.submit(asked)
    done: dict[Key, Completion] = {}
    while len(done) < len(asked):
        done.update({completion.key: completion for completion in sampler.poll(timeout=60.0)})
    for request in asked:
        got, wanted = done[request.key], request.params.max_tokens
        if len(got.token_ids) != wanted or len(got.logprobs) != wanted or got.routes is None:
            raise RuntimeError(f"{request.key}: {len(got.token_ids)} tokens with records, asked for {wanted}")
    return [done[request.key] for request in asked]


def peer_module() -> Any:
    """The starter as a user of transformers loads it, in float32; nothing ends its responses early.

    Raises:
        RuntimeError: it does not have the fast attention and experts that the comparison names.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    module = AutoModelForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    found = (module.config._attn_implementation, module.config._experts_implementation)
    if found != ("sdpa", "grouped_mm"):
        raise RuntimeError(f"the peer's attention and experts are {found}, not ('sdpa', 'grouped_mm')")
    module.generation_config = GenerationConfig(pad_token_id=PAD)
    return module


def as_ours() -> None:
    """Set this process as a run of Beamline does: deterministic algorithms."""
    make_deterministic(THREADS)


def as_peer() -> None:
    """Set this process as the peers find it: whatever algorithm is fastest."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(False)


def left_padded(prompts: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask ``[B, P]`` of prompts that end in the same column."""
    rows = [torch.from_numpy(prompt.astype(np.int64)) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side="left")
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids, real


class ForcedLengths:
    """A stopping criterion of ``generate``: each sequence of the batch ends after its own number of tokens.

    Because of ``eos_token_id`` ``generate`` treats it as it treats a stop token: rows that are done are filled.
    """

    eos_token_id = None

    def __init__(self, prompt_tokens: int, tokens: Sequence[int]) -> None:
        self._ends = prompt_tokens + torch.tensor(tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self._ends
