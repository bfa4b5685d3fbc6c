"""Routes of sampled tokens, for rollout routing replay (R3): held against the model's experts as they arrive."""

import numpy as np
from numpy.typing import NDArray

from beamline.errors import BeamlineError
from beamline.kernels.experts import first_fault
from beamline.model.beam import BeamShape
from beamline.records import Key

_MEND = (
    "policy.r3=true replays what the sampler recorded, the experts of every token but the last in every MoE layer of "
    "model.path: repair the engine, or let the learner choose for itself with policy.r3=false"
)


class RouteError(BeamlineError, ValueError):
    """Routes that cannot be replayed."""


def route_dtype(shape: BeamShape) -> np.dtype[np.unsignedinteger]:
    """The type of experts' numbers in routes."""
    return np.dtype(np.uint8 if shape.num_experts <= 256 else np.uint16)


def check_routes(key: Key, routes: NDArray[np.unsignedinteger] | None, tokens: int, shape: BeamShape) -> None:
    """Make sure that a model can have chosen the routes ``[tokens - 1, L, K]`` of a sequence of ``tokens`` tokens.

    Raises:
        RouteError: there are none, or all are 0; their shape or type is another one; an expert does not exist, or was
            chosen twice by a token in a layer.
    """
    fault = _fault(routes, tokens, shape)
    if fault is not None:
        raise RouteError(f"{key} {fault}. {_MEND}")


def _fault(routes: NDArray[np.unsignedinteger] | None, tokens: int, shape: BeamShape) -> str | None:
    """What is wrong with routes."""
    if routes is None:
        return "came without routes"
    layers, experts, dtype = shape.moe_layers, shape.num_experts, route_dtype(shape)
    wanted = tokens - 1, len(layers), shape.num_experts_per_tok
    if routes.shape != wanted:
        return f"has routes of shape {routes.shape}, not {wanted} (tokens, MoE layers, experts)"
    if routes.dtype != dtype:
        return f"has routes of type {routes.dtype}, not {dtype} as for {experts} experts"
    if shape.num_experts_per_tok > 1 and not routes.any():  # of one expert a token it may be true
        return "has routes that are all 0: the engine recorded nothing"
    token, layer, choice = first_fault(routes, experts)
    if token < 0:
        return None
    expert = routes[token, layer, choice]
    which = f"expert {expert} twice" if expert < experts else f"expert {expert}, where 0 to {experts - 1} exist,"
    return (
        f"has routes that send token {token} to {which} in MoE layer {layer}, which is layer {layers[layer]} of the "
        "model (both counted from 0)"
    )
