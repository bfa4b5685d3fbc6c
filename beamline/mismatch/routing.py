"""What the choice of experts does to log-probabilities, and how much of it replay removes."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from beamline.config.schema import RunConfig
from beamline.mismatch.evaluator import Evaluator
from beamline.mismatch.frozen import Floats
from beamline.mismatch.setup import learner_setup, sampler_setup
from beamline.records.random import stream
from beamline.report.mismatch import LayerRoutes, Routing

_RESAMPLES = 2000


def routing(config: RunConfig, evaluate: Evaluator) -> Routing | None:
    """What is said of routes; None for a model without experts."""
    if not evaluate.shape.moe_layers:
        return None
    own, recorded = (np.concatenate(evaluate.routes(of)) for of in ("own", "recorded"))
    differs_NL = (np.sort(own, axis=2) != np.sort(recorded, axis=2)).any(axis=2)
    learner = replace(learner_setup(config), engine="sampler", packed=False)
    of_learner = {of: evaluate(replace(learner, routes=of)) for of in ("own", "recorded")}
    of_sampler = {of: evaluate(replace(sampler_setup(config), routes=of)) for of in ("own", "recorded")}
    free = np.abs(of_sampler["recorded"] - of_learner["own"])
    replayed = np.abs(of_sampler["recorded"] - of_learner["recorded"])
    forced = np.abs(of_sampler["own"] - of_learner["own"])
    removed, low, high = removed_by_replay(free, replayed, forced, evaluate.tokens_B)
    shares = zip(evaluate.shape.moe_layers, differs_NL.mean(axis=0), strict=True)
    return Routing(
        rows=len(differs_NL),
        layers=tuple(LayerRoutes(layer, float(share)) for layer, share in shares),
        any_layer=float(differs_NL.any(axis=1).mean()),
        free=float(free.mean()),
        replayed=float(replayed.mean()),
        forced=float(forced.mean()),
        removed=removed,
        removed_low=low,
        removed_high=high,
    )


def removed_by_replay(
    free: Floats, replayed: Floats, forced: Floats, tokens_B: NDArray[np.int64]
) -> tuple[float, float, float] | tuple[None, None, None]:
    """``(free - replayed) / (free - forced)`` of absolute differences ``[T]`` of tokens, and its 95 % interval.

    Replayed and forced differences both have equal routes, once the sampler's and once the learner's: they differ by
    chance, so that the ratio can be a little above 1. Sequences (of ``tokens_B`` tokens) are drawn with replacement.
    There is no ratio where in more than 2.5 % of the draws free is not above forced.
    """
    starts = np.cumsum(tokens_B) - tokens_B
    sums_3B = np.stack([np.add.reduceat(values, starts) for values in (free, replayed, forced)])
    draws, B = stream(0, "mismatch", len(tokens_B)), len(tokens_B)
    drawn_3R = np.stack(
        [sums_3B[:, (draws.random_raw(B) % np.uint64(B)).astype(np.intp)].sum(axis=1) for _ in range(_RESAMPLES)],
        axis=1,
    )
    gained, caused = drawn_3R[0] - drawn_3R[1], drawn_3R[0] - drawn_3R[2]
    if np.quantile(caused, 0.025) <= 0:
        return None, None, None
    low, high = np.quantile(gained[caused > 0] / caused[caused > 0], [0.025, 0.975])
    return float((free - replayed).sum() / (free - forced).sum()), float(low), float(high)
