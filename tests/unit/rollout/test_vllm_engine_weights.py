"""Weights that come between two batches, and memory that is given back, by the engine over vLLM's core."""

from pathlib import Path
from typing import Any

import pytest

from beamline.model.layout import TensorSlice
from beamline.records.codec import encode
from beamline.rollout.vllm.messages import DeviceMemory, Loaded, Prepared
from beamline.transfer.group import Meeting
from tests.tiny_beam import beam_config
from tests.unit.rollout.fake_vllm import STOP, Bench, Output, PauseState, asked, bench, steps


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """An engine that takes one batch after the other."""
    beam_config().save_pretrained(tmp_path)
    return bench(monkeypatch, model=str(tmp_path))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    """An engine that begins with a batch before the last one has ended."""
    beam_config().save_pretrained(tmp_path)
    return bench(monkeypatch, depth=2, model=str(tmp_path))


# Weights


SHARES = [[[TensorSlice.whole("model.norm.weight", "float32", (32,))], []]]


def load(at: Bench, version: int) -> Loaded:
    at.engine.fill(0, [[b"memory", b""]])
    return at.engine.finish(version)


def test_ranks_are_told_where_weights_come_from_and_say_what_they_hold(one: Bench) -> None:
    one.done()
    assert one.engine.prepare(SHARES, 512) == Prepared([["GPU-0"]])
    one.engine.fill(0, [[b"here", b""]])
    one.engine.fill(1, [[b"", b"there"]])
    assert one.engine.finish(1) == Loaded([[7]])
    assert one.done("reset_prefix_cache") == [
        ("beamline_prepare", [encode(SHARES[0])], 512),
        ("beamline_fill", 0, [[b"here", b""]]),
        ("beamline_fill", 1, [[b"", b"there"]]),
        ("beamline_finish",),
    ]


def test_ranks_are_told_where_they_meet_and_that_buckets_come_from_there(one: Bench) -> None:
    meeting = Meeting("127.0.0.1", 1234, 2, 3, "gloo", 5.0)
    one.done()
    one.engine.join(meeting)
    one.engine.fill(0, None)
    assert one.done() == [("beamline_join", encode(meeting)), ("beamline_fill", 0, None)]


@pytest.mark.parametrize("before", [PauseState.UNPAUSED, PauseState.PAUSED_NEW])
def test_batches_in_flight_end_before_the_first_weights_are_copied(two: Bench, before: PauseState) -> None:
    two.engine.submit([asked()])
    two.core.batches.extend([[Output("1", [4])], [Output("1", [5])], [Output("1", [6])]])
    two.engine.step()
    two.core.scheduler.set_pause_state(before)
    two.done()
    two.engine.fill(0, [[b""]])
    two.engine.fill(1, [[b""]])
    assert two.done() == [("output", "1"), ("beamline_fill", 0, [[b""]]), ("beamline_fill", 1, [[b""]])]
    assert len(two.core.batches) == 2  # none was begun
    assert two.core.scheduler.pause_state == before


def test_nothing_is_stepped_for_until_all_weights_are_there(two: Bench) -> None:
    two.engine.submit([asked()])
    two.core.batches.extend([[Output("1", [4])], [Output("1", [5])]])
    two.engine.step()
    two.engine.fill(0, [[b""]])
    assert not two.engine.busy
    two.engine.finish(1)
    assert two.engine.busy


def test_tokens_have_the_version_that_drew_them(two: Bench) -> None:
    """Those of a batch that was under way are of the old one."""
    two.engine.submit([asked()])
    two.core.batches.extend([[Output("1", [4])]])
    two.engine.step()
    load(two, version=6)
    (ended,) = steps(two, [Output("1", [5])], [Output("1", [STOP], finish_reason="stop")])
    assert ended.token_ids.tolist() == [4, 5, STOP]
    assert ended.versions.tolist() == [0, 6, 6]


