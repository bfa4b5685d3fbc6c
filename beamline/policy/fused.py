"""Elementwise work that a GPU does in one pass over memory."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

# Intermediate values are rounded as they are written, and casts to fewer bits and back are not optimized away, as torch
# 2.11 does by its patterns in spite of the first.
_OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "pattern_matcher": False}

# Kernels of a function, for types, shapes and whether gradients are wanted: torch allows 8, and two models need more.
torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def fused(*whole: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Compile a function for tensors on a GPU; elsewhere it is called as it is written.

    Its tensors have rows in the first dimension, as many as there happen to be, but for those in the arguments
    ``whole``, which have no rows. Other sizes are fixed: kernels are made for each of them. Values in between are
    rounded as they are written, so that only the order of sums depends on where it is computed.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        compiled = torch.compile(function, dynamic=False, fullgraph=True, options=_OPTIONS)
        of_rows = [name not in whole for name in signature(function).parameters]

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            rows = [each for each, of in zip(args, of_rows, strict=True) if of and isinstance(each, Tensor)]
            if not rows[0].is_cuda or len(rows[0]) < 2:  # none and one are no numbers of rows like others to torch
                return function(*args, **kwargs)
            for each in rows:
                torch._dynamo.maybe_mark_dynamic(each, 0)
            return compiled(*args, **kwargs)

        return call

    return decorate
