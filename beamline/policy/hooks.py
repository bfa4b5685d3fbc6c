"""What a pass brings to the layers of the Hugging Face module beside their inputs: adapters, and routes to replay.

It is an argument of the pass, which the module hands on to each decoder layer. Hooks take it there and hold it while
that layer is called, no longer. A layer that is called again in the backward pass (activation checkpointing) has the
arguments of its own pass, whatever was evaluated in between.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.models.beam.modeling_beam import BeamRMSNorm

from beamline.policy.dropout import Dropout
from beamline.policy.grouped import grouped_linear
from beamline.policy.lora import Adapter, Adapters
from beamline.policy.passes import gather, mixed, norm, swiglu
from beamline.policy.router import sorted_by_expert

EXPERTS = "beamline_grouped"
"""Our implementation of experts, by its name in transformers."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Adapters and their dropout, and the experts ``[N, L, K]`` that rows go to, int64; None where there is none."""

    adapters: Adapters | None = None
    dropout: Dropout | None = None
    routes_NLK: Tensor | None = None

    def adapter(self, place: str, projection: str) -> Adapter | None:
        """The adapter of a linear layer."""
        return None if self.adapters is None else self.adapters.at(place, projection, self.dropout)


class _Norm(BeamRMSNorm):  # type: ignore[misc]
    """The same, in one pass over memory on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return norm(x.flatten(0, 1), self.weight, self.variance_epsilon).view(x.shape)


def install(module: nn.Module) -> None:
    """Let the decoder layers of a Beam module take the keyword argument ``brought``, a :class:`Brought`."""
    for each in module.modules():
        if isinstance(each, BeamRMSNorm):
            each.__class__ = _Norm
    moe_layers = 0
    for index, layer in enumerate(cast(Any, module).model.layers):
        sparse = hasattr(layer.mlp, "experts")
        _Layer(index, moe_layers if sparse else None).attach(layer)
        moe_layers += sparse


@dataclass
class _Layer:
    """The hooks of a decoder layer, the ``moe_index``-th with experts if it has any, and what they hold in a call.

    ``added`` has by site the input that adapters have read and what they add to each projection, ``used`` the names of
    the linears that were adapted.
    """

    index: int
    moe_index: int | None
    brought: Brought = field(default_factory=Brought)
    added: dict[str, tuple[Tensor, dict[str, Tensor]]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def attach(self, layer: Any) -> None:
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear):
                place, _, projection = f"model.layers.{self.index}.{name}".rpartition(".")
                part.register_forward_hook(partial(self._adapt, place, projection))
        if self.moe_index is not None:
            layer.mlp.gate.register_forward_hook(self._replay)
            layer.mlp.experts.register_forward_pre_hook(self._equip, with_kwargs=True)
        layer.register_forward_hook(self._leave, always_call=True)

    def _enter(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._take(kwargs.get("brought", Brought()))
        return args, {name: value for name, value in kwargs.items() if name != "brought"}

    def _adapt(self, place: str, projection: str, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor | None:
        adapter, x = self.brought.adapter(place, projection), inputs[0]
        if adapter is None or projection not in adapter.site.adapted:
            return None
        site = adapter.site
        read, parts = self.added.get(site.name, (None, {}))
        if read is not x:
            made = adapter.added(x.flatten(0, -2)).view(*x.shape[:-1], -1).split(site.outputs, dim=-1)
            parts = dict(zip(site.projections, made, strict=True))
            self.added[site.name] = x, parts
        self.used.add(f"{place}.{projection}")
        return output + parts[projection]

    def _replay(self, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        if self.brought.routes_NLK is None:
            return None
        logits, chosen = output[0], self.brought.routes_NLK[:, self.moe_index]
        weights = logits.sigmoid().gather(1, chosen)
        if router.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        self.used.add("replayed routes")
        return logits, weights, chosen

    def _equip(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        place = f"model.layers.{self.index}.mlp.experts"
        adapters = [self.brought.adapter(place, first) for first in ("gate_proj", "down_proj")]
        found = [adapter for adapter in adapters if adapter is not None]
        self.used |= {f"{place}.{projection}" for adapter in found for projection in adapter.site.adapted}
        return args, kwargs | {"adapters": adapters} if found else kwargs

    def _leave(self, _layer: nn.Module, _args: Any, output: Tensor | None) -> None:
        """Make sure that all was used, unless the layer was left before its end, and forget it."""
        missing = [] if output is None else sorted(set(self._wanted()) - self.used)
        self._take(Brought())
        if missing:
            raise RuntimeError(
                f"layer {self.index} was evaluated without {', '.join(missing)}: this version of transformers does not "
                "call the parts of its layers as beamline/policy/hooks.py relies on"
            )

    def _take(self, brought: Brought) -> None:
        self.brought, self.added, self.used = brought, {}, set()

    def _wanted(self) -> Iterator[str]:
        if self.brought.adapters is not None:
            for site in self.brought.adapters.sites:
                if site.layer == self.index:
                    yield from (f"{site.place}.{projection}" for projection in site.adapted)
        if self.brought.routes_NLK is not None and self.moe_index is not None:
            yield "replayed routes"


def _experts(
    experts: Any,
    x_ND: Tensor,
    chosen_NK: Tensor,
    weights_NK: Tensor,
    adapters: tuple[Adapter | None, ...] = (None, None),
) -> Tensor:
    """``sum_k weights[i, k] * expert(x[i])``, with the adapters of gate and up, and of down."""
    K, (first, second) = chosen_NK.shape[1], adapters
    order, back, ends = sorted_by_expert(chosen_NK, experts.num_experts)

    def linear(rows: Tensor, weight: Tensor, adapter: Adapter | None) -> Tensor:
        out = grouped_linear(rows, weight, ends)
        return out if adapter is None else out + adapter.added(rows, ends, order, K)

    inner = swiglu(linear(gather(x_ND, order // K, back, K), experts.gate_up_proj, first))
    return mixed(linear(inner, experts.down_proj, second), weights_NK, order, back)


ExpertsInterface.register(EXPERTS, _experts)
