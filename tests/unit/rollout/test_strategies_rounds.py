"""Which groups a step learns from, by rounds that are made up: what is asked, what is kept, what is counted."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamline.algorithms.advantages import has_signal, rewards_of
from beamline.chat import BeamChat
from beamline.config.advantages import GrpoAdvantage
from beamline.config.algorithm import DynamicSampling, OverSampling, PlainSampling, ReplaceSampling, Sampling
from beamline.records import Group, Problem, SamplingParams
from beamline.rollout.collect import Cutoff, Job, Sampled, requests
from beamline.rollout.strategies import Drawn, draw
from tests.samples import make_grade, make_group, make_problem

JOB = Job("train", 5, (), samples=2, params=SamplingParams(8))
SIGNALS = st.lists(st.booleans(), min_size=1, max_size=40)


def differs(group: Group) -> bool:
    return has_signal(rewards_of(group), GrpoAdvantage())


class Rounds:
    """A run whose n-th problem has a group with a signal where ``signals`` say so, in a circle."""

    def __init__(self, signals: Sequence[bool], distinct: int = 10**9) -> None:
        self.signals, self.distinct, self.jobs = signals, distinct, list[Job]()

    def take(self, start: int, count: int) -> list[Problem]:
        return [make_problem(str(n % self.distinct)) for n in range(start, start + count)]

    def sample(self, job: Job) -> Sampled:
        self.jobs.append(job)
        return Sampled([self.group(problem) for problem in job.problems])

    def group(self, problem: Problem) -> Group:
        signal = self.signals[int(problem.text) % len(self.signals)]
        grades = make_group(make_grade(1.0), make_grade(-1.0 if signal else 1.0))
        return replace(grades, problem=problem)

    def draw(self, strategy: Sampling, wanted: int, seed: int = 0) -> Drawn:
        return draw(strategy, seed, JOB, wanted, self.take, self.sample, differs)

    @property
    def asked(self) -> list[int]:
        return [len(job.problems) for job in self.jobs]


def names(groups: Sequence[Group]) -> list[int]:
    return [int(group.problem.text) for group in groups]


def counts(drawn: Drawn) -> tuple[float, ...]:
    """Rounds, groups left out, groups missing, tokens unjudged."""
    names = ("sampling_rounds", "groups_left_out", "groups_missing", "tokens_unjudged")
    assert set(drawn.metrics) == {f"train/{name}" for name in (*names, "groups_without_signal")}
    silent = sum(not differs(group) for group in drawn.sampled)
    assert drawn.metrics["train/groups_without_signal"] == silent
    return tuple(drawn.metrics[f"train/{name}"] for name in names)


def test_plain_learns_from_whatever_was_sampled() -> None:
    rounds = Rounds([True, False])
    drawn = rounds.draw(PlainSampling(), 4)
    assert names(drawn.groups) == names(drawn.sampled) == [0, 1, 2, 3]
    assert (drawn.problems, counts(drawn), drawn.note) == (4, (1, 0, 0, 0), None)
    assert rounds.jobs == [replace(JOB, problems=rounds.take(0, 4))]


@given(signals=SIGNALS, wanted=st.integers(1, 12), limit=st.integers(1, 6))
def test_dynamic_learns_from_the_first_groups_with_a_signal(signals: list[bool], wanted: int, limit: int) -> None:
    rounds = Rounds(signals)
    drawn = rounds.draw(DynamicSampling(rounds=limit), wanted)
    assert names(drawn.sampled) == list(range(drawn.problems)) == list(range(sum(rounds.asked)))
    found = [n for n in range(drawn.problems) if signals[n % len(signals)]]
    assert names(drawn.groups) == found[:wanted]
    missing = wanted - len(drawn.groups)
    assert counts(drawn) == (len(rounds.asked), drawn.problems - len(drawn.groups), missing, 0)
    assert (drawn.note is None) == (missing == 0)
    assert len(rounds.asked) <= limit
    assert missing == 0 or len(rounds.asked) == limit


@given(signals=SIGNALS, wanted=st.integers(1, 12))
def test_a_round_is_only_asked_while_groups_are_missing(signals: list[bool], wanted: int) -> None:
    rounds = Rounds(signals)
    rounds.draw(DynamicSampling(rounds=8), wanted)
    before_last = sum(rounds.asked[:-1])
    assert sum(signals[n % len(signals)] for n in range(before_last)) < wanted


@pytest.mark.parametrize(
    ("signals", "wanted", "asked"),
    [
        ([True], 8, [8]),
        ([True, False], 8, [8, 8]),  # 4 missing at a share of 1/2
        ([True, True, True, False], 8, [8, 3]),  # 2 missing at a share of 3/4: 2.67
        ([True, False, False, False], 8, [8, 8, 8, 8]),  # 6 missing at a share of 1/4 are 24, which is more than 8
        ([True] * 7 + [False] * 3, 8, [8, 2, 2]),  # 1 missing at 7/8: 1.14; then 1 missing at 7/10: 1.43
        ([False] * 8 + [True], 8, [8, 8, 8, 8, 8]),  # of no share a whole round
    ],
)
def test_a_further_round_asks_for_what_is_missing_over_the_share_so_far(
    signals: list[bool], wanted: int, asked: list[int]
) -> None:
    rounds = Rounds(signals)
    rounds.draw(DynamicSampling(rounds=5), wanted)
    assert rounds.asked == asked


def test_a_step_without_any_signal_learns_from_nothing_and_says_so() -> None:
    drawn = Rounds([False]).draw(DynamicSampling(rounds=3), 4)
    assert (drawn.groups, len(drawn.sampled), counts(drawn)) == ([], 12, (3, 12, 4, 0))
    assert drawn.note == (
        "step 5: algorithm.sampling.rounds=3 is reached after 12 problems, and 0 of 4 groups have a signal; "
        "the step learns from those"
    )


def test_the_first_round_is_the_one_of_plain_sampling() -> None:
    dynamic, plain = Rounds([True, False]), Rounds([True, False])
    dynamic.draw(DynamicSampling(), 4)
    plain.draw(PlainSampling(), 4)
    assert dynamic.jobs[0] == plain.jobs[0]


def test_a_problem_that_comes_again_in_a_step_has_other_keys(chat: BeamChat) -> None:
    rounds = Rounds([True, False, False], distinct=3)
    rounds.draw(DynamicSampling(rounds=4), 4)
    keys = [request.key for job in rounds.jobs for group in requests(job, chat) for request in group]
    assert rounds.asked == [4, 4, 3]
    assert len(set(keys)) == len(keys) == 2 * 11


@given(signals=SIGNALS, seed=st.integers(0, 2**63 - 1), share=st.sampled_from([0.1, 0.3, 1.0]))
def test_groups_without_a_signal_are_replaced_in_their_places(signals: list[bool], seed: int, share: float) -> None:
    drawn = Rounds(signals).draw(ReplaceSampling(min_share=share), len(signals), seed)
    assert names(drawn.sampled) == list(range(len(signals)))
    assert drawn.problems == len(drawn.groups) == len(signals)
    found, without = sum(signals), len(signals) - sum(signals)
    if found < share * len(signals):
        assert drawn.groups == drawn.sampled
        assert (counts(drawn), drawn.note is None) == ((1, 0, without, 0), False)
        return
    assert (counts(drawn), drawn.note) == ((1, without, 0, 0), None)
    learned = names(drawn.groups)
    assert all(signals[n] for n in learned)
    assert all(learned[n] == n for n, signal in enumerate(signals) if signal)
    times = Counter(learned).values()
    assert max(times) - min(times) <= 1
    assert len(times) == found


def test_which_groups_are_copied_depends_on_seed_and_step_alone() -> None:
    signals = [True] * 20 + [False] * 10

    def copies(seed: int, step: int) -> list[int]:
        rounds = Rounds(signals)
        job = replace(JOB, step=step)
        return names(draw(ReplaceSampling(), seed, job, 30, rounds.take, rounds.sample, differs).groups)[20:]

    assert copies(1, 5) == copies(1, 5)
    assert copies(1, 5) != copies(2, 5)
    assert copies(1, 5) != copies(1, 6)


@pytest.mark.parametrize(("found", "replaced"), [(3, True), (2, False), (0, False)])
def test_the_share_that_must_have_a_signal_may_be_met_exactly(found: int, replaced: bool) -> None:
    signals = [True] * found + [False] * (10 - found)
    drawn = Rounds(signals).draw(ReplaceSampling(min_share=0.3), 10)
    assert (drawn.groups != drawn.sampled) == replaced
    if not replaced:
        assert drawn.note == (
            f"step 5: {found} of 10 groups have a signal, too few to replace the others by "
            "(algorithm.sampling.min_share=0.3)"
        )


def test_a_response_without_a_grade_gives_no_signal() -> None:
    error = make_grade(0.0, status="error")
    few = make_group(make_grade(1.0), error)

    def sample(job: Job) -> Sampled:
        return Sampled([replace(few, problem=problem) for problem in job.problems])

    drawn = draw(DynamicSampling(rounds=1), 0, JOB, 2, Rounds([True]).take, sample, differs)
    assert drawn.groups == []


@pytest.mark.parametrize(
    ("factor", "wanted", "count"), [(1.5, 8, 12), (1.1, 10, 11), (1.1, 100, 110), (1.01, 3, 4), (2.25, 3, 7)]
)
def test_oversampling_takes_the_multiple_as_it_is_written(factor: float, wanted: int, count: int) -> None:
    rounds = Rounds([True])
    drawn = rounds.draw(OverSampling(factor=factor, cutoff_tokens=4), wanted)
    assert drawn.problems == count
    assert rounds.jobs == [replace(JOB, problems=rounds.take(0, count), cutoff=Cutoff(4, groups=wanted))]


def test_oversampling_learns_from_what_the_cutoff_keeps_and_counts_the_rest() -> None:
    rounds = Rounds([True, False])

    def kept(job: Job) -> Sampled:
        return Sampled(rounds.sample(job).groups[1::2], groups_left_out=3, tokens_left_out=77)

    drawn = draw(OverSampling(factor=2.0, cutoff_tokens=4), 0, JOB, 3, rounds.take, kept, differs)
    assert names(drawn.groups) == names(drawn.sampled) == [1, 3, 5]
    assert (drawn.problems, counts(drawn), drawn.note) == (6, (1, 3, 0, 77), None)


def test_a_change_reaches_each_group_that_is_learned_from_once_and_no_other() -> None:
    drawn = Rounds([True, False, False, True, True]).draw(DynamicSampling(rounds=1), 5)
    seen: list[Group] = []

    def change(groups: list[Group]) -> list[Group]:
        seen.extend(groups)
        return [replace(group, problem=make_problem("changed")) for group in groups]

    changed = drawn.changed(change)
    assert names(seen) == [0, 3, 4]
    assert [group.problem.text for group in changed.sampled] == ["changed", "1", "2", "changed", "changed"]
    assert [group.problem.text for group in changed.groups] == ["changed"] * 3
    assert changed.metrics == drawn.metrics


def test_copies_are_changed_once() -> None:
    drawn = Rounds([True, False]).draw(ReplaceSampling(), 2)
    assert drawn.chosen == [0, 0]
    assert len(drawn.changed(lambda groups: groups[:1]).sampled) == 2
