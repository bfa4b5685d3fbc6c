"""The sampler over engine processes: what it makes of faults, and how it keeps account."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from beamline.config.vllm import TEMPERATURES
from beamline.records import Completion, Key, Request
from beamline.rollout.vllm import replica
from beamline.rollout.vllm.fleet import Fleet
from beamline.rollout.vllm.messages import Abort, DeviceMemory, Prepared
from beamline.rollout.vllm.replica import EngineFailedError
from beamline.rollout.vllm.weights import Delivery
from beamline.transfer.plan import TransferError
from tests.contract.process_engines import LONG, MESH, cpu_engines, cpu_launches
from tests.contract.sampling import assert_same_bits, collect, request, requests, resumed, run, start
from tests.shared_engines import SharedEngines
from tests.tiny_beam import random_beam

MODULE, OTHER = random_beam(0), random_beam(1)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")


@pytest.fixture(scope="module")
def _one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    with closing(cpu_engines(tmp_path_factory.mktemp("one"), 1, max_restarts=99)) as engines:
        yield engines


@pytest.fixture
def one(_one: SharedEngines) -> Iterator[SharedEngines]:
    """One engine."""
    yield _one
    _one.end_test()


@pytest.fixture(scope="module")
def _two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngines]:
    with closing(cpu_engines(tmp_path_factory.mktemp("two"), 2, max_restarts=99)) as engines:
        yield engines


@pytest.fixture
def two(_two: SharedEngines) -> Iterator[SharedEngines]:
    """Two engines."""
    yield _two
    _two.end_test()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Callable[..., SharedEngines]]:
    """Makes an engine that fails as these options say."""
    made: list[SharedEngines] = []

    def make(*options: object, max_restarts: int = 1) -> SharedEngines:
        made.append(SharedEngines(cpu_launches(tmp_path, 1, "--waits", *options), MESH, max_restarts))
        return made[-1]

    yield make
    for engines in made:
        engines.close()


def kill(fleet: Fleet, replica: int = 0) -> None:
    """Kill an engine, and return when it is dead; it is left to its controller to notice."""
    pid = fleet.replicas[replica].pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def counts(restarts: int, reissued: int) -> dict[str, float]:
    return {"rollout/engine_restarts": restarts, "rollout/requests_reissued": reissued}


def in_order(asked: Sequence[Request], done: dict[Key, Completion]) -> list[Completion]:
    return [done[wanted.key] for wanted in asked]


def versions(completion: Completion) -> set[int]:
    return set(completion.versions.tolist())


# Failures


def test_what_a_killed_engine_had_not_finished_is_drawn_again_as_if_nothing_had_been(
    one: SharedEngines, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = requests()[:5]
    whole = run(one.sampler(MODULE).sampler, asked)
    sampler, fleet = one.sampler(MODULE).sampler, one.fleet()
    start(sampler, asked)
    before = fleet.restarts
    kill(fleet)
    assert_same_bits(whole, in_order(asked, collect(sampler, 5)))
    assert sampler.statistics() == counts(before + 1, 5)
    said = capsys.readouterr().err
    assert "engine float32-0 was killed by SIGKILL" in said
    assert f"it is started again ({before + 1} of at most 99 times)" in said


def test_the_engines_that_live_are_not_disturbed(two: SharedEngines) -> None:
    """The first problem's samples are on the engine that is killed, after it has ended one of them."""
    marker, *others = [request(5, sample, max_tokens=30 if sample else 5) for sample in range(5)]
    elsewhere = [request(12, sample, max_tokens=20 + 5 * sample) for sample in range(3)]
    whole = run(two.sampler(MODULE).sampler, [*others, *elsewhere])
    sampler, fleet, done = two.sampler(MODULE).sampler, two.fleet(), dict[Key, Completion]()
    before, pid = fleet.restarts, fleet.replicas[1].pid
    sampler.submit([marker, *others, *elsewhere])
    while marker.key not in done:
        done |= {completion.key: completion for completion in sampler.poll(LONG)}
    kill(fleet)
    done |= collect(sampler, 8 - len(done))
    assert_same_bits(whole, in_order([*others, *elsewhere], done))
    assert sampler.statistics() == counts(before + 1, 4)
    assert fleet.replicas[1].pid == pid


