from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from beamline.kernels.vocabulary import forbid, likeliest_first, restrict, sample_rows, score_rows, soft_cap
from tests.exact import Floats, bits
from tests.filters import sampled_from

V = 40
LAST = 1.0 - 2.0**-53  # the largest uniform number
OFF: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
PARAMS: list[dict[str, Any]] = [
    OFF | change
    for change in (
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": V + 5},
        {"top_p": 0.05},
        {"top_p": 0.9},
        {"min_p": 0.2},
        {"min_p": 0.99},
        {"top_k": 8, "top_p": 0.7},
        {"min_p": 0.05, "top_p": 0.7},
        {"min_p": 0.05, "top_k": 4},
        {"temperature": 1.8, "min_p": 0.02, "top_k": 12, "top_p": 0.85},
    )
]


def random_logits(rows: int, scale: float = 2.0) -> Floats:
    return np.random.default_rng(rows).normal(0, scale, (rows, V)).astype(np.float32)


def draw_with(
    logits: Any, uniforms: Any, params: list[dict[str, Any]], early: Any = False, stop_ids: Any = ((-1,),)
) -> tuple[NDArray[np.int64], Floats]:
    """Tokens and log-probabilities of rows; ``early`` and ``stop_ids`` are of all rows, or of each."""
    return recording(logits, uniforms, params, False, early, stop_ids)[:2]


def recording(
    logits: Any, uniforms: Any, params: list[dict[str, Any]], recorded: Any = True, early: Any = False,
    stop_ids: Any = ((-1,),),
) -> tuple[NDArray[np.int64], Floats, NDArray[np.int32], NDArray[np.int64]]:  # fmt: skip
    """The same, and the ids and borders of the tokens that could be drawn in ``recorded`` rows."""
    rows = np.array(logits, np.float32)
    n, width = rows.shape
    column = {name: np.array([p[name] for p in params]) for name in OFF}
    stops = np.array(stop_ids)
    tokens, logprobs, noted = np.empty(n, np.int64), np.empty(n, np.float32), np.broadcast_to(recorded, n).copy()
    ids, borders = np.full(noted.sum() * width, -1, np.int32), np.zeros(n + 1, np.int64)
    forbid(rows, np.broadcast_to(stops, (n, stops.shape[1])).copy(), np.broadcast_to(early, n).copy())
    sample_rows(
        rows, likeliest_first(rows), np.array(uniforms, np.float64), column["temperature"].astype(np.float32),
        column["top_p"].astype(np.float32), column["top_k"], column["min_p"].astype(np.float32),
        np.empty(width, np.float32), tokens, logprobs, noted, ids, borders,
    )  # fmt: skip
    return tokens, logprobs, ids[: borders[-1]], borders


def test_the_soft_cap_bends_logits() -> None:
    """The tanh is off by at most 3 units in the last place, and its argument and the result are rounded once each."""
    logits = np.linspace(-200, 200, 1001, dtype=np.float32)
    capped = logits.copy()
    soft_cap(capped, 30.0)
    np.testing.assert_allclose(capped, 30 * np.tanh(logits.astype(np.float64) / 30), rtol=5 * 2**-23)


def test_tokens_invert_the_written_cumulative_distribution() -> None:
    """Rows with all kinds of parameters in one call."""
    params = PARAMS * 20
    logits = random_logits(len(params))
    uniforms = np.random.default_rng(0).random(len(params))
    tokens, logprobs = draw_with(logits, uniforms, params)
    for row, u, p, token, logprob in zip(logits, uniforms, params, tokens, logprobs, strict=True):
        probs = sampled_from(row, **p)
        assert token == np.searchsorted(np.cumsum(probs), u, side="right"), p
        assert logprob == pytest.approx(np.log(probs[token]), abs=1e-5), p


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_evenly_spread_uniforms_draw_every_token_as_often_as_it_is_likely(params: dict[str, Any]) -> None:
    n = 5000
    logits = random_logits(1)
    tokens, _ = draw_with(logits.repeat(n, axis=0), (np.arange(n) + 0.5) / n, [params] * n)
    expected = n * sampled_from(logits[0], **params)
    assert np.abs(np.bincount(tokens, minlength=V) - expected).max() <= 1 + 1e-3


