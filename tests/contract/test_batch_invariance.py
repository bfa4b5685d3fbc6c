"""What a request is answered with has the same bits in whatever company it is computed.

For samplers that promise it: then a log-probability can be computed again, and a run can be cut in any way.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from beamline.records import Completion, Request
from beamline.records.codec import encode
from tests.contract.engines import INVARIANT, SAMPLERS, SamplerFactory
from tests.contract.sampling import PREFIX_LENGTHS, assert_same_bits, request, run
from tests.tiny_beam import VOCAB, WINDOW, random_beam

MODULE = random_beam()
LONG = 7 * WINDOW  # of a response: the rings of sliding layers wrap around several times
PARAMS = (
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 0.0},
    {"top_k": 6, "min_p": 0.02},
    {"stop_ids": tuple(range(0, VOCAB, 7)), "min_tokens": 3},
)
ASKED = [
    request(length, sample, max_tokens=LONG - 5 * sample, **PARAMS[(i + sample) % len(PARAMS)])
    for i, length in enumerate(PREFIX_LENGTHS)
    for sample in range(3)
]
"""Three of each prefix: enough to be shared out over three threads."""


@pytest.fixture(params=sorted(INVARIANT))
def sampler_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@cache
def answers(name: str) -> list[Completion]:
    """One request after the other, each alone in the sampler."""
    sampler = SAMPLERS[name](MODULE, slots=1).sampler
    return [completion for wanted in ASKED for completion in run(sampler, [wanted])]


def test_requests_are_as_different_as_they_should_be(sampler_name: str) -> None:
    completions = answers(sampler_name)
    assert len({c.token_ids.tobytes() for c in completions}) > 20
    assert {c.finish for c in completions} == {"stop", "length"}
    lengths = [len(c.token_ids) for c in completions]
    assert min(lengths) < WINDOW
    assert max(lengths) == LONG


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_slots_and_threads_change_nothing(
    sampler_factory: SamplerFactory, sampler_name: str, slots: int, threads: int
) -> None:
    sampler = sampler_factory(MODULE, slots=slots, threads=threads).sampler
    assert_same_bits(run(sampler, ASKED), answers(sampler_name))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_order_of_requests_changes_nothing(sampler_factory: SamplerFactory, sampler_name: str, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(ASKED))
    completions = run(sampler_factory(MODULE, slots=10, threads=2).sampler, [ASKED[i] for i in order])
    assert_same_bits(completions, [answers(sampler_name)[i] for i in order])


def test_two_samplers_answer_like_one(sampler_factory: SamplerFactory, sampler_name: str) -> None:
    halves = [run(sampler_factory(MODULE, slots=8).sampler, ASKED[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        assert_same_bits(half, answers(sampler_name)[i::2])


def test_requests_that_come_later_change_nothing(sampler_factory: SamplerFactory, sampler_name: str) -> None:
    """Some are in the middle of their responses when others take the slots beside them."""
    sampler = sampler_factory(MODULE, slots=40, threads=2).sampler
    done: dict[int, Completion] = {}
    at = {wanted.key: i for i, wanted in enumerate(ASKED)}
    for start in range(0, len(ASKED), 9):
        sampler.submit(ASKED[start : start + 9])
        for _ in range(8):
            done |= {at[c.key]: c for c in sampler.poll(0.0)}
    while len(done) < len(ASKED):
        done |= {at[c.key]: c for c in sampler.poll(60.0)}
    assert_same_bits([done[i] for i in range(len(ASKED))], answers(sampler_name))


def evaluated_together(asked: list[Request], completions: list[Completion]) -> Iterator[Counter[tuple[int, int]]]:
    """How many tokens each expert (of a layer) has in each step, if all are decoded from the first step on."""
    for step in range(min(len(c.token_ids) for c in completions) - 1):
        chosen = Counter[tuple[int, int]]()
        for wanted, completion in zip(asked, completions, strict=True):
            assert completion.routes is not None
            for layer, experts in enumerate(completion.routes[len(wanted.prefix_ids) + step]):
                chosen.update((layer, expert) for expert in experts.tolist())
        yield chosen


def test_an_expert_computes_the_same_for_one_token_and_for_many(
    sampler_factory: SamplerFactory, sampler_name: str
) -> None:
    """Alone an expert has one token in a step. Together some have one, and others more than the rows of a tile."""
    together = [i for i, wanted in enumerate(ASKED) if not wanted.params.stop_ids]
    asked = [ASKED[i] for i in together]
    completions = run(sampler_factory(MODULE, slots=64).sampler, asked)
    counts = [set(chosen.values()) for chosen in evaluated_together(asked, completions)]
    assert any(1 in tokens and max(tokens) > 4 for tokens in counts)
    assert_same_bits(completions, [answers(sampler_name)[i] for i in together])


def test_another_process_answers_with_the_same_bytes(sampler_factory: SamplerFactory, sampler_name: str) -> None:
    program = "import sys; from tests.contract.test_batch_invariance import answer; answer(sys.argv[1])"
    ended = subprocess.run(
        [sys.executable, "-c", program, sampler_name], cwd=Path(__file__).parents[2], capture_output=True, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert ended.stdout == encode(run(sampler_factory(MODULE, slots=5, threads=2).sampler, ASKED))


def answer(name: str) -> None:
    """Write the answers of a sampler to the standard output."""
    sys.stdout.buffer.write(encode(run(SAMPLERS[name](MODULE, slots=64, threads=3).sampler, ASKED)))
