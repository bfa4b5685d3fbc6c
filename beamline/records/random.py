"""Random streams keyed by what they are for, never by the order in which things happen."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def stream(seed: int, *purpose: str | int) -> np.random.Philox:
    """A counter-based generator (Philox 4x64) keyed by a seed and a purpose: equal keys, equal streams."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return np.random.Philox(key=int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def uniforms(seed: int, purpose: tuple[str | int, ...], start: int, stop: int) -> NDArray[np.float64]:
    """Numbers ``start:stop`` of a stream of uniforms in [0, 1), each a function of the key and its position alone."""
    raw = stream(seed, *purpose).random_raw(stop)[start:]
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53)