def test_what_hangs_is_killed_and_drawn_again(
    failing: Callable[..., SharedEngines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines, asked = failing("--fault", "hang", "--after", 8, "--once", tmp_path / "hung"), requests()[:3]
    sampler = engines.sampler(MODULE).sampler
    sampler.submit(asked)
    while "the stub hangs" not in (tmp_path / "float32-0.log").read_text():
        assert sampler.poll(0.01) == []
    now = time.monotonic
    monkeypatch.setattr(replica, "_ATTENTION_SECONDS", 2 * LONG)  # as if this process had looked on all the time
    monkeypatch.setattr(time, "monotonic", lambda: now() + 2 * LONG)
    done = collect(sampler, 3)
    assert sampler.statistics() == counts(1, 3)
    assert_same_bits(run(engines.sampler(MODULE).sampler, asked), in_order(asked, done))


def test_more_failures_than_are_allowed_end_the_run_with_their_cause(failing: Callable[..., SharedEngines]) -> None:
    sampler = failing("--fault", "die", "--after", 2).sampler(MODULE).sampler
    sampler.submit(requests())
    with pytest.raises(EngineFailedError, match=r"(?s)told to die.*1 engines were started again before it .*max_rest"):
        collect(sampler, 1)
    assert sampler.statistics()["rollout/engine_restarts"] == 1


def test_an_engine_that_fails_before_it_has_its_weights_back_is_replaced_too(
    one: SharedEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, deliver, dying = requests()[:3], Delivery.deliver, [True]
    sampler, fleet = one.sampler(MODULE).sampler, one.fleet()
    whole = run(sampler, asked)
    before = fleet.restarts

    def deliver_to_one_that_dies(self: Delivery, fleet: Fleet, replica: int, version: int) -> None:
        if dying:
            dying.pop()
            kill(fleet, replica)
        deliver(self, fleet, replica, version)

    monkeypatch.setattr(Delivery, "deliver", deliver_to_one_that_dies)
    start(sampler, asked)
    kill(fleet)
    assert_same_bits(whole, in_order(asked, collect(sampler, 3)))
    assert sampler.statistics() == counts(before + 2, 3)


def test_a_sleeping_engine_that_was_killed_wakes_with_its_weights(one: SharedEngines) -> None:
    sampler = one.sampler(MODULE).sampler
    before = run(sampler, requests())
    sampler.sleep(1)
    kill(one.fleet())
    sampler.wake(["cache"])
    assert_same_bits(before, run(sampler, requests()))


def test_what_is_aborted_on_a_killed_engine_has_nothing_and_is_not_drawn_again(one: SharedEngines) -> None:
    asked = requests(record_support=True)[:5]
    sampler = one.sampler(MODULE).sampler
    whole = run(sampler, asked)
    start(sampler, asked)
    kill(one.fleet())
    partials = sampler.abort([asked[3].key, asked[1].key])
    assert [completion.key for completion in partials] == [asked[3].key, asked[1].key]
    for partial in partials:
        assert (partial.finish, len(partial.token_ids), partial.routes) == ("abort", 0, None)
        assert partial.support is not None
    kept = [0, 2, 4]
    assert_same_bits([whole[i] for i in kept], in_order([asked[i] for i in kept], collect(sampler, 3)))
    assert sampler.statistics()["rollout/requests_reissued"] == 3


def test_close_leaves_no_process(failing: Callable[..., SharedEngines]) -> None:
    engines = failing()
    sampler, pid = engines.sampler(MODULE).sampler, engines.fleet().replicas[0].pid
    sampler.submit(requests())
    os.kill(pid, 0)
    sampler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# Failures and weights


def test_what_was_in_flight_when_an_engine_fails_with_new_weights_is_drawn_with_them(
    failing: Callable[..., SharedEngines], tmp_path: Path
) -> None:
    """It fails when all have arrived, but before it has said so."""
    engines = failing("--fault", "kill", "--at", "finish", "--after", 1, "--once", tmp_path / "killed")
    bench, asked = engines.sampler(MODULE), requests()[:5]
    start(bench.sampler, asked)
    bench.give(OTHER, 2, "keep")
    done = in_order(asked, collect(bench.sampler, 5))
    assert [versions(completion) for completion in done] == [{2}] * 5
    assert bench.sampler.statistics() == counts(1, 5)
    assert_same_bits(run(engines.sampler(OTHER).sampler, asked), done)


def test_what_had_ended_before_an_engine_failed_with_new_weights_stays(one: SharedEngines) -> None:
    bench, fleet = one.sampler(MODULE), one.fleet()
    short, *others = [request(5, sample, max_tokens=30 if sample else 5) for sample in range(4)]
    bench.sampler.submit([short, *others])
    while fleet.replicas[0].in_flight == 4:  # what comes meanwhile is kept, but not taken in by the sampler
        fleet.ask(0, lambda number: Abort(number, []), list[Completion])
    kill(fleet)
    bench.give(OTHER, 2, "keep")
    done = collect(bench.sampler, 4)
    assert versions(done[short.key]) == {1}
    assert [versions(done[other.key]) for other in others] == [{2}] * 3
    assert bench.sampler.statistics()["rollout/requests_reissued"] == 3


def changed_after_a_kill(one: SharedEngines, asked: list[Request]) -> tuple[Any, nn.Module]:
    """A sampler with these in flight, whose engine is dead and whose weights are not there any more."""
    module = random_beam(2)
    bench = one.sampler(module)
    start(bench.sampler, asked)
    kill(one.fleet())
    with torch.no_grad():
        cast(Any, module).lm_head.weight.add_(1.0)
    return bench, module


def test_weights_that_the_learner_has_changed_cannot_be_given_again_but_new_ones_can(one: SharedEngines) -> None:
    asked = requests()[:3]
    bench, module = changed_after_a_kill(one, asked)
    with pytest.raises(RuntimeError, match=r"engine float32-0 was replaced, but weights of version 1 are no longer"):
        bench.sampler.poll(LONG)
    bench.give(module, 2, "keep")
    done = in_order(asked, collect(bench.sampler, 3))
    assert [versions(completion) for completion in done] == [{2}] * 3


def test_old_weights_are_not_missed_where_new_ones_end_what_is_in_flight(one: SharedEngines) -> None:
    asked = requests()[:3]
    bench, module = changed_after_a_kill(one, asked)
    bench.give(module, 2, "abort")
    partials = in_order(asked, collect(bench.sampler, 3))
    assert [(completion.finish, len(completion.token_ids)) for completion in partials] == [("abort", 0)] * 3
    again = run(bench.sampler, [resumed(wanted, part) for wanted, part in zip(asked, partials, strict=True)])
    assert [versions(completion) for completion in again] == [{2}] * 3


def test_what_had_ended_and_what_new_weights_end_come_once(one: SharedEngines) -> None:
    bench, fleet = one.sampler(MODULE), one.fleet()
    short, *others = [request(5, sample, max_tokens=30 if sample else 5) for sample in range(4)]
    bench.sampler.submit([short, *others])
    while fleet.replicas[0].in_flight == 4:
        fleet.ask(0, lambda number: Abort(number, []), list[Completion])
    bench.give(OTHER, 2, "abort")
    done = collect(bench.sampler, 4)
    assert {key: completion.finish for key, completion in done.items()} == {
        short.key: "length", **{other.key: "abort" for other in others},
    }  # fmt: skip
    assert bench.sampler.poll(0.0) == []


def test_an_engine_that_holds_something_else_than_was_sent_is_not_trusted(
    failing: Callable[..., SharedEngines],
) -> None:
    message = (
        r"engine float32-0, rank 2: .* of lm_head.weight is not what was sent by rank 0 of the learner "
        r"\(checksum \w{8}, not \w{8}\)"
    )
    engines = failing("--fault", "garble")
    with pytest.raises(TransferError, match=message):
        engines.sampler(MODULE)


def test_weights_that_are_not_finite_are_not_sent_and_better_ones_must_come(one: SharedEngines) -> None:
    bench, fleet, asked, bad = one.sampler(MODULE), one.fleet(), requests()[:3], random_beam(1)
    with torch.no_grad():
        cast(Any, bad).model.norm.weight[3] = torch.nan
    start(bench.sampler, asked)
    number = fleet.number()
    with pytest.raises(FloatingPointError, match=r"model.norm.weight of version 2 holds values that are not finite"):
        bench.give(bad, 2, "keep")
    assert fleet.number() == number + 1
    with pytest.raises(RuntimeError, match="no weights"):
        bench.sampler.submit([request(12)])
    bench.give(OTHER, 3, "keep")
    assert set(collect(bench.sampler, 3)) == {wanted.key for wanted in asked}
    assert versions(*run(bench.sampler, [request(12)])) == {3}
    assert bench.sampler.statistics()["rollout/requests_reissued"] == 0


def test_an_engine_that_failed_while_there_were_no_weights_is_asked_again_once_there_are(one: SharedEngines) -> None:
    bench, asked, bad = one.sampler(MODULE), requests()[:3], random_beam(1)
    with torch.no_grad():
        cast(Any, bad).lm_head.weight[3] = torch.inf
    start(bench.sampler, asked)
    with pytest.raises(FloatingPointError):
        bench.give(bad, 2, "keep")
    kill(one.fleet())
    with pytest.raises(RuntimeError, match="no weights"):
        bench.sampler.poll(LONG)
    bench.give(OTHER, 3, "keep")
    done = in_order(asked, collect(bench.sampler, 3))
    assert [versions(completion) for completion in done] == [{3}] * 3


@pytest.mark.parametrize(("bucket_bytes", "commands"), [(512, range(100, 1000)), (1 << 40, range(3, 4))])
def test_weights_pass_through_buckets_of_any_size(one: SharedEngines, bucket_bytes: int, commands: range) -> None:
    expected = run(one.sampler(OTHER).sampler, requests())
    number = one.fleet().number()
    sampler = one.sampler(OTHER, bucket_bytes=bucket_bytes).sampler
    assert one.fleet().number() - number - 1 in commands  # to prepare, to fill, to finish
    assert_same_bits(expected, run(sampler, requests()))


def test_weights_come_through_a_group_again_and_again(two: SharedEngines) -> None:
    """Of the engines' four ranks each, and one of the learner, by gloo."""
    expected = [run(two.sampler(module).sampler, requests()) for module in (MODULE, OTHER)]
    bench = two.sampler(MODULE, group_seconds=LONG)
    assert_same_bits(expected[0], run(bench.sampler, requests()))
    bench.give(OTHER, 2, "keep")
    assert_same_bits(expected[1], run(bench.sampler, requests()))


@pytest.mark.parametrize("at", ["fill", "finish"])
def test_an_engine_that_dies_in_a_group_is_replaced(
    failing: Callable[..., SharedEngines], tmp_path: Path, at: str
) -> None:
    engines = failing("--fault", "kill", "--at", at, "--after", 1, "--once", tmp_path / "killed")
    sampler = engines.sampler(MODULE, group_seconds=LONG).sampler
    assert versions(*run(sampler, [request(12)])) == {1}
    if at == "finish":  # of the second load
        engines.sampler(OTHER, group_seconds=LONG)
    assert engines.fleet().restarts == 1


class OnOneGpu:
    """A supply of two ranks, of which the second is on a GPU of the engine."""

    rounds = 1

    def gpus(self) -> list[str]:
        return ["GPU-0", "GPU-1"]


def test_ranks_of_one_gpu_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = SimpleNamespace(supply=lambda *_: OnOneGpu())
    fleet: Any = SimpleNamespace(
        replicas=[SimpleNamespace(name="vllm-0", prepared_for=None)],
        ask=lambda *_: Prepared([["GPU-2", "GPU-1"], ["GPU-1", "GPU-2"]]),
    )
    message = r"rank 1 of the learner and rank 1 of engine vllm-0 are on one GPU \(GPU-1\).*weights=shared"
    with pytest.raises(TransferError, match=message):
        Delivery([], source, 1 << 20, LONG).deliver(fleet, 0, 1)


def test_the_layout_is_that_of_all_engines(one: SharedEngines, two: SharedEngines) -> None:
    ranks = one.sampler(None).sampler.layout("full").ranks
    assert len(ranks) == MESH.size
    assert two.sampler(None).sampler.layout("full").ranks == ranks * 2
    with pytest.raises(ValueError, match="no adapters"):
        two.sampler(None).sampler.layout("adapter")


# Accounting


def test_samples_of_a_problem_go_to_one_engine_and_problems_to_the_one_with_less_to_do(two: SharedEngines) -> None:
    sampler, fleet = two.sampler(MODULE).sampler, two.fleet()
    sampler.submit([*(request(5, sample) for sample in range(4)), request(12)])
    assert [replica.in_flight for replica in fleet.replicas] == [4, 1]
    sampler.submit([request(n, sample) for sample in range(2) for n in (1, 2, 7)])
    assert [replica.in_flight for replica in fleet.replicas] == [4, 7]


@pytest.mark.parametrize("temperature", [0.009, 2.001])
def test_temperatures_that_vllm_would_change_or_refuse_are_refused(one: SharedEngines, temperature: float) -> None:
    sampler = one.sampler(MODULE).sampler
    with pytest.raises(ValueError, match=rf"has temperature {temperature}, and vLLM draws with 0.01 to 2.0, or with 0"):
        sampler.submit([request(5), request(12, temperature=temperature)])
    possible = [request(5, n, temperature=t) for n, t in enumerate((0.0, *TEMPERATURES))]
    assert len(run(sampler, possible)) == 3


def test_a_sampler_remembers_the_memory_that_it_gave_back(one: SharedEngines) -> None:
    sampler = cast(Any, one.sampler(MODULE).sampler)
    assert sampler.memory is None
    sampler.sleep(1)
    assert sampler.memory == DeviceMemory(1000, 600, 0.0)
    sampler.wake(["cache"])
    assert sampler.memory == DeviceMemory(600, 1000, 0.0)
