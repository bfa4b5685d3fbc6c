from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from beamline.rollout.local.draw import draw
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


def random_logits(rows: int, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(rows)) * scale


def draw_with(logits: Tensor, uniforms: Any, params: list[dict[str, Any]]) -> tuple[NDArray[Any], NDArray[Any]]:
    columns = {name: torch.tensor([p[name] for p in params]) for name in OFF}
    tokens, logprobs = draw(
        logits,
        torch.as_tensor(uniforms, dtype=torch.float64),
        columns["temperature"].float(),
        columns["top_p"].float(),
        columns["top_k"],
        columns["min_p"].float(),
    )
    return tokens.numpy(), logprobs.numpy()


def test_tokens_invert_the_written_cumulative_distribution() -> None:
    """Rows with all kinds of parameters in one call."""
    params = PARAMS * 20
    logits = random_logits(len(params))
    uniforms = np.random.default_rng(0).random(len(params))
    tokens, logprobs = draw_with(logits, uniforms, params)
    for row, u, p, token, logprob in zip(logits.numpy(), uniforms, params, tokens, logprobs, strict=True):
        probs = sampled_from(row, **p)
        assert token == np.searchsorted(np.cumsum(probs), u, side="right"), p
        assert logprob == pytest.approx(np.log(probs[token]), abs=1e-5), p


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_evenly_spread_uniforms_draw_every_token_as_often_as_it_is_likely(params: dict[str, Any]) -> None:
    n = 5000
    logits = random_logits(1)
    tokens, _ = draw_with(logits.expand(n, V), (np.arange(n) + 0.5) / n, [params] * n)
    expected = n * sampled_from(logits[0].numpy(), **params)
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
    (token,), (logprob,) = draw_with(torch.tensor([row]), [uniform], [params])
    probs = sampled_from(np.array(row), **params)
    assert probs[token] > 0
    assert logprob == pytest.approx(np.log(probs[token]), abs=1e-5)


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (LAST, 5)])
def test_the_ends_of_the_uniforms_are_the_first_and_last_possible_tokens(uniform: float, expected: int) -> None:
    row = [-np.inf, -np.inf, 0.0, 0.0, -np.inf, 0.0, -np.inf]
    (token,), _ = draw_with(torch.tensor([row]), [uniform], [OFF])
    assert token == expected


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
    logits = torch.tensor([[2 / 7, 2 / 7, 2 / 7, 1 / 7]]).log()
    n = 200
    tokens, _ = draw_with(logits.expand(n, 4), (np.arange(n) + 0.5) / n, [OFF | change] * n)
    assert sorted(set(tokens.tolist())) == allowed
