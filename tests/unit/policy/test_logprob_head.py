import pytest
import torch
from torch import Tensor

from beamline.policy.head import head_logprobs

N, D, V, CAP = 37, 16, 50, 5.0
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(N, D, generator=GENERATOR)
WEIGHT = torch.randn(V, D, generator=GENERATOR)
TARGET = torch.randint(V, (N,), generator=GENERATOR)
TEMPERATURE = torch.rand(N, generator=GENERATOR) + 0.5


def written(hidden: Tensor, weight: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies in double precision: matmul, soft cap, temperature, softmax."""
    logits = hidden.double() @ weight.double().T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / TEMPERATURE.double()[:, None]
    table = logits - logits.exp().sum(-1, keepdim=True).log()
    return table[torch.arange(N), TARGET], -(table.exp() * table).sum(-1)


TYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("cap", [CAP, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropies_are_the_written_ones(cap: float | None, dtype: torch.dtype) -> None:
    """From bfloat16 too: its logits are not rounded."""
    hidden, weight = HIDDEN.to(dtype), WEIGHT.to(dtype)
    actual = head_logprobs(hidden, weight, TARGET, TEMPERATURE, cap, chunk_rows=10)
    for ours, expected in zip(actual, written(hidden, weight, cap), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_from_bfloat16_are_rounded_to_it_and_no_further() -> None:
    """The gradient of the logits once, for the products, and what comes out of them once more."""
    ours, theirs = [(HIDDEN.bfloat16().to(t).requires_grad_(), WEIGHT.bfloat16().to(t).requires_grad_()) for t in TYPES]
    for hidden, weight in (ours, theirs):
        logprobs, _ = head_logprobs(hidden, weight, TARGET, TEMPERATURE, CAP, chunk_rows=10)
        logprobs.sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.bfloat16
        size = other.grad.abs().max().item()
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=2**-8, atol=2**-8 * size)


def test_the_cap_comes_before_the_temperature() -> None:
    """Logits far beyond the cap end at it, and only then are divided."""
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0]])
    logprobs, _ = head_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([4.0]), cap=2.0, chunk_rows=8)
    expected = torch.log_softmax(torch.tensor([2.0 / 4, -2.0 / 4]), dim=0)[0]
    torch.testing.assert_close(logprobs[0], expected)


@pytest.mark.parametrize("chunk_rows", [1, 36, 37, 1000])
def test_the_size_of_the_chunks_does_not_matter(chunk_rows: int) -> None:
    expected = head_logprobs(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, chunk_rows=10)
    actual = head_logprobs(HIDDEN, WEIGHT, TARGET, TEMPERATURE, CAP, chunk_rows=chunk_rows)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("chunk_rows", [1, 10, 37])
def test_the_gradient_is_that_of_the_written_logprobs(chunk_rows: int) -> None:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    direction = torch.randn(N, generator=torch.Generator().manual_seed(1))
    logprobs, _ = head_logprobs(hidden, weight, TARGET, TEMPERATURE, CAP, chunk_rows)
    actual = torch.autograd.grad((logprobs * direction).sum(), (hidden, weight))
    expected = torch.autograd.grad((written(hidden, weight, CAP)[0] * direction).sum(), (hidden, weight))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_entropy_carries_no_gradient() -> None:
    logprobs, entropy = head_logprobs(HIDDEN.clone().requires_grad_(), WEIGHT, TARGET, TEMPERATURE, CAP, 10)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_no_rows_give_no_values() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, entropy = head_logprobs(HIDDEN[:0], WEIGHT, none, TEMPERATURE[:0], CAP, 10)
    assert (logprobs.shape, entropy.shape) == ((0,), (0,))
