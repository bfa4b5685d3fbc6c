"""Both heads over a recorded support, against the written formula in double precision."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from beamline.policy import head, parity
from beamline.records import Support

N, D, V, CAP = 37, 16, 50, 5.0
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(N, D, generator=GENERATOR)
WEIGHT = torch.randn(V, D, generator=GENERATOR)
TARGET = torch.randint(V, (N,), generator=GENERATOR)
TEMPERATURE = torch.rand(N, generator=GENERATOR) + 0.5
RNG = np.random.default_rng(0)
NEVER = 17  # a token that is a target of none and in no entry
TARGET[TARGET == NEVER] = NEVER + 1
ENTRIES = [
    np.array([], np.int32)
    if row % 4 == 0
    else np.unique([*RNG.permutation(NEVER)[: row // 2], target]).astype(np.int32)
    for row, target in enumerate(TARGET.tolist())
]
SUPPORT = Support.of(ENTRIES)
FREE = SUPPORT.sizes == 0
HEADS = {"torch": head.head_logprobs, "parity": parity.head_logprobs}


@pytest.fixture(params=HEADS)
def score(request: pytest.FixtureRequest) -> Any:
    return HEADS[request.param]


def written(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """One row after the other, of each the allowed tokens alone: matmul, soft cap, temperature, logarithm of shares."""
    logprobs, entropies = [], []
    for row, entry in enumerate(ENTRIES):
        allowed = entry.tolist() or list(range(V))
        logits = [CAP * torch.tanh(hidden[row].double() @ weight[v].double() / CAP) for v in allowed]
        powers = [torch.exp(logit / float(TEMPERATURE[row])) for logit in logits]
        shares = [power / sum(powers) for power in powers]
        logprobs.append(torch.log(shares[allowed.index(int(TARGET[row]))]))
        entropies.append(-sum(share * torch.log(share) for share in shares))
    return torch.stack(logprobs), torch.stack(entropies)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_rows", [1, 10, 1000])
def test_logprobs_and_entropies_are_those_of_the_written_renormalization(score: Any, chunk_rows: int) -> None:
    actual = score(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, chunk_rows, SUPPORT)
    for ours, expected in zip(actual, written(HIDDEN, WEIGHT), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 10, 1000])
def test_the_gradient_is_that_of_the_written_logprobs(score: Any, chunk_rows: int) -> None:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    direction = torch.randn(N, generator=torch.Generator().manual_seed(1))
    logprobs, _ = score(hidden, weight, TARGET, TEMPERATURE, CAP, chunk_rows, SUPPORT)
    actual = torch.autograd.grad((logprobs * direction).sum(), (hidden, weight))
    expected = torch.autograd.grad((written(hidden, weight)[0] * direction.double()).sum(), (hidden, weight))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_token_that_could_not_be_drawn_has_no_gradient(score: Any) -> None:
    weight = WEIGHT.clone().requires_grad_()
    logprobs, _ = score(HIDDEN, weight, TARGET, TEMPERATURE, CAP, 10, SUPPORT)
    (gradient,) = torch.autograd.grad(logprobs[torch.from_numpy(~FREE)].sum(), weight)
    assert not gradient[NEVER].any()
    assert gradient[TARGET[-1]].any()


def test_rows_that_nothing_restricts_have_the_bits_that_they_have_without_a_support(score: Any) -> None:
    free, both = torch.from_numpy(FREE), (Support.unrestricted(N), SUPPORT)
    plain = score(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, 10)
    nothing, mixed = (score(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, 10, support) for support in both)
    for expected, same, beside in zip(plain, nothing, mixed, strict=True):
        assert torch.equal(same, expected)
        assert torch.equal(beside[free], expected[free])
        assert not torch.isclose(beside[~free], expected[~free]).any()


def test_an_allowed_token_of_hardly_any_probability_still_counts(score: Any) -> None:
    """Forbidden ones are far likelier: renormalized, e^-40 against e^-40 is one half."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[20.0], [-20.0], [-20.0]])
    support = Support.of([np.array([2, 1], np.int32)])
    logprobs, entropy = score(hidden, weight, torch.tensor([1]), torch.ones(1), 1e6, 8, support)
    assert logprobs.item() == pytest.approx(-math.log(2), abs=1e-6)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_one_allowed_token_is_certain_at_every_temperature(score: Any, temperature: float) -> None:
    hidden = HIDDEN.clone().requires_grad_()
    support = Support.of([np.array([token], np.int32) for token in TARGET])
    logprobs, entropy = score(hidden, WEIGHT, TARGET, torch.full((N,), temperature), CAP, 10, support)
    assert logprobs.tolist() == entropy.tolist() == [0.0] * N
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_without_a_cap_the_support_restricts_too() -> None:
    """Only torch's head can do without a cap; one that is never reached comes to the same."""
    logprobs, _ = head.head_logprobs(HIDDEN, WEIGHT, TARGET, TEMPERATURE, None, 10, SUPPORT)
    capped, _ = head.head_logprobs(HIDDEN, WEIGHT, TARGET, TEMPERATURE, 1e4, 10, SUPPORT)
    torch.testing.assert_close(logprobs, capped, rtol=1e-4, atol=1e-4)


def test_the_support_of_another_number_of_rows_is_an_error(score: Any) -> None:
    with pytest.raises(ValueError, match="support of 36 rows was given for 37 rows"):
        score(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, 10, SUPPORT.take(np.arange(1, N)))


def test_a_support_without_its_token_is_an_error_that_names_the_row(score: Any) -> None:
    target = TARGET.clone()
    target[5:7] = NEVER
    with pytest.raises(ValueError, match=r"2 of 37 rows lacks their token, first that of row 5 \(token 17\)"):
        score(HIDDEN, WEIGHT, target, TEMPERATURE, CAP, 10, SUPPORT)


def test_no_rows_give_no_values(score: Any) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = score(HIDDEN[:0], WEIGHT, none, TEMPERATURE[:0], CAP, 10, Support.unrestricted(0))
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))
