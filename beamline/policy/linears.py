"""Linear layers with adapters on the sampler's kernels: one weight, or one for each expert, with their gradients."""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from beamline.kernels import experts, gradients, layers
from beamline.policy import functions
from beamline.policy.functions import apply, array, new, over_rows
from beamline.policy.grouped import grouped_outer, grouped_product
from beamline.policy.lora import Adapter

_NOWHERE = np.empty(0, np.int64)


class Groups(NamedTuple):
    """The rows of a linear layer of experts: those of expert g end before row ``ends[g]``.

    Row p is choice ``order[p]`` of all tokens' choices, ``token * choices + choice``, and choice c stands in row
    ``place[c]``. Inputs are rows too where they are ``sorted``, else tokens. Outside of experts there is one group, and
    no order.
    """

    ends: NDArray[np.int64]
    order: NDArray[np.int64] = _NOWHERE
    place: NDArray[np.int64] = _NOWHERE
    choices: int = 1
    sorted: bool = False

    @classmethod
    def of(cls, chosen_NK: Tensor, number: int) -> "Groups":
        """The rows of so many experts, chosen by each token."""
        ends, order = np.empty(number, np.int64), np.empty(chosen_NK.numel(), np.int64)
        experts.sort_by_expert(chosen_NK.numpy(), ends, order)
        place = np.empty_like(order)
        experts.invert(order, place)
        return cls(ends, order, place, chosen_NK.shape[1])

    @property
    def picks(self) -> NDArray[np.int64]:
        """The choice that each row is made from; empty where rows are made from the inputs in their order."""
        return _NOWHERE if self.sorted else self.order

    @property
    def offsets(self) -> Tensor:
        """The ends as torch's grouped products take them."""
        return torch.from_numpy(self.ends.astype(np.int32))

    def rows(self, x: Tensor) -> Tensor:
        """The input of each row."""
        return x.index_select(0, torch.from_numpy(self.picks) // self.choices) if len(self.picks) else x


def linear_layer(x: Tensor, weight: Tensor, adapter: Adapter | None, groups: Groups | None = None) -> Tensor:
    """A linear layer with its adapter: one weight ``[out, in]``, or ``[groups, out, in]``.

    What an adapter with dropout reads is not what the weight reads, so that the two are summed afterwards.
    """
    if groups is None:
        weight, groups = weight[None], Groups(np.full(1, len(x)))
    dropping = adapter is not None and adapter.dropout is not None
    a, b, scale = (None, None, 1.0) if adapter is None or dropping else (adapter.a, adapter.b, adapter.scale)
    out = cast(Tensor, apply(_Linear, x, weight, a, b, scale, groups))
    if adapter is None or not dropping:
        return out
    order = torch.from_numpy(groups.order) if len(groups.order) else None
    return out + adapter.added(groups.rows(x), groups.offsets, order, groups.choices)


class _Linear(torch.autograd.Function):
    """``y = x W^T + scale (x A^T) B^T`` for each group of rows; only gradients that are asked for are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor | None, b: Tensor | None, scale: float, groups: Groups
    ) -> Tensor:
        order, rows = groups.picks, int(groups.ends[-1])
        source, w, depth, width = array(x), array(weight.transpose(1, 2)), x.shape[1], weight.shape[1]
        at, bt = new(1, depth, 0), new(1, 0, width)
        if a is not None and b is not None:
            at, bt = array(a.transpose(1, 2)), array(b.transpose(1, 2))
        out, z = new(rows, width), new(rows, at.shape[2])

        def work(first: int, last: int) -> None:
            scratch = new(last - first if len(order) else 0, depth)
            layers.grouped_linear(source, order, groups.choices, w, groups.ends, at, bt, np.float32(scale), out, z,
                                  scratch, first, last, False)  # fmt: skip

        over_rows(rows, work, functions.ROWS * (2 if len(groups.ends) > 1 else 1))
        ctx.save_for_backward(x, weight, a, b, torch.from_numpy(z))
        ctx.scale, ctx.groups = scale, groups
        return torch.from_numpy(out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, z = ctx.saved_tensors
        groups: Groups = ctx.groups
        to_x, to_weight, *_ = ctx.needs_input_grad
        offsets, rows = groups.offsets, groups.rows(x) if to_weight or a is not None else x
        dweight = da = db = dz = dx = None
        if to_weight:
            dweight = grouped_outer(dy, rows, offsets, len(weight))
        if a is not None:
            dz = grouped_product(dy, b, offsets) * ctx.scale
            da, db = grouped_outer(dz, rows, offsets, len(a)), grouped_outer(dy, z, offsets, len(b))
        if to_x:
            dx = grouped_product(dy, weight, offsets)
            dx = dx if dz is None else dx.add_(grouped_product(dz, a, offsets))
            dx = _gathered(dx, groups, len(x)) if len(groups.picks) else dx
        return dx, dweight, da, db, None, None


def _gathered(drows: Tensor, groups: Groups, inputs: int) -> Tensor:
    """The sum over the rows that were made from each input."""
    given, dx, K = array(drows), new(inputs, drows.shape[1]), groups.choices
    over_rows(inputs, lambda a, b: gradients.gather_rows(given, groups.place[a * K : b * K], K, dx[a:b]))
    return torch.from_numpy(dx)
