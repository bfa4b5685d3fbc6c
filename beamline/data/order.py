"""Which problems a step trains on: a function of the seed and the step alone, so that a resumed run goes on exactly."""

import numpy as np
from numpy.typing import NDArray

from beamline.records.random import stream


def problem_indices(seed: int, step: int, per_step: int, problems: int) -> NDArray[np.int64]:
    """Indices ``[per_step]`` of the problems of a step (steps count from 1).

    The training set is passed through in a new random order every epoch; a step that crosses the border takes the
    rest of one epoch and the beginning of the next, so nothing is skipped. A problem can appear twice in a step only
    when the step is larger than what is left of an epoch.
    """
    first = (step - 1) * per_step
    places = np.arange(first, first + per_step)
    epochs = {int(epoch): _permutation(seed, int(epoch), problems) for epoch in np.unique(places // problems)}
    return np.array([epochs[int(place // problems)][place % problems] for place in places])


def _permutation(seed: int, epoch: int, problems: int) -> NDArray[np.int64]:
    """A shuffle made of raw 64-bit draws, which numpy keeps the same in every release."""
    return np.argsort(stream(seed, "epoch", epoch).random_raw(problems), kind="stable")
