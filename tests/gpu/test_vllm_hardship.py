"""An engine that runs out of room, and one that is killed."""

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from beamline.config.rollout import RolloutConfig
from beamline.config.vllm import VllmConfig
from beamline.model.layout import DType
from beamline.policy import model
from beamline.rollout.vllm.replica import Launch
from tests.contract.sampling import assert_same_tokens, collect, request, run, sequence, start
from tests.gpu.engines import launch
from tests.shared_engines import SharedEngines
from tests.tiny_beam import CONTEXT, evaluate, random_beam, reference, teacher_forced

MODULE = random_beam()
PLAIN = reference(MODULE)
BLOCKS = 40
"""Of 16 tokens: for the prompts of all requests below, and for a quarter of what they grow to."""


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    """An engine with little room, which may be replaced once."""
    folder = tmp_path_factory.mktemp("tight")
    model.save(MODULE, folder / "model", "float32")

    def launches(dtype: DType) -> list[Launch]:
        scarce = {"enforce_eager": True, "num_gpu_blocks_override": BLOCKS}
        vllm = VllmConfig(dtype=dtype, memory_share=0.2, max_sequences=32, engine_args=scarce)
        return [launch(folder / "model", folder / "tight.log", CONTEXT, RolloutConfig(engine="vllm", vllm=vllm))]

    shared = SharedEngines(launches, max_restarts=1)
    yield shared
    shared.close()


def test_requests_that_lost_their_cache_meanwhile_are_right_in_the_end(tight: SharedEngines) -> None:
    """vLLM takes room from some for others, and evaluates them again later: tokens, log-probabilities and routes."""
    asked = [request(4 + sample % 3, sample, max_tokens=80) for sample in range(24)]
    for wanted, completion in zip(asked, run(tight.sampler(MODULE).sampler, asked), strict=True):
        ids = sequence(wanted, completion)
        expected = teacher_forced(PLAIN, ids)[len(wanted.prefix_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=1e-5, atol=1e-5)
        assert completion.routes is not None
        np.testing.assert_array_equal(np.sort(completion.routes), np.sort(evaluate(PLAIN, ids[:-1]).routes_SLK))
    tight.end_test()


def test_an_engine_that_is_killed_is_replaced_and_nothing_is_lost(tight: SharedEngines) -> None:
    sampler = tight.sampler(MODULE).sampler
    asked = [request(5, sample) for sample in range(8)]
    whole = run(sampler, asked)
    start(sampler, asked)
    os.kill(tight.fleet().replicas[0].pid, signal.SIGKILL)
    done = collect(sampler, len(asked))
    assert_same_tokens(whole, [done[each.key] for each in asked])
    assert sampler.statistics() == {"rollout/engine_restarts": 1, "rollout/requests_reissued": len(asked)}
    tight.end_test()
