"""What a sampler is: requests in, completions out, weights exchanged while it lives."""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from beamline.model.layout import Layout, WeightKind
from beamline.records import Completion, Key, Request
from beamline.transfer.plan import TransferPlan


class Sampler(Protocol):
    """An engine that continues token sequences with the policy.

    A request's random numbers depend on its key and the seed, never on what else is in flight; what the model computes
    for it may differ by rounding with the batch that it is in. ``tests/contract/test_sampler*.py`` define it in code.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests.

        Raises:
            ValueError: a key is in flight already, a prefix is empty or too long, or a token id is unknown.
            RuntimeError: the engine sleeps.
        """

    def poll(self, timeout: float) -> list[Completion]:
        """Completions that finished since the last call; waits up to ``timeout`` seconds for the first one."""

    def abort(self, keys: Collection[Key]) -> list[Completion]:
        """Stop requests at once and return what they have so far, with ``finish="abort"``.

        A partial goes on when its tokens are appended to its prefix and submitted again.

        Raises:
            KeyError: a key is not in flight.
        """

    def layout(self, kind: WeightKind) -> Layout:
        """Which rank of the engine holds which slice."""

    def receive(self, plan: TransferPlan, version: int, unfinished: Literal["keep", "abort"]) -> None:
        """Take new weights in place, and stamp every token drawn from now on with ``version``.

        Requests in flight go on from their cache (``keep``) or end with ``finish="abort"`` at the next poll.
        """

    def sleep(self, level: int) -> None:
        """Give memory back: 1 = the cache, 2 = the weights too (they must be received again).

        Raises:
            RuntimeError: requests are in flight.
        """

    def wake(self, what: Collection[Literal["weights", "cache"]]) -> None:
        """Take memory again, in parts, so that weights can arrive before the cache is allocated."""

    def statistics(self) -> dict[str, float]:
        """What befell the engine since its start, by the names of metrics; an engine that cannot fail has none."""

    def close(self) -> None:
        """End whatever works for the sampler; it is not used any more."""
