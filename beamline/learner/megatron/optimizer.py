"""AdamW over a stage's parameters: float32 weights and moments, each data rank for the part that it owns."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import all_reduce, get_world_size

from beamline.config.schema import OptimizerConfig
from beamline.learner.megatron.flat import ALIGNED, Flat
from beamline.learner.megatron.model import Stage
from beamline.model.layout import TensorSlice
from beamline.policy.fused import fused

MOMENTS = ("exp_avg", "exp_avg_sq")

_CHUNK = 1 << 26  # elements that are updated at a time, which bounds the memory in between


@dataclass(frozen=True, slots=True)
class _Part:
    """Parameters of one kind, with the float32 weights and moments of what this rank owns of them."""

    flat: Flat
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class State(NamedTuple):
    """A box of a checkpoint's tensor that this rank owns: its float32 weights and moments, as views of its shape."""

    part: TensorSlice
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Optimizer:
    """Updates a stage. Matrices are decayed, vectors are not. ``updates`` counts those that were made."""

    def __init__(self, stage: Stage, config: OptimizerConfig) -> None:
        self._config, self.updates = config, 0
        self._tensor = parallel_state.get_tensor_model_parallel_group()
        self._parts = [_part(flat) for flat in stage.flats]

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return self._config.lr_after(self.updates)

    def step(self) -> float:
        """Add up gradients over ranks, clip, update; gives the norm of the whole gradient before it was clipped.

        Raises:
            FloatingPointError: the norm is not finite, on every rank alike; nothing was updated.
        """
        for part in self._parts:
            if part.flat.kind.shared and self._tensor.size() > 1:
                all_reduce(part.flat.gradients, group=self._tensor)
            part.flat.sum_gradients()
        norm = self._norm()
        if not norm < math.inf:
            self.zero()
            raise FloatingPointError(f"the gradient norm is {norm}; the update was not made")
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        for part in self._parts:
            self._update(part, scale)
        self.updates += 1
        self.zero()
        self.share()
        return norm

    def zero(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.flat.gradients.zero_()

    def share(self) -> None:
        """Round the float32 weights to those that are computed with, on all ranks."""
        for part in self._parts:
            part.flat.own_weights.copy_(part.master)
            part.flat.share_weights()

    def states(self, alone: bool = False) -> Iterator[State]:
        """What this rank updates; ``alone``: without what another tensor rank updates alike and is to be saved by."""
        for part in self._parts:
            if alone and part.flat.kind.shared and self._tensor.rank() != 0:
                continue
            for box, start, stop in part.flat.owned():
                yield State(box, *(x[start:stop].view(box.size) for x in (part.master, part.exp_avg, part.exp_avg_sq)))

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """All that is large: weights and state, and gradients, which are not wanted between two updates."""
        kept = [x for part in self._parts for x in (part.flat.weights, part.master, part.exp_avg, part.exp_avg_sq)]
        return kept, [part.flat.gradients for part in self._parts]

    def _norm(self) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._parts[0].master.device)
        for part in self._parts:
            if not (part.flat.kind.shared and self._tensor.rank() != 0):  # the first tensor rank counts for all
                for chunk in _chunks(part.flat.own_gradients):
                    squares += _squares(chunk)
        if get_world_size() > 1:
            all_reduce(squares)
        return math.sqrt(float(squares))

    def _update(self, part: _Part, scale: float) -> None:
        """``m' = b1 m + (1 - b1) g``, ``v' = b2 v + (1 - b2) g^2``, ``w' = (1 - r d) w - r m^ / (sqrt(v^) + eps)``.

        Loshchilov and Hutter, Decoupled weight decay regularization, 2019; as torch's AdamW has it.
        """
        lr, (first, second), count = self.lr, self._config.betas, self.updates + 1
        decay = lr * self._config.weight_decay if part.flat.kind.decayed else 0.0
        bias = math.sqrt(1 - second**count)
        by = scale, 1 - decay, 1 - first, 1 - second, bias, self._config.eps, -lr / (1 - first**count)
        factors = torch.tensor(by, device=part.master.device)
        tensors = part.flat.own_gradients, part.master, part.exp_avg, part.exp_avg_sq
        for g, w, m, v in zip(*(_chunks(x) for x in tensors), strict=True):
            _adamw(g, w, m, v, factors)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    """Parts of it, as rows."""
    parts: tuple[Tensor, ...] = flat.view(-1, ALIGNED).split(_CHUNK // ALIGNED)
    return parts


@fused()
def _squares(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64)


@fused("factors")
def _adamw(gradient: Tensor, master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, factors: Tensor) -> None:
    scale, kept, first, second, bias, eps, rate = factors.unbind()
    g = gradient * scale
    exp_avg.add_((g - exp_avg) * first)
    exp_avg_sq.add_((g * g - exp_avg_sq) * second)
    master.mul_(kept).add_(exp_avg / (exp_avg_sq.sqrt() / bias + eps) * rate)


def _part(flat: Flat) -> _Part:
    flat.train()
    moments = (torch.zeros_like(flat.own_weights, dtype=torch.float32) for _ in range(2))
    return _Part(flat, flat.own_weights.to(torch.float32, copy=True), *moments)
