"""Whatever a response does, it costs at most a deadline, and no other task."""

import os
import select
import sys
import time
from pathlib import Path

import pytest

from beamline.tasks.graders.verdict import Verdict
from beamline.tasks.pool import GradingPool, GradingPoolError, GradingTask, Outcome, Restarts

GRADERS = "tests.hostile_graders:GRADERS"
DEADLINE = 0.5
MEMORY_MB = 64

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory")

# act, answer, status, what the error says, restarts
ACTS = [
    ("hang", "", "timeout", "longer than 0.5 seconds", Restarts(timeout=1)),
    ("stop", "", "timeout", "longer than 0.5 seconds", Restarts(timeout=1)),
    ("exit", "3", "error", "the grading worker ended by itself with exit code 3", Restarts(crash=1)),
    ("exit", "0", "error", "the grading worker ended by itself with exit code 0", Restarts(crash=1)),
    ("sys.exit", "4", "error", "the grading worker ended by itself with exit code 4", Restarts(crash=1)),
    ("interrupt", "", "error", "the grading worker", Restarts(crash=1)),
    ("killed", "", "error", "was killed, as the kernel does when memory runs out", Restarts(crash=1)),
    ("segfault", "", "error", "the grading worker crashed: Segmentation fault", Restarts(crash=1)),
    ("swallow", "", "error", "the grading worker ended by itself with exit code 5", Restarts(crash=1)),
    ("recurse", "", "error", "RecursionError: maximum recursion depth exceeded", Restarts()),
    ("no verdict", "", "error", "AttributeError: 'int' object has no attribute 'encode'", Restarts()),
    pytest.param("take at once", "", "error", "needed more than 64 MB of memory", Restarts(memory=1), marks=only_linux),
    pytest.param("take bit by bit", "", "error", "needed more than 64 MB", Restarts(memory=1), marks=only_linux),
]


def ask(response: str, answer: str = "") -> GradingTask:
    return GradingTask("act", response, answer)


def ordinary(count: int) -> list[GradingTask]:
    return [ask(str(n), str(n % 10)) for n in range(count)]


def assert_right(outcomes: list[Outcome]) -> None:
    assert [outcome.verdict for outcome in outcomes] == [Verdict(n < 10, str(n)) for n in range(len(outcomes))]


@pytest.mark.parametrize(("act", "answer", "status", "error", "restarts"), ACTS)
def test_a_hostile_response_costs_only_its_own_outcome(
    act: str, answer: str, status: str, error: str, restarts: Restarts
) -> None:
    with GradingPool(1, DEADLINE, MEMORY_MB, GRADERS) as pool:
        before, hostile, after = ordinary(12), [ask(act, answer)], ordinary(20)
        outcomes = pool.grade_all(before + hostile + after)
        assert_right(outcomes[:12])
        assert_right(outcomes[13:])
        assert (outcomes[12].status, outcomes[12].verdict) == (status, None)
        assert outcomes[12].error is not None
        assert error in outcomes[12].error
        assert pool.restarts == restarts


def test_a_full_stack_is_an_error() -> None:
    with GradingPool(1, 10.0, MEMORY_MB, GRADERS) as pool:
        outcomes = pool.grade_all([ask("overflow"), *ordinary(20)])
    assert outcomes[0].status == "error"
    assert_right(outcomes[1:])


def test_what_graders_print_is_dropped_except_while_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("beamline.tasks.pool.START_ATTEMPTS", 1)  # the worker that has chattered is also the last one
    with GradingPool(1, 10.0, MEMORY_MB, GRADERS) as pool:
        outcomes = pool.grade_all([ask("chatter"), *ordinary(20)])
        assert outcomes[0].verdict == Verdict(False, "said")
        assert_right(outcomes[1:])
        assert pool.restarts == Restarts()
        with pytest.raises(GradingPoolError) as raised:
            pool.grade_all([GradingTask("broken", "5", "5")])
    assert "there is no parser" in str(raised.value)
    assert "garbage" not in str(raised.value)


