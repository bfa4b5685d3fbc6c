"""What is one pass over memory on a GPU has the bits of the operations as they are written."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from beamline.learner.megatron import head
from beamline.policy import passes, router
from beamline.policy.grouped import grouped_linear

N, K, D, E = 301, 4, 256, 32


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


def places(rows: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(rows, device="cuda")
    return order, passes.inverse(order)


def with_gradients(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """What it gives, and the gradients of its arguments."""
    leaves = [
        a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in arguments
    ]
    found = function(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    asked = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    torch.manual_seed(1)
    given = [torch.randn_like(output) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, asked, given)]


DIFFERENTIABLE: dict[str, Callable[[], tuple[Any, ...]]] = {
    "norm": lambda: (normal(N, 1, D), normal(D), 1e-6),
    "normed_sum": lambda: (normal(N, 1, D), normal(N, 1, D), normal(D), 1e-6, torch.tensor([0.3, 0.9], device="cuda")),
    "rotated": lambda: (normal(N, 4, 64), normal(N, 2, 64), normal(64), normal(64), 1e-6, *cosines()),
    "scaled": lambda: (normal(N, 4, 64), normal(N, 2, 64), normal(64), normal(64), 1e-6, torch.rand(N, device="cuda")),
    "gated": lambda: (normal(N, 4, 64), normal(N, 4, 64), normal(4)),
    "swiglu": lambda: (normal(N, 2 * D),),
}


def cosines() -> tuple[Tensor, Tensor]:
    angles = torch.rand(N, 64, device="cuda")
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_pass_and_its_gradient_are_those_of_the_operations(name: str) -> None:
    """Values in 16 bits are equal; sums over rows, which are in another order, to what rounding to 16 bits leaves."""
    torch.manual_seed(0)
    arguments, function = DIFFERENTIABLE[name](), getattr(passes, name)
    for ours, theirs in zip(*(with_gradients(f, arguments) for f in (function, function.__wrapped__)), strict=True):
        if len(ours) == N:
            # A division or a root that another instruction rounds the other way turns over a last bit now and then.
            assert (ours != theirs).float().mean() < 1e-3
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


chosen_experts: Any = cast(Any, router.chosen_experts).__wrapped__  # without its torch.no_grad
PLAIN: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "gathered sum": (passes._gathered_sum, lambda: (places(N * K)[1].view(N, K), normal(N * K, D))),
    "weighted sum": (
        passes._weighted_sum,
        lambda: (torch.rand(N, K, device="cuda"), places(N * K)[1].view(N, K), normal(N * K, D)),
    ),
    "products": (passes._products, lambda: (normal(N, D), places(N * K)[1].view(N, K), normal(N * K, D))),
    "weighted copies": (
        passes._weighted_copies,
        lambda: (places(N * K)[0], normal(N, D), torch.rand(N, K, device="cuda")),
    ),
    "largest logit": (head._largest, lambda: (logits(), temperatures(), 30.0)),
    "sums of a softmax": (head._sums, lambda: (logits(), temperatures(), temperatures() + 30, targets(), 30.0)),
    "gradient of logits": (
        head._logits_grad,
        lambda: (logits(), temperatures(), temperatures() + 30, temperatures(), targets(), 30.0, torch.bfloat16),
    ),
    "chosen experts": (chosen_experts, lambda: (normal(N, E, dtype=torch.float32), biases(), 8, 4, K)),
}


def logits() -> Tensor:
    return 10 * normal(N, 1000, dtype=torch.float32)


def temperatures() -> Tensor:
    return torch.rand(N, 1, device="cuda") + 0.5


def targets() -> Tensor:
    return torch.randint(-100, 1100, (N, 1), device="cuda")


def biases() -> Tensor:
    return 0.1 * normal(E, dtype=torch.float32)


@pytest.mark.parametrize("name", PLAIN)
def test_a_pass_is_that_of_the_operations(name: str) -> None:
    torch.manual_seed(0)
    function, arguments = PLAIN[name][0], PLAIN[name][1]()
    ours, theirs = function(*arguments), function.__wrapped__(*arguments)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-2 if ours.dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 4095, 4096, 100_001])
def test_the_inverse_of_an_order(rows: int) -> None:
    order = torch.randperm(rows, device="cuda")
    assert torch.equal(passes.inverse(order)[order], torch.arange(rows, device="cuda"))


def test_a_pass_is_made_once_for_all_numbers_of_rows() -> None:
    from torch._dynamo.utils import counters

    passes.swiglu(normal(5, D))
    made = counters["stats"]["unique_graphs"]
    for rows in (0, 1, 2, 7, 64, 1000):
        assert len(passes.swiglu(normal(rows, D))) == rows
    assert counters["stats"]["unique_graphs"] == made


@pytest.mark.parametrize("sizes", [(3, 0, 5, 0, 0), (0, 0, 0, 0, 1), (0, 40, 0, 24, 0)])
def test_an_expert_without_rows_has_the_gradient_0(sizes: tuple[int, ...]) -> None:
    weight = normal(len(sizes), 96, D).requires_grad_()
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    for _ in range(3):  # in memory that holds something else each time
        spoiled = [torch.full_like(weight, torch.nan) for _ in range(4)]
        del spoiled
        out = grouped_linear(normal(sum(sizes), D), weight, ends)
        (found,) = torch.autograd.grad(out, weight, torch.ones_like(out))
        for expert, size in enumerate(sizes):
            assert bool((found[expert] == 0).all()) == (size == 0)
        assert bool(torch.isfinite(found).all())