@given(
    st.lists(st.sampled_from([-np.inf, -200.0, -90.0, -3.0, 0.0, 1e-7, 2.0, 30.0]), min_size=2, max_size=12).filter(
        lambda logits: max(logits) > -np.inf
    ),
    st.sampled_from(PARAMS),
    st.sampled_from([0.0, 2.0**-53, 1e-12, 0.3, 0.5, 1 - 1e-9, LAST]),
)
def test_no_forbidden_token_is_drawn(row: list[float], params: dict[str, Any], uniform: float) -> None:
    """At the ends of the uniforms too, and where equal or impossible tokens lie at the ends of the vocabulary."""
    (token,), (logprob,) = draw_with([row], [uniform], [params])
    probs = sampled_from(np.array(row), **params)
    assert probs[token] > 0
    assert logprob == pytest.approx(np.log(probs[token]), abs=1e-5)


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (LAST, 5)])
def test_the_ends_of_the_uniforms_are_the_first_and_last_possible_tokens(uniform: float, expected: int) -> None:
    row = [-np.inf, -np.inf, 0.0, 0.0, -np.inf, 0.0, -np.inf]
    (token,), _ = draw_with([row], [uniform], [OFF])
    assert token == expected


@pytest.mark.parametrize(("uniform", "expected"), [(0.25, 1), (0.5, 2), (0.75, 3)])
def test_a_uniform_at_a_border_draws_the_token_behind_it(uniform: float, expected: int) -> None:
    (token,), _ = draw_with([[0.0] * 4], [uniform], [OFF])
    assert token == expected


def test_of_many_equals_the_lower_ids_stay() -> None:
    """Every third token is likely, and of these the first three are allowed."""
    n = 200
    logits = np.tile([0.0, 0.0, 1.0], 170)[None].repeat(n, axis=0)
    tokens, _ = draw_with(logits, (np.arange(n) + 0.5) / n, [OFF | {"top_k": 3}] * n)
    assert sorted(set(tokens.tolist())) == [2, 5, 8]


def test_temperature_0_takes_the_most_likely_token_for_certain() -> None:
    """Beside other rows, whatever its filters and its uniform."""
    logits = random_logits(6)
    greedy = [OFF | {"temperature": 0.0, **f} for f in ({}, {"top_p": 0.3}, {"top_k": 4, "min_p": 0.5})]
    tokens, logprobs = draw_with(logits, [0.0, LAST, 0.5, 0.1, 0.2, 0.3], [*greedy, *PARAMS[:3]])
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert logprobs[:3].tolist() == [0.0, 0.0, 0.0]
    assert (logprobs[3:] < 0).all()


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"top_k": 2}, [0, 1]),  # of equals the lower ids
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.1}, [0]),  # the most likely always stays
        ({"top_p": 0.4}, [0, 1]),  # the token that reaches the mass is in
        ({"min_p": 0.6}, [0, 1, 2]),
        ({"min_p": 0.4}, [0, 1, 2, 3]),
        ({"min_p": 0.6, "top_p": 0.65}, [0, 1]),  # of what min-p left: 2/3 is enough
        ({"top_k": 3, "top_p": 0.65}, [0, 1]),  # of what top-k left
        ({"top_p": 0.65}, [0, 1, 2]),
    ],
)
def test_what_a_filter_allows(change: dict[str, Any], allowed: list[int]) -> None:
    logits = np.log([[2 / 7, 2 / 7, 2 / 7, 1 / 7]])
    n = 200
    tokens, _ = draw_with(logits.repeat(n, axis=0), (np.arange(n) + 0.5) / n, [OFF | change] * n)
    assert sorted(set(tokens.tolist())) == allowed