def test_many_hostile_responses_among_ordinary_ones() -> None:
    acts = ["exit", "segfault", "killed", "hang", "take at once", "fail", "stop"]
    tasks, hostile = ordinary(200), range(5, 200, 13)
    for count, n in enumerate(hostile):
        tasks[n] = ask(acts[count % len(acts)], "1")
    with GradingPool(2, DEADLINE, MEMORY_MB, GRADERS) as pool:
        outcomes = pool.grade_all(tasks)
        for n, outcome in enumerate(outcomes):
            expected = None if n in hostile else Verdict(n < 10, str(n))
            assert outcome.verdict == expected, (tasks[n], outcome)
        assert pool.restarts.timeout == sum(tasks[n].response in ("hang", "stop") for n in hostile)


def test_responses_that_hang_cost_a_deadline_each_and_not_more() -> None:
    with GradingPool(2, DEADLINE, MEMORY_MB, GRADERS) as pool:
        assert_right(pool.grade_all(ordinary(20)))
        start = time.monotonic()
        outcomes = pool.grade_all([ask("hang")] * 4)
        took = time.monotonic() - start
    assert [outcome.status for outcome in outcomes] == ["timeout"] * 4
    assert took >= 2 * DEADLINE  # two after two
    assert all(DEADLINE <= outcome.seconds < took for outcome in outcomes)


def test_what_a_grader_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with GradingPool(1, 2.0, MEMORY_MB, GRADERS) as pool:
        (outcome,) = pool.grade_all([ask("hang with child", str(told))])
        assert outcome.status == "timeout"
    try:
        child = os.pidfd_open(int(told.read_text()))
    except ProcessLookupError:
        return
    assert select.select([child], [], [], 20.0)[0]
    os.close(child)


@only_linux
def test_a_worker_that_holds_too_much_of_earlier_tasks_is_replaced() -> None:
    with GradingPool(1, 10.0, MEMORY_MB, GRADERS) as pool:
        pids = [outcome.verdict.parsed for outcome in pool.grade_all([ask("leak", "40")] * 4) if outcome.verdict]
        assert len(pids) == 4
        assert pids[0] == pids[1] != pids[2] == pids[3]
        assert_right(pool.grade_all(ordinary(20)))
        assert pool.restarts == Restarts(memory=2)


@only_linux
def test_a_long_response_does_not_count_as_memory_of_its_task() -> None:
    large = "\U0001f600" * 5_000_000  # 20 MB
    with GradingPool(1, 20.0, 8, GRADERS) as pool:
        long, short = pool.grade_all([ask(large, "5"), ask("5", "5")])
    assert long.verdict == Verdict(False, large)
    assert short.verdict == Verdict(True, "5")


BOMBS = {
    "a tower of powers": (r"9^{9^{9^{9^{9}}}}", "5"),
    "a tower of powers in Python": ("9**9**9**9", "5"),
    "a tower of powers, expected": ("5", r"9^{9^{9^{9^{9}}}}"),
    "braces": ("{" * 10**6 + "5" + "}" * 10**6, "5"),
    "boxes": (r"\boxed{" * 10**5 + "5" + "}" * 10**5, "5"),
    "digits": ("9" * 10**6, "5"),
    "digits, expected": ("9" * 10**6, "9" * 10**6 + "1"),
    "fractions": (r"\frac{1}{1+" * 10**4 + "x" + "}" * 10**4, "x"),
    "a binomial": (r"\binom{10^9}{5 \cdot 10^8}", "5"),
    "factorials": ("((((9!)!)!)!)!", "5"),
    "a long sum": (r"\sum_{n=1}^{10^9} \frac{1}{n^n}", "5"),
    "a long sum, expected": ("5", r"\sum_{n=1}^{10^9} \frac{1}{n^n}"),
    "many digits of pi": (r"\lfloor \pi^{10^7} \rfloor", r"\lfloor \pi^{1000} \rfloor"),
    "blanks": ("5" + " " * 10**6 + "x", "5"),
}


def test_no_formula_hangs_the_tolerant_grader_or_passes_for_right() -> None:
    bombs = [GradingTask("math", rf"Answer: \boxed{{{said}}}", answer) for said, answer in BOMBS.values()]
    plain = [GradingTask("math", rf"Answer: \boxed{{{n}}}", str(n % 10)) for n in range(20)]
    with GradingPool(2, 1.0, 512) as pool:
        outcomes = pool.grade_all(plain + bombs + plain)
    assert_right(outcomes[:20])
    assert_right(outcomes[-20:])
    for name, outcome in zip(BOMBS, outcomes[20:-20], strict=True):
        assert outcome.verdict is None or not outcome.verdict.correct, name
