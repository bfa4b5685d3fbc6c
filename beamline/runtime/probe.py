"""Before the first step: do sampler and learner compute the same of the same tokens?"""

import numpy as np

from beamline.errors import BeamlineError
from beamline.learner.learner import Learner
from beamline.model.beam import BeamShape
from beamline.records import Completion, Experience, Key, Request, SamplingParams
from beamline.records.random import stream
from beamline.rollout.collect import to_rollout
from beamline.rollout.sampler import Sampler

LIMIT = 0.25
"""Mean |delta log p| beyond which weights are in the wrong place: rounding to 8 bits makes a few hundredths, one tensor
that is not where it belongs makes whole units."""

_SAMPLES, _PROMPT, _RESPONSE = 4, 16, 8


class ProbeError(BeamlineError, RuntimeError):
    """Sampler and learner hold different models, though one was given the other's weights."""


def probe(sampler: Sampler, learner: Learner, shape: BeamShape, positions: int, deadline: float) -> float:  # type: ignore[type-arg]
    """Draw a few tokens after a fixed prompt, and have the learner evaluate them: their mean |delta log p|.

    Args:
        sampler: with the learner's weights.
        learner: whose weights they are.
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
    while len(done) < len(asked):
        came = sampler.poll(deadline)
        if not came:
            raise ProbeError(f"the sampler did not finish {_RESPONSE} tokens of a probe within {deadline:.0f} s")
        done += came
    rollouts = [to_rollout(asked[completion.key], completion) for completion in done]
    found = learner.forward([Experience(rollout, 0.0) for rollout in rollouts], ["logprobs"]).logprobs
    assert found is not None
    theirs = np.concatenate([values[r.policy_mask[1:]] for values, r in zip(found, rollouts, strict=True)])
    ours = np.concatenate([rollout.response_logprobs for rollout in rollouts])
    difference = float(np.abs(theirs.astype(np.float64) - ours).mean())
    if not difference <= LIMIT:
        raise ProbeError(
            f"of {len(ours)} tokens that the sampler drew, the learner finds log-probabilities that differ by "
            f"{difference:.3g} in the mean (at most {LIMIT} can be rounding): the sampler does not compute with the "
            "learner's weights. Nothing was trained"
        )
    return difference