@pytest.mark.parametrize("params", [OFF, OFF | {"temperature": 0.0}, OFF | {"top_k": 3}], ids=str)
def test_stop_tokens_of_early_rows_are_forbidden(params: dict[str, Any]) -> None:
    """A row's own ones, and only while it is early; -1 stands for none."""
    n = 600
    row = np.log([[0.5, 0.3, 0.1, 0.1]])
    early, stop_ids = np.arange(n) % 3 > 0, np.where(np.arange(n)[:, None] % 3 == 1, [0, -1], [0, 1])
    tokens, logprobs = draw_with(row.repeat(n, axis=0), np.arange(n) / n, [params] * n, early, stop_ids)
    for kind, first in enumerate([0, 1, 2]):
        rest = row[0].copy()
        rest[:first] = -np.inf
        drawn, its_logprobs = tokens[kind::3], logprobs[kind::3]
        if params["temperature"] == 0:
            assert set(drawn.tolist()) == {first}
        else:
            probs = sampled_from(rest, **params)
            assert set(drawn.tolist()) == set(np.flatnonzero(probs).tolist())
            np.testing.assert_allclose(its_logprobs, np.log(probs[drawn]), atol=1e-6)


def test_a_row_has_the_same_bits_alone() -> None:
    logits, uniforms = random_logits(len(PARAMS)), np.random.default_rng(0).random(len(PARAMS))
    tokens, logprobs = draw_with(logits, uniforms, PARAMS)
    for i, params in enumerate(PARAMS):
        token, logprob = draw_with(logits[i : i + 1], uniforms[i : i + 1], [params])
        assert (token[0], bits(logprob)[0]) == (tokens[i], bits(logprobs)[i]), params


@pytest.mark.parametrize("early", [False, True])
def test_the_recorded_tokens_are_those_that_the_written_filters_allow(early: bool) -> None:
    """By rising id, with all kinds of filters in one call, and with the likeliest tokens forbidden."""
    params = PARAMS * 6
    logits, uniforms = random_logits(len(params)), np.random.default_rng(0).random(len(params))
    stops = np.argsort(-logits, axis=1)[:, :3]
    recorded = np.arange(len(params)) % 5 != 2
    tokens, _, ids, borders = recording(logits, uniforms, params, recorded, early, stops)
    for i, row in enumerate(logits):
        if early:
            row[stops[i]] = -np.inf
        allowed = np.flatnonzero(sampled_from(row, **params[i])).tolist() if recorded[i] else []
        assert ids[borders[i] : borders[i + 1]].tolist() == allowed, params[i]
        assert not recorded[i] or tokens[i] in allowed


def test_recording_changes_no_bits() -> None:
    logits, uniforms = random_logits(len(PARAMS)), np.random.default_rng(0).random(len(PARAMS))
    tokens, logprobs, *_ = recording(logits, uniforms, PARAMS)
    same_tokens, same_logprobs = draw_with(logits, uniforms, PARAMS)
    assert tokens.tolist() == same_tokens.tolist()
    assert bits(logprobs).tolist() == bits(same_logprobs).tolist()


def test_temperature_0_allows_one_token_only() -> None:
    """In each row its own, whatever the rows before left in the scratch."""
    logits = random_logits(4)
    _, _, ids, borders = recording(logits, [0.5] * 4, [OFF, OFF | {"temperature": 0.0}] * 2, [False, True] * 2)
    assert borders.tolist() == [0, 0, 1, 1, 2]
    assert ids.tolist() == logits[1::2].argmax(-1).tolist()


def test_tokens_that_underflow_cannot_be_drawn_and_are_not_recorded() -> None:
    _, _, ids, _ = recording([[0.0, -200.0, -1.0, -np.inf]], [0.5], [OFF | {"min_p": 0.0, "top_k": 3}])
    assert ids.tolist() == [0, 2]


