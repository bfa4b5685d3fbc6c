"""The engine over vLLM's own core: what it rests on is what vLLM does, batch by batch, with and without a queue."""

import gc
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.vllm.engine import VllmEngine
from beamline.rollout.vllm.messages import Asked
from tests.unit.rollout.vllm_core import BLOCK, Workers, core_engine

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")

STOP, LONG = 9, 40
SCRIPT = {1: [4, 5, STOP, 6], 2: [4, 5, 6, 7, 8], 3: [4, 5, 6, STOP], 4: [7] * 60}
"""The tokens of a request, by the first of its prompt."""

Make = Callable[[], tuple[VllmEngine, Workers]]


@pytest.fixture(autouse=True, scope="module")
def _without_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TARGET_DEVICE", "cpu")
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        yield
        from vllm import envs

        envs.disable_envs_cache()  # which a core switches on for the rest of a process's life
        gc.unfreeze()


@pytest.fixture(params=[False, True], ids=["one batch", "two batches"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Makes an engine, with one batch or two under way at a time, and its workers."""
    made: list[VllmEngine] = []

    def engine() -> tuple[VllmEngine, Workers]:
        workers = Workers(SCRIPT)
        made.append(core_engine(monkeypatch, tmp_path, workers, request.param))
        assert (made[-1]._core.batch_queue is not None) == request.param
        return made[-1], workers

    yield engine
    for each in made:
        each.stop()


def asked(first: int, prompt: int = 3, sample: int = 0, max_tokens: int = 4, **params: int) -> Asked:
    ids = np.full(prompt, first, np.int32)
    key = Key("train", 1, f"of {first}", sample)
    return Asked(Request(key, ids, SamplingParams(max_tokens, stop_ids=(STOP,), **params)), 77)


def finish(engine: VllmEngine) -> dict[str, Completion]:
    """Step until there is nothing to step for."""
    ended: list[Completion] = []
    while engine.busy:
        ended += engine.step()[0]
    return {each.key.problem: each for each in ended}


def until_the_end(engine: VllmEngine) -> Completion:
    """Step until something has ended, and no further."""
    while not (ended := engine.step()[0]):
        pass
    return ended[0]


def load(engine: VllmEngine, version: int) -> None:
    engine.fill(0, [b""])
    engine.finish(version)


@pytest.fixture(autouse=True)
def _workers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def finished(self: Workers) -> list[int]:
        self.log.append(("beamline_finish",))
        return [1]

    monkeypatch.setattr(Workers, "_beamline_finish", finished, raising=False)


def test_requests_end_as_they_should(make: Make) -> None:
    engine, workers = make()
    engine.submit([asked(1), asked(2), asked(3)])
    done = finish(engine)
    assert {name: (each.token_ids.tolist(), each.finish) for name, each in done.items()} == {
        "of 1": ([4, 5, STOP], "stop"),
        "of 2": ([4, 5, 6, 7], "length"),
        "of 3": ([4, 5, 6, STOP], "stop"),
    }
    assert done["of 2"].logprobs.tolist() == [-4, -5, -6, -7]
    assert [(each.seed, each.stop_token_ids) for each in workers.params] == [(77, [STOP])] * 3
    assert not engine.busy


def test_the_longest_sequence_is_the_model_limit(make: Make) -> None:
    engine, _ = make()
    engine.submit([asked(4, prompt=LONG, max_tokens=56)])
    assert len(finish(engine)["of 4"].token_ids) == 56


def test_batches_in_flight_end_before_weights_come_and_none_begins(make: Make) -> None:
    engine, workers = make()
    engine.submit([asked(4, max_tokens=10)])
    for _ in range(4):
        engine.step()
    begun = len(workers.batches())
    engine.fill(0, [b""])
    assert not engine.busy
    engine.fill(1, [b""])
    assert len(workers.batches()) == begun
    assert not engine._core.batch_queue
    engine.finish(8)
    (done,) = finish(engine).values()
    assert done.versions.tolist() == [0] * begun + [8] * (10 - begun)


def test_what_was_cached_is_used_again_until_new_weights_come(make: Make) -> None:
    engine, workers = make()
    computed = []
    for sample, version in enumerate((1, None, 2)):
        if version is not None:
            load(engine, version)
        workers.log.clear()
        engine.submit([asked(2, LONG, sample)])
        finish(engine)
        computed += workers.batches()[0].values()
    assert computed == [0, LONG // BLOCK * BLOCK, 0]


def test_a_request_that_goes_on_leaves_nothing_to_those_that_begin(make: Make) -> None:
    """Its blocks are of the old weights, and the cache cannot be emptied under it."""
    engine, workers = make()
    load(engine, 1)
    engine.submit([asked(4, LONG, max_tokens=30)])
    for _ in range(3):
        engine.step()
    assert not engine._client.reset_prefix_cache()
    load(engine, 2)
    workers.log.clear()
    engine.submit([asked(4, LONG, sample=1)])
    finish(engine)
    assert next(batch["2"] for batch in workers.batches() if "2" in batch) == 0


def test_aborted_requests_give_what_they_have_and_hold_nothing(make: Make) -> None:
    engine, _ = make()
    engine.submit([asked(4, LONG, max_tokens=30), asked(2, LONG)])
    for _ in range(4):
        engine.step()
    partials = engine.abort([asked(4).request.key, asked(2).request.key])
    assert {each.finish for each in partials} == {"abort"}
    assert all(each.token_ids.tolist() == SCRIPT[int(each.key.problem[-1])][: len(each.token_ids)] for each in partials)
    load(engine, 1)  # which is an error if blocks are held
    assert finish(engine) == {}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 9])
def test_it_sleeps_at_once_when_all_has_ended(make: Make, level: int, steps: int) -> None:
    """vLLM has a batch under way still, or has not told the workers yet that the last request is over."""
    engine, workers = make()
    engine.submit([asked(1)])
    until_the_end(engine)
    for _ in range(steps):
        if engine.busy:
            engine.step()
    engine.sleep(level)
    assert not engine.busy
    told = [each for each in workers.log if each[0] in ("sleep", "discard")]
    assert told == [("sleep", 2)] if level == 2 else [("discard", ("kv_cache",))]
    engine.sleep(level)  # again is no harm
    engine.wake(["weights", "cache"])
    assert ("wake_up", ["weights", "kv_cache"] if level == 2 else ["kv_cache"]) in workers.log
    load(engine, 1)
    engine.submit([asked(2)])
    assert finish(engine)["of 2"].versions.tolist() == [1] * 4


def test_weights_can_come_while_the_cache_sleeps(make: Make) -> None:
    engine, _ = make()
    engine.sleep(2)
    engine.wake(["weights"])
    load(engine, 3)
    assert not engine.busy
    engine.wake(["cache"])
    engine.submit([asked(1)])
    assert finish(engine)["of 1"].versions.tolist() == [3] * 3
