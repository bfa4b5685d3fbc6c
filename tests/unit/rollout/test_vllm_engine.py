"""What the engine makes of vLLM's core: what it asks of it, and what it takes from its outputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.records import Completion
from beamline.rollout.routes import RouteError
from beamline.rollout.vllm.engine import EngineArgumentError
from tests.tiny_beam import VOCAB, beam_config
from tests.unit.rollout.fake_vllm import STOP, Bench, Output, asked, bench, mask, steps

LAYERS, MOE, TOP = 3, (1, 2), 4  # of the tiny model

Make = Callable[..., Bench]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model's configuration."""
    beam_config().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Make:
    """Makes an engine whose core has so many batches under way."""
    return lambda depth=1, **arguments: bench(monkeypatch, depth, model=str(folder), **arguments)


@pytest.fixture
def one(make: Make) -> Bench:
    """An engine that takes one batch after the other."""
    return make()


@pytest.fixture
def two(make: Make) -> Bench:
    """An engine that begins with a batch before the last one has ended."""
    return make(depth=2)


def rows(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Routes as vLLM gives them: of all layers, with 0 in the dense one."""
    drawn = np.random.default_rng(seed).integers(1, 16, (count, LAYERS, TOP))
    drawn[:, 0] = 0
    return drawn


# Building


def test_started_says_what_was_built(make: Make) -> None:
    started = make(max_num_seqs=8).engine.started
    assert started.versions == {name: f"{name}'s" for name in ("vllm", "torch", "transformers")}
    assert (started.device, started.cache_tokens) == ("a GPU", 4096)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_nun_seqs", "; did you mean max_num_seqs?"), ("zzz", "vLLM has no such argument$")]
)
def test_an_argument_that_vllm_does_not_know_is_an_error_with_the_nearest_that_it_does(
    make: Make, name: str, hint: str
) -> None:
    with pytest.raises(EngineArgumentError, match=rf"rollout\.vllm\.engine_args\.{name}: .*{hint}"):
        make(**{name: 8})


# Requests


def test_a_request_says_all_that_shapes_what_is_drawn(one: Bench) -> None:
    drawing = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "min_tokens": 2}
    one.engine.submit([asked(seed=11, max_tokens=6, **drawing)])
    (request,) = one.core.added
    wanted = drawing | {"max_tokens": 6, "stop_token_ids": [STOP], "seed": 11, "logprobs": 0, "detokenize": False}
    assert {name: getattr(request.sampling_params, name) for name in wanted} == wanted
    assert request.sampling_params.output_kind == "delta"
    assert request.prompt_token_ids == [0, 1, 2]
    assert all(type(token) is int for token in request.prompt_token_ids)  # which vLLM hashes


def test_requests_have_names_of_their_own_for_as_long_as_the_engine_lives(one: Bench) -> None:
    one.engine.submit([asked("a"), asked("b")])
    one.engine.abort([asked("a").request.key])
    one.engine.submit([asked("a")])
    assert len({request.request_id for request in one.core.added}) == 3


# Outputs


def test_tokens_and_their_log_probabilities_come_together_over_several_batches(one: Bench) -> None:
    one.engine.submit([asked("a"), asked("b")])
    first = [Output("1", [4], [-0.25]), Output("2", [5, 6], [-1.0, -2.0])]
    last = [Output("1", [7, 8], [-0.5, -0.75], finish_reason="length"), Output("2", [], [])]
    (ended,) = steps(one, first, last)
    assert ended.key == asked("a").request.key
    assert ended.token_ids.tolist() == [4, 7, 8]
    assert ended.logprobs.tolist() == [-0.25, -0.5, -0.75]
    assert ended.versions.tolist() == [0, 0, 0]
    assert [each.dtype for each in (ended.token_ids, ended.logprobs, ended.versions)] == [
        np.int32,
        np.float32,
        np.int32,
    ]
    assert (ended.routes, ended.support) == (None, None)


def test_a_step_says_how_many_tokens_it_drew(one: Bench) -> None:
    one.engine.submit([asked("a"), asked("b")])
    one.core.batches.append([Output("1", [4]), Output("2", [5, 6])])
    assert one.engine.step() == ([], 3)


@pytest.mark.parametrize(
    ("tokens", "reason", "finish"),
    [
        ([1, STOP], "stop", "stop"),
        ([1, 2, 3, 4], "length", "length"),
        ([1, 2, 3, STOP], "length", "stop"),  # vLLM may look at the limit first
    ],
)
def test_how_a_response_ended(one: Bench, tokens: list[int], reason: str, finish: str) -> None:
    one.engine.submit([asked()])
    (ended,) = steps(one, [Output("1", tokens, finish_reason=reason)])
    assert ended.finish == finish


@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_request_that_vllm_gave_up_ends_the_engine(one: Bench, reason: str) -> None:
    one.engine.submit([asked()])
    one.core.batches.append([Output("1", [4], finish_reason=reason, error="out of blocks")])
    with pytest.raises(RuntimeError, match=rf"problem='a'.*'{reason}': out of blocks"):
        one.engine.step()


def test_nothing_is_left_of_a_request_that_has_ended(one: Bench) -> None:
    one.engine.submit([asked()])
    steps(one, [Output("1", [STOP], finish_reason="stop")])
    assert not one.engine.busy
    assert one.engine.abort([asked().request.key]) == []


# Aborts


def test_an_abort_gives_what_there_is_and_passes_over_what_has_ended(one: Bench) -> None:
    one.engine.submit([asked("a"), asked("b"), asked("c")])
    steps(one, [Output("1", [4], [-0.25]), Output("2", [STOP], finish_reason="stop")])
    one.done()
    partials = one.engine.abort([asked(problem).request.key for problem in "ab"])
    assert [(each.key.problem, each.token_ids.tolist(), each.finish) for each in partials] == [("a", [4], "abort")]
    assert partials[0].logprobs.tolist() == [-0.25]
    assert one.done() == [("abort", "1")]
    assert one.engine.busy


def test_a_partial_without_a_token_has_neither_routes_nor_a_stop(one: Bench) -> None:
    one.engine.submit([asked(record_support=True)])
    (partial,) = one.engine.abort([asked().request.key])
    assert (len(partial.token_ids), partial.finish, partial.routes) == (0, "abort", None)
    assert partial.support is not None
    assert len(partial.support) == 0


def test_outputs_of_an_aborted_request_are_ignored(two: Bench) -> None:
    """They were on their way; the same key may be asked for again meanwhile."""
    two.engine.submit([asked()])
    two.core.batches.extend([[Output("1", [4])], [Output("1", [5])], [Output("2", [6]), Output("1", [7])]])
    two.engine.step()
    two.engine.abort([asked().request.key])
    two.engine.submit([asked()])
    (ended,) = steps(two, [Output("2", [STOP], finish_reason="stop")])
    assert ended.token_ids.tolist() == [6, STOP]


# Temperature 0


def test_the_most_likely_token_was_certain(one: Bench) -> None:
    one.engine.submit([asked("a", temperature=0.0, record_support=True), asked("b", record_support=True)])
    drawn = [
        Output("1", [4, STOP], [-1.5, -2.5], finish_reason="stop"),  # vLLM records no support of it
        Output("2", [STOP], [-1.5], new_sampling_mask=mask([STOP, 3]), finish_reason="stop"),
    ]
    greedy, other = steps(one, drawn)
    assert greedy.logprobs.tolist() == [0.0, 0.0]
    assert not np.signbit(greedy.logprobs).any()
    assert greedy.support is not None
    assert [entry.tolist() for entry in greedy.support] == [[4], [STOP]]
    assert other.logprobs.tolist() == [-1.5]


# Support


def test_support_is_what_each_token_was_drawn_from_and_empty_where_that_is_everything(one: Bench) -> None:
    one.engine.submit([asked(record_support=True)])
    several = Output("1", [4, 5], new_sampling_mask=mask([4, 2], range(VOCAB)))
    single = Output("1", [6], new_sampling_mask=mask([6]))
    last = Output("1", [7], new_sampling_mask=mask(range(VOCAB)), finish_reason="length")
    (ended,) = steps(one, [several], [single], [last])
    assert ended.support is not None
    assert [entry.tolist() for entry in ended.support] == [[4, 2], [], [6], []]
    assert ended.support.ids.dtype == np.int32
    assert ended.support.allows(ended.token_ids).all()


# Routes


def routed(at: Bench, *parts: NDArray[Any]) -> Completion:
    """A response of two tokens after a prompt of three, with these rows of routes."""
    at.engine.submit([asked()])
    outputs = [[Output("1", [], routed_experts=part)] for part in parts[:-1]]
    (ended,) = steps(at, *outputs, [Output("1", [4, STOP], routed_experts=parts[-1], finish_reason="stop")])
    return ended


def test_routes_are_of_moe_layers_and_of_every_token_but_the_last(one: Bench) -> None:
    first, second = rows(3), rows(1, seed=1)
    routes = routed(one, first, second).routes
    assert routes is not None
    assert routes.dtype == np.uint8
    assert routes.flags.c_contiguous
    np.testing.assert_array_equal(routes, np.concatenate([first, second])[:, MOE])


def test_more_than_256_experts_take_two_bytes(make: Make, folder: Path) -> None:
    beam_config(num_experts=512, n_group=4, topk_group=4).save_pretrained(folder)
    given = rows(4) + np.array([0, 300, 300])[:, None]
    routes = routed(make(), given).routes
    assert routes is not None
    assert routes.dtype == np.uint16
    np.testing.assert_array_equal(routes, given[:, MOE])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (rows(3), r"returned routes \(3, 3, 4\), not of 4 tokens x 3"),
        (rows(5), r"returned routes \(5, 3, 4\), not of 4 tokens x 3"),
        (rows(4)[:, 1:], r"returned routes \(4, 2, 4\), not of 4 tokens x 3"),
        (rows(4)[:, ::-1], r"experts for dense layers \[0\]"),
    ],
)
def test_routes_of_other_tokens_or_layers_are_an_error(one: Bench, given: NDArray[Any], problem: str) -> None:
    with pytest.raises(RouteError, match=rf"Key\(split='train', step=2, problem='a'.*{problem}"):
        routed(one, given)
