"""When numbers stop being numbers: an error that says where the run stands and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from beamline.errors import BeamlineError
from beamline.runtime.session import Run


class DivergedError(BeamlineError, RuntimeError):
    """A loss, a gradient or the weights were not finite."""


@contextmanager
def explained_divergence(run: Run) -> Iterator[None]:
    """Turn a number that is not finite into an error that says where the run stands and what to do."""
    try:
        yield
    except FloatingPointError as error:
        raise DivergedError(
            f"after step {run.step}: {error}; the newest checkpoint is {run.store.latest()}. "
            "Look at the last rollouts and at policy/grad_norm, and lower learner.optimizer.lr"
        ) from error
