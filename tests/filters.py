"""The distribution that a token is drawn from, written out as a loop in double precision."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sampled_from(
    logits: NDArray[np.floating[Any]], temperature: float, top_p: float, top_k: int, min_p: float
) -> NDArray[np.float64]:
    """Probabilities ``[V]`` after temperature, min-p, top-k and top-p, in this order, renormalized at each.

    Of equally likely tokens the one with the lower id comes first. The most likely token always stays.
    """
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [token for token in order if probs[token] >= min_p * probs[order[0]]]
    if top_k:
        kept = kept[:top_k]
    total = sum(probs[token] for token in kept)
    nucleus: list[int] = []
    mass = 0.0
    for token in kept:
        if top_p < 1 and nucleus and mass >= top_p:
            break
        nucleus.append(token)
        mass += probs[token] / total
    result = np.zeros(len(probs))
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result
