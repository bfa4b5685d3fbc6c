"""Which of the samples a step learns from: the settings are ``algorithm.sampling``.

What is drawn is a function of the seed, the step, the configuration and how many problems the run drew before; never of
time, nor of what finishes first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from beamline.config.algorithm import DynamicSampling, OverSampling, PlainSampling, ReplaceSampling, Sampling
from beamline.config.rollout import RolloutConfig
from beamline.records import Group, Problem, SamplingParams
from beamline.records.random import stream
from beamline.rollout.collect import Cutoff, Job, Sampled

Take = Callable[[int, int], Sequence[Problem]]
"""``take(start, count)``: problems ``start:start + count`` of those that the run draws from this step on."""
SampleRound = Callable[[Job], Sampled]
"""Draws the samples of a job and has them graded."""
Signal = Callable[[Group], bool]
"""Whether something can be learned from a group."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step has drawn.

    ``sampled`` are all groups that were judged, in the order of their problems, of which the step took ``problems``.
    ``chosen`` are the places in it of those that are learned from, of which one may be there more than once: as many as
    the step wants, or fewer. ``note`` says why a step is not full. The other fields are those of :attr:`metrics`.
    """

    sampled: list[Group]
    chosen: list[int]
    problems: int
    groups_without_signal: int
    rounds: int = 1
    groups_left_out: int = 0
    groups_missing: int = 0
    tokens_unjudged: int = 0
    note: str | None = None

    @property
    def groups(self) -> list[Group]:
        """The groups that are learned from."""
        return [self.sampled[place] for place in self.chosen]

    def changed(self, change: Callable[[list[Group]], list[Group]]) -> "Drawn":
        """The same with each group that is learned from changed, once however often it is there."""
        places = sorted(set(self.chosen))
        new = dict(zip(places, change([self.sampled[place] for place in places]), strict=True))
        return replace(self, sampled=[new.get(place, group) for place, group in enumerate(self.sampled)])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the strategy, defined in ``docs/metrics.md``."""
        return {
            "train/groups_without_signal": self.groups_without_signal,
            "train/sampling_rounds": self.rounds,
            "train/groups_left_out": self.groups_left_out,
            "train/groups_missing": self.groups_missing,
            "train/tokens_unjudged": self.tokens_unjudged,
        }


def draw(
    strategy: Sampling, seed: int, job: Job, wanted: int, take: Take, sample_round: SampleRound, has_signal: Signal
) -> Drawn:
    """Draw what a step learns from: ``wanted`` groups, if the strategy finds as many.

    ``job`` is the step's without its problems, which come from ``take``. It is sampled in one round or more, each an
    ``attempt`` of its own, so that a problem which comes twice has other keys and other responses.
    """
    match strategy:
        case PlainSampling():
            groups = sample_round(replace(job, problems=take(0, wanted))).groups
            return _everything(groups, wanted, has_signal)
        case DynamicSampling():
            return _dynamic(strategy, job, wanted, take, sample_round, has_signal)
        case ReplaceSampling():
            groups = sample_round(replace(job, problems=take(0, wanted))).groups
            return _replaced(strategy, seed, job.step, groups, [has_signal(group) for group in groups])
        case OverSampling():
            return _oversampled(strategy, job, wanted, take, sample_round, has_signal)


def _everything(groups: list[Group], problems: int, has_signal: Signal) -> Drawn:
    return Drawn(groups, list(range(len(groups))), problems, sum(not has_signal(group) for group in groups))


def _dynamic(
    strategy: DynamicSampling, job: Job, wanted: int, take: Take, sample_round: SampleRound, has_signal: Signal
) -> Drawn:
    """Further rounds until enough groups have a signal. Source: DAPO, arXiv 2503.14476, section 3.2."""
    sampled: list[Group] = []
    found: list[int] = []
    problems = rounds = 0
    while len(found) < wanted and rounds < strategy.rounds:
        count = _next_round(wanted, len(found), problems)
        sampled += sample_round(replace(job, problems=take(problems, count), attempt=rounds)).groups
        found += [place for place in range(problems, len(sampled)) if has_signal(sampled[place])]
        problems += count
        rounds += 1
    chosen = found[:wanted]
    missing = wanted - len(chosen)
    note = (
        f"step {job.step}: algorithm.sampling.rounds={strategy.rounds} is reached after {problems} problems, and "
        f"{len(chosen)} of {wanted} groups have a signal; the step learns from those"
    )
    return Drawn(
        sampled,
        chosen,
        problems,
        len(sampled) - len(found),
        rounds,
        groups_left_out=len(sampled) - len(chosen),
        groups_missing=missing,
        note=note if missing else None,
    )


def _next_round(wanted: int, found: int, problems: int) -> int:
    """Problems of the next round: what is missing, over the share of groups so far that had a signal, rounded up.

    It is at most ``wanted``, so that no round needs more memory than the first.
    """
    return min(wanted, -(-(wanted - found) * problems // found)) if found else wanted


def _replaced(strategy: ReplaceSampling, seed: int, step: int, groups: list[Group], signals: Sequence[bool]) -> Drawn:
    """Copies of groups with a signal in place of those without: each is copied as often as any other, or once more."""
    found = [place for place, signal in enumerate(signals) if signal]
    without = len(groups) - len(found)
    if len(found) / len(groups) < strategy.min_share:
        note = (
            f"step {step}: {len(found)} of {len(groups)} groups have a signal, too few to replace the others by "
            f"(algorithm.sampling.min_share={strategy.min_share:g})"
        )
        return Drawn(groups, list(range(len(groups))), len(groups), without, groups_missing=without, note=note)
    order = np.argsort(stream(seed, "replace", step).random_raw(len(found)), kind="stable")
    copies = iter(found[order[i % len(found)]] for i in range(without))
    chosen = [place if signal else next(copies) for place, signal in enumerate(signals)]
    return Drawn(groups, chosen, len(groups), without, groups_left_out=without)


def _oversampled(
    strategy: OverSampling, job: Job, wanted: int, take: Take, sample_round: SampleRound, has_signal: Signal
) -> Drawn:
    """More problems than are wanted; the job's cutoff leaves out those whose responses are long."""
    count = strategy.problems(wanted)
    cutoff = Cutoff(strategy.cutoff_tokens, groups=wanted)
    made = sample_round(replace(job, problems=take(0, count), cutoff=cutoff))
    drawn = _everything(made.groups, count, has_signal)
    return replace(drawn, groups_left_out=made.groups_left_out, tokens_unjudged=made.tokens_left_out)


def training_params(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> SamplingParams:
    """How training draws a response that ends with one of the stop tokens."""
    return SamplingParams(
        rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        min_tokens=rollout.min_tokens,
        stop_ids=stop_ids,
        record_support=rollout.record_support,
    )
