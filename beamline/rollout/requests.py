"""What every sampler does with requests: refuse those that it could not finish, give back those that it never began."""

from collections.abc import Collection, Sequence

import numpy as np

from beamline.records import Completion, Key, Request, Support


def check_requests(requests: Sequence[Request], in_flight: Collection[Key], positions: int, vocab_size: int) -> None:
    """Make sure that a sampler with room for ``positions`` tokens a sequence can do what it is asked for.

    Raises:
        ValueError: a key is in flight already or occurs twice, a prefix is empty or too long, or a token id is unknown.
    """
    new = set[Key]()
    for request in requests:
        _check(request, positions, vocab_size)
        if request.key in in_flight or request.key in new:
            raise ValueError(f"submit: {request.key} is in flight already")
        new.add(request.key)


def _check(request: Request, positions: int, vocab_size: int) -> None:
    ids, total = request.prefix_ids, len(request.prefix_ids) + request.params.max_tokens
    if not len(ids):
        raise ValueError(f"submit: {request.key} has an empty prefix")
    if total > positions:
        raise ValueError(
            f"submit: {request.key} may grow to {total} tokens ({len(ids)} given + {request.params.max_tokens} "
            f"new), but the sampler has room for {positions}"
        )
    stops = len(set(request.params.stop_ids))
    if request.params.min_tokens and stops >= vocab_size:
        raise ValueError(f"submit: {request.key} has min_tokens, and all {stops} tokens are stop tokens")
    named = np.concatenate([ids, np.array(request.params.stop_ids, dtype=np.int64)])
    unknown = named[(named < 0) | (named >= vocab_size)]
    if len(unknown):
        raise ValueError(f"submit: {request.key} has token {unknown[0]}; the vocabulary has {vocab_size}")


def unbegun(request: Request) -> Completion:
    """What there is of a request that was aborted before it began: nothing."""
    empty = request.prefix_ids[:0]
    support = Support.unrestricted(0) if request.params.record_support else None
    return Completion(request.key, empty, empty.astype("float32"), empty, None, "abort", support)
