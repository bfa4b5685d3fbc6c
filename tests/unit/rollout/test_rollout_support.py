import numpy as np

from beamline.records import Completion, Key, Request, SamplingParams, Support
from beamline.rollout.collect import to_rollout

REQUEST = Request(Key("train", 1, "p", 0), np.arange(3, dtype=np.int32), SamplingParams(8, record_support=True))


def completion(support: Support | None) -> Completion:
    return Completion(REQUEST.key, *(np.zeros(2, t) for t in ("i4", "f4", "i4")), None, "stop", support)


def test_tokens_of_the_prompt_have_empty_entries_and_those_of_the_response_theirs() -> None:
    entries = [np.array([4, 5], np.int32), np.array([6], np.int32)]
    support = to_rollout(REQUEST, completion(Support.of(entries))).support
    assert support is not None
    assert (support.ids.tolist(), support.sizes.tolist()) == ([4, 5, 6], [0, 0, 0, 2, 1])


def test_a_response_without_a_support_makes_a_rollout_without() -> None:
    assert to_rollout(REQUEST, completion(None)).support is None