def test_what_ends_while_weights_arrive_is_told_afterwards(two: Bench) -> None:
    two.engine.submit([asked()])
    two.core.batches.append([Output("1", [STOP], finish_reason="stop")])
    two.engine.step()
    load(two, version=6)
    assert two.engine.busy
    ended, drawn = two.engine.step()
    assert [each.versions.tolist() for each in ended] == [[0]]
    assert drawn == 1
    assert not two.engine.busy


def test_what_is_cached_belongs_to_the_weights(one: Bench) -> None:
    """Two loads may have the same version."""
    one.engine.submit([asked("a")])
    for problem in "bc":
        load(one, version=0)
        one.engine.submit([asked(problem)])
    assert [request.cache_salt for request in one.core.added] == ["0", "1", "2"]


def test_the_cache_is_forgotten_when_nothing_holds_it(one: Bench) -> None:
    load(one, version=1)
    assert ("reset_prefix_cache",) in one.done()
    one.engine.submit([asked()])
    load(one, version=2)
    assert ("reset_prefix_cache",) not in one.done()


def test_a_cache_that_is_not_forgotten_ends_the_engine(one: Bench) -> None:
    one.client.resets = False
    with pytest.raises(RuntimeError, match="version 1: vLLM kept"):
        load(one, version=1)


# Memory


def memory(at: Bench, *amounts: int) -> None:
    """What is in use at each look."""
    left = list(amounts)
    at.core.answers["beamline_memory"] = lambda: [left.pop(0), 0]


def test_sleep_gives_back_the_cache_or_all(one: Bench) -> None:
    one.done()
    memory(one, 100, 60)
    found = one.engine.sleep(1)
    assert (found.before, found.after) == (100, 60)
    assert one.done("beamline_memory") == [("pause", "abort"), ("release_kv_cache_memory",)]
    memory(one, 60, 10)
    one.engine.sleep(2)
    assert one.done("beamline_memory") == [("beamline_keep",), ("sleep", 2)]


def test_what_is_still_under_way_ends_before_the_memory_goes(two: Bench) -> None:
    """vLLM begins with a batch before it knows that the last one was the last."""
    two.engine.submit([asked()])
    two.core.batches.extend([[Output("1", [STOP], finish_reason="stop")], [Output("1", [3])], []])
    while not two.engine.step()[0]:
        pass
    two.done()
    two.engine.sleep(1)
    assert two.done("beamline_memory") == [
        ("output", "1"),
        ("output",),
        ("pause", "abort"),
        ("release_kv_cache_memory",),
    ]
    assert not two.engine.busy


def test_a_cache_that_sleeps_is_not_given_back_again(one: Bench) -> None:
    one.core.model_executor.sleeping_tags = {"kv_cache"}
    one.done()
    one.engine.sleep(1)
    assert one.done("beamline_memory") == []


def test_no_memory_is_taken_from_under_a_request(one: Bench) -> None:
    one.engine.submit([asked()])
    with pytest.raises(RuntimeError, match="sleep: 1 requests are in flight"):
        one.engine.sleep(2)


@pytest.mark.parametrize(
    ("asleep", "what", "woken"),
    [
        ({"weights", "kv_cache"}, ["cache", "weights"], ["weights", "kv_cache"]),
        ({"weights", "kv_cache"}, ["weights"], ["weights"]),
        ({"kv_cache"}, ["weights", "cache"], ["kv_cache"]),
    ],
)
def test_what_sleeps_is_woken_weights_first(one: Bench, asleep: set[str], what: list[Any], woken: list[str]) -> None:
    one.core.model_executor.sleeping_tags = asleep
    one.done()
    memory(one, 10, 100)
    found = one.engine.wake(what)
    assert found == DeviceMemory(10, 100, found.seconds)
    put_back = [("beamline_put_back",)] if "weights" in woken else []
    assert one.done("beamline_memory") == [("wake_up", *woken), *put_back]


def test_stop_ends_the_workers(one: Bench) -> None:
    one.done()
    one.engine.stop()
    assert one.done() == [("shutdown",)]
