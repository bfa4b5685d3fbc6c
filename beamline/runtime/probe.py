"""Before anything is trained or measured: does the sampler compute what the model does whose weights it has?"""

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from beamline.errors import BeamlineError
from beamline.model.beam import BeamShape
from beamline.records import Completion, Experience, Key, Request, SamplingParams
from beamline.records.random import stream
from beamline.rollout.collect import to_rollout
from beamline.rollout.sampler import Sampler

LIMIT = 0.25
"""Mean |delta log p| beyond which it is not rounding: of 8 bits that makes a few hundredths. Weights that are not where
they belong make whole units, but a few of them, such as two experts that were exchanged, may stay below."""

_SAMPLES, _PROMPT, _RESPONSE = 4, 16, 8


class ProbeError(BeamlineError, RuntimeError):
    """Sampler and learner hold different models, though one was given the other's weights."""


Evaluate = Callable[[list[Experience]], Sequence[NDArray[np.float32]]]
"""Log-probabilities of every row of sequences, by the model whose weights a sampler was given."""


def probe(sampler: Sampler, evaluate: Evaluate, shape: BeamShape, positions: int, deadline: float) -> float:
    """Draw a few tokens after a fixed prompt, and have them evaluated: their mean |delta log p|.

    Args:
        sampler: with the weights of what evaluates.
        evaluate: the learner, or the model alone.
        shape: of the model.
        positions: tokens of the longest sequence that the sampler has room for.
        deadline: seconds that it may take to draw them.

    Raises:
        ProbeError: it is more than :data:`LIMIT`, or nothing came in time.
    """
    prompt = min(_PROMPT, max(1, positions - _RESPONSE))
    ids = (stream(0, "probe").random_raw(prompt) % np.uint64(shape.vocab_size)).astype(np.int32)
    params = SamplingParams(min(_RESPONSE, positions - prompt))
    asked = {key: Request(key, ids, params) for key in (Key("eval", 0, "probe", sample) for sample in range(_SAMPLES))}
    sampler.submit(list(asked.values()))
    done: list[Completion] = []
    end = time.monotonic() + deadline
    while len(done) < len(asked):
        came = sampler.poll(max(0.0, end - time.monotonic()))
        if not came:
            raise ProbeError(f"the sampler did not finish {params.max_tokens} tokens of a probe in {deadline:.0f} s")
        done += came
    rollouts = [to_rollout(asked[completion.key], completion) for completion in done]
    found = evaluate([Experience(rollout, 0.0) for rollout in rollouts])
    theirs = np.concatenate([values[r.policy_mask[1:]] for values, r in zip(found, rollouts, strict=True)])
    ours = np.concatenate([rollout.response_logprobs for rollout in rollouts])
    difference = float(np.abs(theirs.astype(np.float64) - ours).mean())
    if not difference <= LIMIT:
        raise ProbeError(
            f"of {len(ours)} tokens that the sampler drew, the model finds log-probabilities that differ by "
            f"{difference:.3g} in the mean (at most {LIMIT} can be rounding): the sampler does not compute with the "
            "weights that it was given. Nothing was trained or measured"
        )
    return difference
