"""Pairs of runs, their summaries, and what both sides are given."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.table import Table

from benchmarks.harness import Apart, Figures, Summary, compare, machine, paired, verdict, write
from benchmarks.memory import floor_bytes
from benchmarks.phases import Phases
from benchmarks.workload import LONGEST, SHORTEST, ForcedLengths, left_padded, lengths, problems, requests
from tests.tiny_beam import beam_shape


def side(name: str, order: list[str], seconds: Iterator[float]) -> Callable[[], Figures]:
    def run() -> Figures:
        order.append(name)
        return {"seconds": next(seconds)}

    return run


def test_the_sides_take_turns_and_warm_ups_do_not_count() -> None:
    order: list[str] = []
    ours, peer = side("ours", order, iter([9.0, 1.0, 2.0])), side("peer", order, iter([1.0, 4.0, 6.0]))
    comparison = paired(ours, peer, rounds=2, warmup=1)
    assert order == ["ours", "peer"] * 3
    assert comparison.rounds == 2
    assert comparison.ours["seconds"] == Summary(1.5, 1.0, 2.0)
    assert comparison.peer["seconds"] == Summary(5.0, 4.0, 6.0)


def test_a_run_without_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1, not 0"):
        paired(dict, dict, rounds=0)


def test_the_ratio_is_taken_in_each_pair() -> None:
    pairs: list[tuple[Figures, Figures]] = [
        ({"seconds": 1.0, "tokens": 5.0}, {"seconds": 3.0, "tokens": 7.0}),
        ({"seconds": 10.0, "tokens": 6.0}, {"seconds": 20.0, "tokens": 8.0}),
        ({"seconds": 2.0, "tokens": 10.0}, {"seconds": 8.0, "tokens": 9.0}),
    ]
    comparison = compare(pairs)
    assert comparison.ratio == Summary(3.0, 2.0, 4.0)  # of the medians it would be 8 / 2
    assert comparison.ours["tokens"] == Summary(6.0, 5.0, 10.0)
    assert comparison.peer["tokens"] == Summary(8.0, 7.0, 9.0)


def test_a_target_is_met_from_its_value_on() -> None:
    assert verdict(2.0, 2.0) == "2 (met)"
    assert verdict(1.99, 2.0) == "2 (missed)"


def test_results_come_with_command_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["module", "--rounds", "2"])
    write("sampling", {"ratio": 1.5}, Table(), tmp_path / "new")
    written = json.loads((tmp_path / "new/sampling.json").read_text())
    assert written == {"command": "python -m benchmarks.sampling --rounds 2", "machine": machine(), "ratio": 1.5}
    assert written["machine"]["torch"] == torch.__version__


def test_lengths_are_reproducible_and_fill_their_range() -> None:
    drawn = lengths(5000)
    assert drawn == lengths(5000)
    assert drawn[:64] == lengths(64)
    assert drawn != lengths(5000, draw=1)
    assert (min(drawn), max(drawn)) == (SHORTEST, LONGEST)


def test_requests_spread_lengths_over_problems_under_keys_of_their_own() -> None:
    prompt = np.array([1, 2], dtype=np.int32)
    asked = requests(problems(2), [prompt, prompt], [3, 4, 5, 6], step=7)
    assert [request.params.max_tokens for request in asked] == [3, 4, 5, 6]
    assert [request.key.sample for request in asked] == [0, 1, 0, 1]
    assert [request.key.problem for request in asked[1:3]] == [problem.id for problem in problems(2)]
    assert {request.key.step for request in asked} == {7}
    assert all(request.params.stop_ids == () for request in asked)


def test_prompts_end_in_the_same_column() -> None:
    ids, mask = left_padded([np.array([5, 6, 7], dtype=np.int32), np.array([8], dtype=np.int32)])
    assert ids[:, -1].tolist() == [7, 8]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_each_sequence_ends_after_its_own_tokens() -> None:
    done = ForcedLengths(3, [1, 2])
    assert [done(torch.zeros(2, width), None).tolist() for width in (3, 4, 5)] == [
        [False, False],
        [True, False],
        [True, True],
    ]


def test_an_inner_clock_stops_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])  # outer starts, inner starts, inner ends, outer ends
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    phases = Phases()
    inner = phases.clocked("inner", lambda: None)
    phases.clocked("outer", inner)()
    assert phases.take("inner", "outer") == {"inner": 2.0, "outer": 5.0}
    assert phases.take() == {}


def test_a_phase_that_was_never_entered_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no time was seen in backward"):
        Phases().take("backward")


def test_the_floor_of_memory_counts_the_places_that_a_layer_keeps() -> None:
    shape = beam_shape()
    key_value = 2 * shape.num_key_value_heads * shape.head_dim * 4
    sliding = sum(kind == "sliding_attention" for kind in shape.layer_types)
    full = len(shape.layer_types) - sliding
    drawn = 2 * shape.sliding_window
    kept = sliding * shape.sliding_window + full * (3 + drawn - 1)
    assert floor_bytes(shape, 5, 3, drawn)["cache"] == 5 * kept * key_value


class Named:
    """A side that tells its process and environment, and fails when it is called for the second time."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> Figures:
        self._calls += 1
        if self._calls > 1:
            raise ValueError("called twice")
        return {"seconds": 1.0, "pid": os.getpid(), "spin": int(os.environ["GOMP_SPINCOUNT"])}


def test_a_side_apart_has_a_process_and_an_environment_of_its_own() -> None:
    before = dict(os.environ)
    with Apart(Named, {"GOMP_SPINCOUNT": "77"}) as run:
        found = run()
        assert found["spin"] == 77
        assert found["pid"] != os.getpid()
        with pytest.raises(RuntimeError, match="a side ended with code 1"):
            run()
    assert dict(os.environ) == before


def test_pairs_that_cannot_be_compared_are_refused() -> None:
    def refuse(ours: Figures, peer: Figures) -> None:
        raise RuntimeError(f"{ours['seconds']} and {peer['seconds']}")

    with pytest.raises(RuntimeError, match=r"1\.0 and 2\.0"):
        paired(lambda: {"seconds": 1.0}, lambda: {"seconds": 2.0}, rounds=1, check=refuse)
