"""What an update learns from, decided before it: masks, weights, selections, and the cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from beamline.algorithms.aggregation import token_weights
from beamline.algorithms.correction import correct
from beamline.algorithms.diagnostics import Compared
from beamline.algorithms.loss import LossConfig
from beamline.algorithms.losses import BatchTokens, select, selects
from beamline.records import Experience
from beamline.records.random import uniforms

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Planned:
    """A sequence that an update learns from, and what was decided of its R response tokens.

    ``weight`` is that of each of its tokens in the loss, ``correction_R`` that of the policy loss beside it. Tokens
    outside of ``keep_R`` are in no loss. ``old_logprobs_R`` is None where pi_old is pi; ``reference_logprobs_R`` and
    ``selected_R`` are None where the loss has no use for them.
    """

    experience: Experience
    weight: float
    keep_R: NDArray[np.bool_]
    correction_R: NDArray[np.float64]
    old_logprobs_R: Floats | None
    reference_logprobs_R: Floats | None
    selected_R: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences of an update, and what the decisions were made from.

    ``counted_tokens`` are the response tokens of all graded sequences, ``kept_tokens`` those that no mask left out:
    the two denominators that a loss can have.
    """

    sequences: tuple[Planned, ...]
    compared: Compared | None
    counted_tokens: int
    kept_tokens: int


def kept(batch: Sequence[Experience], loss: LossConfig) -> list[int]:
    """Indices of the sequences that no mask leaves out before anything is computed: graded, with a response."""
    masked = loss.algorithm.mask_truncated
    return [
        i
        for i, e in enumerate(batch)
        if e.trained and e.rollout.response_tokens and (e.rollout.finish == "stop" or not masked)
    ]


def evaluated(batch: Sequence[Experience], loss: LossConfig) -> list[int]:
    """Indices of the sequences that the learner has to evaluate.

    With an advantage of exactly 0 (a group without signal) the policy loss is 0, and a sequence costs nothing: its
    tokens stay in the denominator. Only a KL loss, or a denominator without what a correction masks, need it.
    """
    algorithm = loss.algorithm
    all_needed = algorithm.kl.place == "loss" or (algorithm.renormalize_after_mask and algorithm.correction.masks)
    return [i for i in kept(batch, loss) if all_needed or batch[i].advantage != 0]


def needs_old(loss: LossConfig) -> bool:
    """Whether the log-probabilities before the update have to be computed."""
    algorithm = loss.algorithm
    off_policy = not loss.on_policy and algorithm.loss.anchor == "learner"
    return off_policy or algorithm.correction.active or selects(algorithm.loss)


def plan(
    batch: Sequence[Experience],
    indices: Sequence[int],
    old: Sequence[Floats] | None,
    reference: Sequence[Floats] | None,
    loss: LossConfig,
) -> Plan:
    """Decide what is learned from the sequences at ``indices`` (those of :func:`evaluated`).

    ``old`` and ``reference`` have the log-probabilities of each one's response tokens, or are None where they are not
    needed.

    Raises:
        ValueError: a log-probability that a correction or the loss compares with is missing or not finite.
    """
    sequences = [batch[i] for i in indices]
    sampler = [sequence.rollout.response_logprobs for sequence in sequences]
    _check_anchor(sequences, sampler, loss)
    compared = _compare(sampler, old, loss)
    keep, corrections = _decisions(sampler, compared)
    counted_B, kept_B = _counts(batch, loss, dict(zip(indices, map(np.count_nonzero, keep), strict=True)))
    weight_B = token_weights(
        loss.algorithm.aggregation,
        kept_B if loss.algorithm.renormalize_after_mask else counted_B,
        np.array([experience.group for experience in batch], dtype=np.int64),
        loss.response_limit,
    )
    selected = _selections(sequences, keep, old, loss)
    planned = [
        Planned(
            experience=sequence,
            weight=float(weight_B[indices[b]]),
            keep_R=keep[b],
            correction_R=corrections[b],
            old_logprobs_R=None if old is None else old[b],
            reference_logprobs_R=None if reference is None else reference[b],
            selected_R=None if selected is None else selected[b],
        )
        for b, sequence in enumerate(sequences)
    ]
    silent = loss.algorithm.kl.place != "loss"
    learned = [p for p in planned if p.keep_R.any() and not (silent and p.experience.advantage == 0)]
    return Plan(tuple(learned), compared, int(counted_B.sum()), int(kept_B.sum()))


