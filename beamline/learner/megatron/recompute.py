"""Values that are computed again for the backward pass rather than kept until then."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

Make: TypeAlias = Callable[..., tuple[Any, Callable[[Tensor], Tensor]]]
"""Calls a function with arguments. Gives its result, and what is to be called with all that was made of that."""


def kept(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The result is kept for the backward pass. A :data:`Make`."""
    return function(*arguments), _as_it_is


def recomputed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """The result's memory is given back once it has been used, and filled again when gradients come. A :data:`Make`.

    Cheaper than to compute a whole layer again where the function is: no product of matrices is made twice. It must
    give the same for the same arguments, and none of them or a view of it.
    """
    if not torch.is_grad_enabled():
        return kept(function, *arguments)
    made = _Recomputed(function, *arguments)
    return made.results if len(made.results) > 1 else made.results[0], made.used


def _as_it_is(outcome: Tensor) -> Tensor:
    return outcome


class _Recomputed:
    """A function's results, and how they come again from its arguments, which are kept."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._made: tuple[Tensor, ...] = ()
        self._second: tuple[list[Tensor], tuple[Tensor, ...]] | None = None
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        self.results: tuple[Tensor, ...] = cast(Any, _Once).apply(self, *tensors)

    def used(self, outcome: Tensor) -> Tensor:
        """Give the memory of the results back: ``outcome`` is all that was made of them, and does not share it."""
        if outcome.requires_grad:
            for made in self._made:
                made.untyped_storage().resize_(0)
            outcome.register_hook(self._compute)
        return outcome

    def _compute(self, _: Tensor) -> None:
        """Fill the results' memory again, before the gradient goes to where they were used."""
        leaves = [each.detach().requires_grad_(each.requires_grad) for each in self._tensors()]
        with torch.enable_grad():
            results = self._call(leaves)
        for made, result in zip(self._made, results, strict=True):
            made.untyped_storage().resize_(result.nbytes)
            made.untyped_storage().copy_(result.detach().contiguous().untyped_storage())
        self._second = leaves, results

    def _tensors(self) -> list[Tensor]:
        return [each for each in self._arguments if isinstance(each, Tensor)]

    def _call(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        given = iter(tensors)
        found = self._function(*(next(given) if isinstance(each, Tensor) else each for each in self._arguments))
        return found if isinstance(found, tuple) else (found,)


class _Once(torch.autograd.Function):
    """The function, without what it would keep; its gradient is that of the results that were computed again."""

    @staticmethod
    def forward(ctx: Any, owner: _Recomputed, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.owner = owner
        owner._made = owner._call(list(tensors))
        return owner._made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        owner: _Recomputed = ctx.owner
        assert owner._second is not None
        leaves, results = owner._second
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, grads))
        owner._second, owner._made = None, ()
        return None, *(next(found) if leaf.requires_grad else None for leaf in leaves)
