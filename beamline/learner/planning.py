"""Cutting a mini-batch into micro-batches, and what stays in its loss."""

from collections.abc import Sequence

from beamline.algorithms.loss import LossConfig
from beamline.records import Experience


def kept(batch: Sequence[Experience], loss: LossConfig) -> list[Experience]:
    """The sequences that the update learns from: trained, with a response, and not masked."""
    trained = [e for e in batch if e.trained and e.rollout.response_tokens]
    return [e for e in trained if e.rollout.finish == "stop" or not loss.mask_truncated]


def contributing(batch: Sequence[Experience], loss: LossConfig) -> list[Experience]:
    """Those of the kept sequences that have a gradient: with an advantage of exactly 0 the whole loss is 0.

    A group without signal is such a case. Leaving it out changes no update and saves its forward and backward pass;
    its tokens stay in the denominator.
    """
    return [e for e in kept(batch, loss) if e.advantage != 0]


def denominator(batch: Sequence[Experience], loss: LossConfig) -> int:
    """What the summed token losses are divided by (``token_mean``): response tokens of the whole mini-batch."""
    counted = kept(batch, loss) if loss.renormalize_after_mask else [e for e in batch if e.trained]
    return sum(e.rollout.response_tokens for e in counted)


def micro_batches(batch: Sequence[Experience], max_rows: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: first-fit decreasing under a budget of rows.

    A sequence longer than the budget is a micro-batch of its own. Equal input gives equal cuts.
    """
    order = sorted(range(len(batch)), key=lambda i: -batch[i].rows)
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        rows = batch[i].rows
        place = next((b for b, free in enumerate(room) if free >= rows), None)
        if place is None:
            bins.append([i])
            room.append(max_rows - rows)
        else:
            bins[place].append(i)
            room[place] -= rows
    return bins