def scored(
    logits: Any, tokens: Any, temperature: Any, ids: NDArray[np.int32], borders: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Log-probabilities and entropies of rows, each restricted to its ids."""
    rows, n = np.array(logits, np.float32), len(logits)
    logprobs, entropies = np.empty(n, np.float32), np.empty(n, np.float32)
    score_rows(rows, tokens, temperature, ids, borders, np.empty(rows.shape[1], np.float32), logprobs, entropies)
    return logprobs, entropies


NO_IDS = np.zeros(0, np.int32)
TEMPERATURES = np.array([p["temperature"] for p in PARAMS], np.float32)


@pytest.mark.parametrize("early", [False, True])
def test_scoring_over_what_was_recorded_gives_the_bits_of_the_draw(early: bool) -> None:
    """With the largest logits among those forbidden too."""
    logits, uniforms = random_logits(len(PARAMS), scale=8.0), np.random.default_rng(1).random(len(PARAMS))
    stops = np.argsort(-logits, axis=1)[:, :3]
    tokens, logprobs, ids, borders = recording(logits, uniforms, PARAMS, True, early, stops)
    found, _ = scored(logits, tokens, TEMPERATURES, ids, borders)
    assert bits(found).tolist() == bits(logprobs).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 1e3])
def test_scores_are_those_of_the_written_renormalization(temperature: float) -> None:
    """Loops in double precision over the allowed tokens alone, 1, 2, ... of them; the others are likelier."""
    n = 12
    logits = random_logits(n, scale=3.0)
    entries = [np.random.default_rng(i).permutation(V)[: i + 1].astype(np.int32) for i in range(n)]
    for row, entry in zip(logits, entries, strict=True):
        row[np.setdiff1d(np.arange(V), entry)] += 10
    tokens = np.array([entry[-1] for entry in entries])
    borders = np.cumsum([0, *map(len, entries)])
    logprobs, entropies = scored(logits, tokens, np.full(n, temperature, np.float32), np.concatenate(entries), borders)
    for row, entry, token, logprob, entropy in zip(logits, entries, tokens, logprobs, entropies, strict=True):
        tempered = {int(v): float(row[v]) / float(np.float32(temperature)) for v in entry}
        largest = max(tempered.values())
        mass = sum(np.exp(value - largest) for value in tempered.values())
        table = {v: value - largest - np.log(mass) for v, value in tempered.items()}
        # each tempered logit and its distance from the largest is rounded once
        rounding = 3 * 2.0**-24 * max(map(abs, tempered.values())) + 1e-6
        assert logprob == pytest.approx(table[token], abs=rounding)
        assert entropy == pytest.approx(-sum(np.exp(p) * p for p in table.values()), abs=3 * rounding)


def test_a_row_that_nothing_restricts_has_the_same_bits_beside_restricted_ones() -> None:
    n = len(PARAMS)
    logits, tokens = random_logits(n), np.arange(n)
    plain = scored(logits, tokens, TEMPERATURES, NO_IDS, np.zeros(n + 1, np.int64))
    sizes = np.where(np.arange(n) % 2, 3, 0)
    ids = np.concatenate([np.array([t, 38, 39], np.int32) for t in tokens[1::2]])
    mixed = scored(logits, tokens, TEMPERATURES, ids, np.concatenate([[0], np.cumsum(sizes)]))
    for ours, theirs in zip(mixed, plain, strict=True):
        assert bits(ours)[::2].tolist() == bits(theirs)[::2].tolist()
        assert (ours[1::2] != theirs[1::2]).all()


def test_restricting_keeps_the_allowed_logits_in_any_order_of_their_ids() -> None:
    row, before = random_logits(1)[0], random_logits(1)[0]
    restrict(row, np.array([7, 0, 39, 3], np.int32), np.empty(V, np.float32))
    kept = np.isin(np.arange(V), [0, 3, 7, 39])
    assert np.array_equal(row[kept], before[kept])
    assert (row[~kept] < -1e14).all()
