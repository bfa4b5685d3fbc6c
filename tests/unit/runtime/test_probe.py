"""The probe before the first step: it passes what agrees, and stops what does not, by figure or by deadline."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.errors import BeamlineError
from beamline.learner.learner import Learner
from beamline.records import Completion, Experience, Key, Request
from beamline.rollout.sampler import Sampler
from beamline.runtime.engines import Engines
from beamline.runtime.probe import LIMIT, ProbeError, probe
from beamline.transfer.plan import plan
from tests.contract.engines import PairBench, torch_local
from tests.tiny_beam import CONTEXT, VOCAB, beam_shape, random_beam

SHAPE, DEADLINE = beam_shape(), 60.0


class Relay:
    """A sampler that remembers what it was asked for, and changes what the one behind it has drawn."""

    def __init__(self, behind: Sampler, change: Callable[[Completion], Completion] = lambda same: same) -> None:
        self.behind, self.change = behind, change
        self.asked: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked += requests
        self.behind.submit(requests)

    def poll(self, timeout: float) -> list[Completion]:
        return [self.change(completion) for completion in self.behind.poll(timeout)]


class Silent:
    """A sampler that ends some of what it is asked for, and then says no more."""

    def __init__(self, behind: Sampler, answered: int) -> None:
        self.behind, self.answered = behind, answered
        self.waited: list[float] = []

    def submit(self, requests: Collection[Request]) -> None:
        self.behind.submit(list(requests)[: self.answered])

    def poll(self, timeout: float) -> list[Completion]:
        self.waited.append(timeout)
        return self.behind.poll(timeout) if self.answered else []


def pair(seed: int = 0, **settings: Any) -> PairBench:
    """A learner, and a sampler with its weights."""
    made = torch_local(random_beam(seed), **settings)
    made.sync(0)
    return made


def probed(sampler: object, learner: Learner[Any], positions: int = CONTEXT) -> float:
    def evaluate(sequences: list[Experience]) -> list[NDArray[np.float32]]:
        found = learner.forward(sequences, ["logprobs"]).logprobs
        assert found is not None
        return found

    return probe(cast(Sampler, sampler), evaluate, SHAPE, positions, DEADLINE)


@pytest.mark.parametrize("r3", [False, True])
def test_engines_with_the_same_weights_agree(r3: bool) -> None:
    engines = pair(r3=r3)
    relay = Relay(engines.sampler)
    assert probed(relay, engines.learner) < 1e-5
    assert [len(each.prefix_ids) for each in relay.asked] == [16] * 4
    assert {each.params.max_tokens for each in relay.asked} == {8}
    assert all((each.prefix_ids >= 0).all() and (each.prefix_ids < VOCAB).all() for each in relay.asked)


def test_other_weights_are_found_with_the_figure() -> None:
    with pytest.raises(
        ProbeError, match=r"of 32 tokens .* differ by [\d.]+ in the mean .*Nothing was trained or measured"
    ) as found:
        probed(pair(1).sampler, pair(0).learner)
    figure = float(str(found.value).partition("differ by ")[2].partition(" ")[0])
    assert figure > LIMIT
    assert isinstance(found.value, BeamlineError)  # said without a traceback


def test_a_run_probes_its_own_engines() -> None:
    engines, other = pair(), pair(1)
    moves = plan(engines.learner.layout("full"), engines.sampler.layout("full"))
    assert Engines(engines.learner, engines.sampler, moves, SHAPE, CONTEXT).agreement(DEADLINE) < 1e-5
    with pytest.raises(ProbeError, match="differ by"):
        Engines(engines.learner, other.sampler, moves, SHAPE, CONTEXT).agreement(DEADLINE)


def test_the_figure_is_the_mean_of_absolute_differences() -> None:
    """Half of them above and half below would cancel out."""
    engines = pair()

    def shifted(completion: Completion) -> Completion:
        signs = np.where(np.arange(len(completion.logprobs)) % 2, 1, -1).astype(np.float32)
        return replace(completion, logprobs=completion.logprobs + np.float32(0.125) * signs)

    assert probed(Relay(engines.sampler, shifted), engines.learner) == pytest.approx(0.125, abs=1e-5)


def test_what_is_not_a_number_does_not_pass() -> None:
    engines = pair()
    broken = Relay(engines.sampler, lambda each: replace(each, logprobs=each.logprobs * np.float32(np.nan)))
    with pytest.raises(ProbeError, match="differ by nan"):
        probed(broken, engines.learner)


@pytest.mark.parametrize(("positions", "prompt", "response"), [(2, 1, 1), (6, 1, 5), (12, 4, 8), (24, 16, 8)])
def test_it_asks_for_no_more_than_there_is_room_for(positions: int, prompt: int, response: int) -> None:
    engines = pair()
    relay = Relay(engines.sampler)
    assert probed(relay, engines.learner, positions) < 1e-5
    assert {(len(each.prefix_ids), each.params.max_tokens) for each in relay.asked} == {(prompt, response)}


@pytest.mark.parametrize("answered", [0, 3])
def test_a_sampler_that_goes_silent_is_not_waited_for_beyond_the_deadline(answered: int) -> None:
    engines = pair()
    silent = Silent(engines.sampler, answered)
    with pytest.raises(ProbeError, match=r"did not finish 8 tokens of a probe in 60 s"):
        probed(silent, engines.learner)
    assert 0 < max(silent.waited) <= DEADLINE


def test_nothing_is_left_in_the_sampler() -> None:
    """The same keys can be asked for again, as evaluation before training may."""
    engines = pair()
    first, second = (probed(engines.sampler, engines.learner) for _ in range(2))
    assert first == second
    assert engines.sampler.abort([]) == []
    with pytest.raises(KeyError):
        engines.sampler.abort([Key("eval", 0, "probe", 0)])
