"""Low-rank adapters of a Beam in torch: parameters stacked as engines use them, views under the names of linears."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from beamline.config.policy import LoraConfig
from beamline.model.beam import BeamShape, ModelError
from beamline.model.lora import LoraShape, Site, sites
from beamline.policy.dropout import Dropout
from beamline.policy.grouped import grouped_linear
from beamline.records.random import stream

Init = Literal["kaiming", "gaussian"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the linears of a site add: ``scale * B A x``, with a set of matrices for each expert or one set.

    ``a`` is ``[sets, rank, in]`` and ``b`` ``[sets, out, rank]``, where out stacks the projections. ``dropout`` says
    which parts of x are left out; None = none.
    """

    site: Site
    a: Tensor
    b: Tensor
    scale: float
    dropout: Dropout | None = None

    def added(self, rows: Tensor, ends: Tensor | None = None, order: Tensor | None = None, choices: int = 1) -> Tensor:
        """What is added for inputs ``[R, in]``: ``[R, out]``, in their type, by operations of torch.

        Of experts, ``ends`` says where the rows of each one end (int32), and row p is choice ``order[p]`` of all
        tokens' choices, ``token * choices + choice``.
        """
        if self.dropout is not None:
            factors = self.dropout.factors(self.site.name, rows.shape[1], choices).to(rows)
            rows = rows * (factors if order is None else factors[order])
        a, b = (matrices.to(rows.dtype) for matrices in (self.a, self.b))
        return grouped_linear(grouped_linear(rows, a, ends) * self.scale, b, ends)


class Adapters(nn.Module):
    """The adapters of a model: float32, trained while the model is not.

    The random numbers of each A depend on the seed and its name alone. B is 0, so that the model begins as it was.

    Raises:
        ModelError: adapters are asked for where the model has no linear layer.
    """

    def __init__(self, shape: BeamShape, lora: LoraShape, init: Init, seed: int) -> None:
        super().__init__()
        self.lora, self.sites = lora, sites(shape, lora)
        self.a = nn.ParameterList([_initial(site, lora.rank, init, seed) for site in self.sites])
        self.b = nn.ParameterList([torch.zeros(site.sets, site.rows, lora.rank) for site in self.sites])
        self._index = {f"{site.place}.{p}": index for index, site in enumerate(self.sites) for p in site.projections}
        for site, b in zip(self.sites, self.b, strict=True):
            if site.adapted != site.projections:
                b.register_hook(lambda gradient, site=site: _of_adapted(site, gradient))

    def at(self, place: str, projection: str, dropout: Dropout | None = None) -> Adapter | None:
        """The adapter of the linears that read the input of this one; None if there is none."""
        index = self._index.get(f"{place}.{projection}")
        if index is None:
            return None
        return Adapter(self.sites[index], self.a[index], self.b[index], self.lora.scale, dropout)

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of a tensor shaped like the parameter ``name``, under the names of :func:`adapter_tensors`."""
        kind, _, index = name.partition(".")
        site = self.sites[int(index)]
        for at, place in site.adapters():
            matrix = tensor[at]
            if kind == "a":
                yield f"{place}.{site.adapted[0]}.lora_A.weight", matrix
            else:
                for projection, rows in site.spans():
                    yield f"{place}.{projection}.lora_B.weight", matrix[rows]

    def merge_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Add ``scale * B A`` to the weights of a model, given as views under their checkpoint names.

        Raises:
            ModelError: a sum is not finite.
        """
        for name, delta in self.deltas():
            merged = tensors[name].float() + delta
            if not bool(torch.isfinite(merged).all()):
                raise ModelError(f"{name} would hold values that are not finite: the adapter's are too large to merge")
            tensors[name].copy_(merged)

    def deltas(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each adapted weight, and what its adapter adds to it."""
        for name, index, at, rows in self._weights():
            yield name, self.lora.scale * (self.b[index][at, rows].detach() @ self.a[index][at].detach())

    def check_bound(self, tensors: Mapping[str, Tensor]) -> int:
        """How many weights of a model the adapters act on.

        Raises:
            ModelError: a weight that is to be adapted is not there, or has another shape.
        """
        wanted = [(name, (rows.stop - rows.start, self.sites[i].inputs)) for name, i, _, rows in self._weights()]
        unmatched = [name for name, size in wanted if name not in tensors or tuple(tensors[name].shape) != size]
        if unmatched:
            raise ModelError(
                f"{len(unmatched)} of {len(wanted)} adapters match no weight of the model: {', '.join(unmatched[:5])}"
            )
        return len(wanted)

    def _weights(self) -> Iterator[tuple[str, int, int, slice]]:
        """Each adapted weight: its name, the index of its site, its set of matrices there, and its rows of B."""
        for index, site in enumerate(self.sites):
            for place, at, _ in site.served():
                yield from ((f"{place}.{projection}.weight", index, at, rows) for projection, rows in site.spans())

    def check_gradients(self) -> None:
        """Raise unless the last backward pass reached every adapter.

        Raises:
            RuntimeError: the learner did not use some of them, so that they would never be trained.
        """
        pairs = zip(self.sites, self.a, self.b, strict=True)
        unused = [site.name for site, a, b in pairs if a.grad is None or b.grad is None]
        if unused:
            raise RuntimeError(
                f"{len(unused)} of {len(self.sites)} adapters received no gradient: {', '.join(unused[:5])}"
            )


def lora_shape(config: LoraConfig) -> LoraShape | None:
    """The adapters that a configuration asks for; None without any."""
    if config.rank == 0:
        return None
    targets = None if config.targets == "all-linear" else tuple(config.targets)
    alpha = float(config.rank) if config.alpha is None else config.alpha
    return LoraShape(config.rank, alpha, targets, config.experts)


def _initial(site: Site, rank: int, init: Init, seed: int) -> Tensor:
    generator = np.random.Generator(stream(seed, "lora", site.name))
    size = site.sets, rank, site.inputs
    if init == "gaussian":
        drawn = generator.standard_normal(size, np.float32) / rank
    else:  # PEFT's, kaiming_uniform with a = sqrt(5)
        drawn = (2 * generator.random(size, np.float32) - 1) * site.inputs**-0.5
    return torch.from_numpy(drawn.astype(np.float32))


def _of_adapted(site: Site, gradient: Tensor) -> Tensor:
    """Without the rows of projections that share an input with adapted ones, and are not adapted themselves."""
    kept = torch.zeros_like(gradient)
    for _, rows in site.spans():
        kept[:, rows] = gradient[:, rows]
    return kept
