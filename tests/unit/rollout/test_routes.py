"""Routes as they arrive: what is wrong with them is found before anything is graded or learned from."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from beamline.chat import BeamChat
from beamline.kernels.experts import first_fault
from beamline.model.beam import BeamShape
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.rollout.collect import Cutoff, Job, requests, sample, sample_until
from beamline.rollout.routes import RouteError, check_routes, route_dtype
from tests.samples import make_problem
from tests.tiny_beam import beam_shape

KEY = Key("train", 4, "the problem", 2, attempt=1)
SHAPE = beam_shape(
    num_hidden_layers=5,
    layer_types=["full_attention"] * 5,
    mlp_layer_types=["dense", "sparse", "dense", "sparse", "sparse"],
)
TOKENS, L, K, E = 7, 3, SHAPE.num_experts_per_tok, SHAPE.num_experts

Routes = NDArray[np.unsignedinteger]


def trace(tokens: int = TOKENS, experts: int = E, dtype: Any = np.uint8) -> Routes:
    """Possible routes, in which every expert occurs."""
    first = np.arange((tokens - 1) * L).reshape(tokens - 1, L, 1) * K
    return ((first + np.arange(K)) % experts).astype(dtype)


def changed(at: tuple[int, int, int], value: int) -> Routes:
    routes = trace()
    routes[at] = value
    return routes


def test_possible_routes_pass() -> None:
    check_routes(KEY, trace(), TOKENS, SHAPE)
    check_routes(KEY, trace(tokens=2), 2, SHAPE)


@pytest.mark.parametrize(("experts", "dtype"), [(16, np.uint8), (256, np.uint8), (260, np.uint16), (512, np.uint16)])
def test_experts_are_numbered_in_the_smallest_type(experts: int, dtype: Any) -> None:
    shape = replace(SHAPE, num_experts=experts)
    assert route_dtype(shape) == dtype
    routes = trace(experts=experts, dtype=dtype)
    routes[0, 0, 0] = experts - 1
    check_routes(KEY, routes, TOKENS, shape)
    with pytest.raises(RouteError, match=f"type int64, not {np.dtype(dtype)} as for {experts} experts"):
        check_routes(KEY, routes.astype(np.int64), TOKENS, shape)


FAULTS: dict[str, tuple[Routes | None, str]] = {
    "none": (None, "came without routes"),
    "a token too few": (trace()[1:], "shape (5, 3, 4), not (6, 3, 4)"),
    "the last token too": (trace(TOKENS + 1), "shape (7, 3, 4), not (6, 3, 4)"),
    "dense layers": (trace()[:, [0, 0, 1, 1, 2]], "shape (6, 5, 4), not (6, 3, 4)"),
    "a layer too few": (trace()[:, 1:], "shape (6, 2, 4), not (6, 3, 4)"),
    "an expert too few": (trace()[..., 1:], "shape (6, 3, 3), not (6, 3, 4)"),
    "flat": (trace().reshape(6, -1), "shape (6, 12), not (6, 3, 4)"),
    "wide": (trace().astype(np.uint16), "type uint16, not uint8"),
    "all 0": (np.zeros_like(trace()), "all 0: the engine recorded nothing"),
    "out of range": (
        changed((5, 1, 3), E),
        "send token 5 to expert 16, where 0 to 15 exist, in MoE layer 1, which is layer 3 of the model",
    ),
    "twice": (
        changed((2, 2, 3), trace()[2, 2, 0]),
        f"send token 2 to expert {trace()[2, 2, 0]} twice in MoE layer 2, which is layer 4 of the model",
    ),
    "a token of 0s": (
        np.where(np.arange(6)[:, None, None] == 3, np.uint8(0), trace()),
        "send token 3 to expert 0 twice in MoE layer 0, which is layer 1 of the model",
    ),
    "a layer of 0s": (
        np.where(np.arange(L)[:, None] == 1, np.uint8(0), trace()),
        "send token 0 to expert 0 twice in MoE layer 1, which is layer 3 of the model",
    ),
}


@pytest.mark.parametrize(("routes", "message"), FAULTS.values(), ids=FAULTS)
def test_what_is_wrong_is_said_with_the_key_and_what_to_do(routes: Routes | None, message: str) -> None:
    with pytest.raises(RouteError, match=re.escape(message)) as error:
        check_routes(KEY, routes, TOKENS, SHAPE)
    assert str(error.value).startswith(str(KEY))
    assert "repair the engine, or let the learner choose for itself with policy.r3=false" in str(error.value)


def written(routes: Routes, experts: int) -> tuple[int, int, int]:
    for at, expert in np.ndenumerate(routes):
        if expert >= experts or expert in routes[at[0], at[1], : at[2]]:
            return at
    return -1, -1, -1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_the_first_fault_is_that_of_a_loop(dtype: Any) -> None:
    rng, found = np.random.default_rng(0), set()
    for _ in range(300):
        routes = rng.permuted(np.broadcast_to(np.arange(9), (4, 3, 9)), axis=-1)[..., :3].astype(dtype)
        for _ in range(rng.integers(0, 3)):
            routes[tuple(rng.integers(0, routes.shape))] = rng.integers(0, 11)
        assert first_fault(routes, 9) == written(routes, 9)
        found.add(written(routes, 9))
    assert len(found) > 20


# Jobs


class Recorder:
    """A sampler whose every response is as long as it may be, with possible routes but for one completion."""

    def __init__(self, spoiled: Callable[[Request], bool] = lambda _: False) -> None:
        self._spoiled = spoiled
        self._asked: list[Request] = []

    def submit(self, asked: Sequence[Request]) -> None:
        self._asked += asked

    def poll(self, timeout: float) -> list[Completion]:
        asked, self._asked = self._asked, []
        return [self._completion(request) for request in asked]

    def statistics(self) -> dict[str, float]:
        return {}

    def _completion(self, request: Request) -> Completion:
        count = request.params.max_tokens
        routes = trace(len(request.prefix_ids) + count)
        if self._spoiled(request):
            routes[-1, 2, 1] = routes[-1, 2, 0]
        ids, zeros = np.ones(count, np.int32), np.zeros(count, np.float32)
        return Completion(request.key, ids, zeros, ids, routes, "length")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


PROBLEMS = [make_problem(f"{n}+1") for n in range(3)]


def job_of(cutoff: Cutoff | None = None, routes_of: BeamShape | None = SHAPE) -> Job:
    return Job("train", 1, PROBLEMS, 2, SamplingParams(9), cutoff=cutoff, routes_of=routes_of)


def test_a_job_takes_possible_routes(chat: BeamChat) -> None:
    for job in (job_of(), job_of(Cutoff(4, 2))):
        observed: list[Completion] = []
        made = sample_until(Recorder(), job, chat, 60.0, observed.append, lambda _: None)
        rollouts = [rollout for group in made.groups for rollout in group.rollouts]
        assert len(observed) == len(rollouts) == job.size - 2 * made.groups_left_out
        for rollout in rollouts:
            check_routes(rollout.key, rollout.routes, len(rollout.token_ids), SHAPE)


def test_a_bad_trace_ends_the_job_before_anything_sees_it(chat: BeamChat) -> None:
    bad = requests(job_of(), chat)[1][1]
    observed: list[Completion] = []
    sampler = Recorder(spoiled=lambda request: request.key == bad.key)
    token = len(bad.prefix_ids) + 9 - 2
    with pytest.raises(RouteError, match=re.escape(f"{bad.key} has routes that send token {token} ")):
        sample(sampler, job_of(), chat, 60.0, observed.append)
    assert [completion.key.problem for completion in observed] == [PROBLEMS[0].id] * 2 + [PROBLEMS[1].id]


@pytest.mark.parametrize("part", [4, 5])
def test_each_part_of_a_response_is_checked(chat: BeamChat, part: int) -> None:
    """Here the first of 4 tokens, or the rest of 5."""
    sampler = Recorder(spoiled=lambda request: request.params.max_tokens == part)
    kept: list[Completion] = []
    with pytest.raises(RouteError, match="in MoE layer 2"):
        sample_until(sampler, job_of(Cutoff(4, 2)), chat, 60.0, kept.append, lambda _: None)
    assert not kept


def test_a_job_that_replays_nothing_takes_any_routes(chat: BeamChat) -> None:
    groups = sample(Recorder(spoiled=lambda _: True), job_of(routes_of=None), chat, 60.0)
    assert len(groups) == len(PROBLEMS)


def test_of_one_expert_a_token_all_may_be_the_first() -> None:
    shape = beam_shape(num_experts_per_tok=1)
    check_routes(KEY, np.zeros((4, len(shape.moe_layers), 1), np.uint8), 5, shape)