def _compare(sampler: Sequence[Floats], old: Sequence[Floats] | None, loss: LossConfig) -> Compared | None:
    """What the learner made of the sampler's tokens, and what the correction says of them."""
    if old is None or not old:
        return None
    old_T, sampler_T = np.concatenate(old), np.concatenate(sampler)
    tokens_B = np.array([len(logprobs) for logprobs in sampler], dtype=np.int64)
    if not loss.algorithm.correction.active:
        return Compared(sampler_T, old_T, tokens_B)
    made = correct(old_T.astype(np.float64), sampler_T.astype(np.float64), tokens_B, loss.algorithm.correction)
    return Compared(sampler_T, old_T, tokens_B, made.masked, made.keep_T, made.weights_T, made.capped_T)


def _decisions(
    sampler: Sequence[Floats], compared: Compared | None
) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.float64]]]:
    """For each sequence which of its tokens are kept, and what they weigh."""
    if compared is None or compared.kept is None or compared.weights is None:
        return [np.ones(len(each), dtype=bool) for each in sampler], [np.ones(len(each)) for each in sampler]
    borders = np.cumsum(compared.tokens_B)[:-1]
    return np.split(compared.kept, borders), np.split(compared.weights, borders)


def _check_anchor(sequences: Sequence[Experience], sampler: Sequence[Floats], loss: LossConfig) -> None:
    if loss.algorithm.loss.anchor != "sampler":
        return
    for experience, logprobs in zip(sequences, sampler, strict=True):
        if not np.isfinite(logprobs).all():
            raise ValueError(
                f"algorithm.loss.anchor=sampler needs the sampler's log-probability of every token, and one of "
                f"{experience.rollout.key} is {logprobs[~np.isfinite(logprobs)][0]}; use algorithm.loss.anchor=learner"
            )


def _counts(
    batch: Sequence[Experience], loss: LossConfig, judged: dict[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Response tokens of each graded sequence, and those of them that no mask left out."""
    counted = np.array([e.rollout.response_tokens if e.trained else 0 for e in batch], dtype=np.int64)
    kept_B = np.zeros_like(counted)
    for i in kept(batch, loss):
        kept_B[i] = judged.get(i, counted[i])
    return counted, kept_B


def _selections(
    sequences: Sequence[Experience], keep: Sequence[NDArray[np.bool_]], old: Sequence[Floats] | None, loss: LossConfig
) -> list[NDArray[np.bool_]] | None:
    """For a loss that chooses tokens over the whole mini-batch: which, among those that are kept and have an advantage.

    Sequences without one may be there for a KL loss alone, and must not change what is chosen.
    """
    if not selects(loss.algorithm.loss) or not sequences:
        return None
    assert old is not None
    advantages = [np.full(len(k), e.advantage) for e, k in zip(sequences, keep, strict=True)]
    draws = [_uniforms(e, len(k), loss.seed) for e, k in zip(sequences, keep, strict=True)]
    keep_T = np.concatenate(keep) & (np.concatenate(advantages) != 0)
    columns = [np.concatenate(column).astype(np.float64)[keep_T] for column in (old, advantages, draws)]
    selected_T = np.zeros(len(keep_T), dtype=bool)
    selected_T[keep_T] = select(BatchTokens(*columns), loss.algorithm.loss)
    return np.split(selected_T, np.cumsum([len(k) for k in keep])[:-1])


def _uniforms(experience: Experience, tokens: int, seed: int) -> NDArray[np.float64]:
    key = experience.rollout.key
    return uniforms(seed, ("select", key.split, key.step, key.problem, key.sample, key.attempt), 0, tokens)


def micro_batches(rows: Sequence[int], max_rows: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: first-fit decreasing under a budget of rows.

    A sequence longer than the budget is a micro-batch of its own. Equal input gives equal cuts.
    """
    order = sorted(range(len(rows)), key=lambda i: -rows[i])
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        place = next((b for b, free in enumerate(room) if free >= rows[i]), None)
        if place is None:
            bins.append([i])
            room.append(max_rows - rows[i])
        else:
            bins[place].append(i)
            room[place] -= rows[i]
    return bins
