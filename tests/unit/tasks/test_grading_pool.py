import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from beamline.errors import BeamlineError
from beamline.tasks import pool_process
from beamline.tasks.graders.verdict import Verdict
from beamline.tasks.pool import GradingPool, GradingPoolError, GradingTask, Outcome, Restarts
from beamline.tasks.pool_worker import WARM_UP, Frames, pack

GRADERS = "tests.hostile_graders:GRADERS"
LONG = 60.0  # seconds: a deadline that no test reaches
NEVER = 1e9

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a worker with its parent")


def a_pool(workers: int = 1, deadline: float = LONG, memory_mb: int = 256, graders: str = GRADERS) -> GradingPool:
    return GradingPool(workers, deadline, memory_mb, graders)


def ask(response: str, answer: str = "") -> GradingTask:
    return GradingTask("act", response, answer)


def parsed(outcome: Outcome) -> str:
    assert outcome.verdict is not None, outcome
    assert outcome.verdict.parsed is not None
    return outcome.verdict.parsed


def pid_of(pool: GradingPool) -> int:
    return int(parsed(pool.grade_all([ask("pid")])[0]))


def has_ended(pid: int) -> bool:
    """Waits for the end of a process that is not ours to wait for."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 20.0)[0])
    finally:
        os.close(process)


@pytest.fixture(scope="module")
def shared() -> Iterator[GradingPool]:
    with a_pool(workers=2) as pool:
        yield pool


def test_an_outcome_is_the_verdict_of_the_grader(shared: GradingPool) -> None:
    right, wrong, empty = shared.grade_all([ask("5", "5"), ask("6", "5"), ask("", "5")])
    assert (right.status, right.verdict, right.error) == ("graded", Verdict(True, "5"), None)
    assert wrong.verdict == Verdict(False, "6")
    assert empty.verdict == Verdict(False, None)
    assert 0 < right.seconds < LONG


def test_outcomes_come_in_order_and_do_not_depend_on_the_number_of_workers(shared: GradingPool) -> None:
    tasks = [ask(str(n % 50), str(n % 7)) for n in range(500)]
    expected = [Verdict(n % 50 == n % 7, str(n % 50)) for n in range(500)]
    with a_pool(workers=3) as other:
        assert [outcome.verdict for outcome in other.grade_all(tasks)] == expected
    assert [outcome.verdict for outcome in shared.grade_all(tasks)] == expected


def test_poll_gives_each_outcome_once_under_its_key(shared: GradingPool) -> None:
    for n in range(100):
        shared.submit(("key", n), ask(str(n), "5"))
    assert shared.pending == 100
    found = []
    while shared.pending:
        found += shared.poll(LONG)
    assert sorted(key for key, _ in found) == [("key", n) for n in range(100)]
    assert all(parsed(outcome) == str(key[1]) for key, outcome in found)


def test_poll_gives_nothing_when_the_timeout_passes() -> None:
    with a_pool() as pool:
        pool.submit("a", ask("hang"))
        assert pool.poll(0.0) == []
        assert pool.poll(0.1) == []
        assert pool.pending == 1


def test_poll_does_not_wait_when_nothing_is_pending(shared: GradingPool) -> None:
    shared.grade_all([ask("5")])
    start = time.monotonic()
    assert shared.poll(LONG) == []
    assert time.monotonic() - start < LONG / 2


def test_a_pending_key_is_refused_until_its_outcome_was_returned(shared: GradingPool) -> None:
    shared.submit("a", ask("5", "5"))
    with pytest.raises(ValueError, match="'a' is being graded already"):
        shared.submit("a", ask("6", "6"))
    shared.grade_all([ask(str(n)) for n in range(50)])  # by now the outcome is there, but nobody has it
    with pytest.raises(ValueError, match="'a' is being graded already"):
        shared.submit("a", ask("6", "6"))
    assert [(key, parsed(outcome)) for key, outcome in shared.poll(LONG)] == [("a", "5")]
    shared.submit("a", ask("6", "6"))
    assert [(key, parsed(outcome)) for key, outcome in shared.poll(LONG)] == [("a", "6")]


def test_grading_a_list_leaves_other_outcomes_for_poll(shared: GradingPool) -> None:
    shared.submit("mine", ask("7", "7"))
    assert [parsed(outcome) for outcome in shared.grade_all([ask("8"), ask("9")])] == ["8", "9"]
    assert shared.pending == 1
    assert [(key, parsed(outcome)) for key, outcome in shared.poll(LONG)] == [("mine", "7")]
    assert shared.pending == 0


@given(st.lists(st.text(st.characters()), min_size=1, max_size=4))
@example(["\ud83d\ude00", "\udfff", "\x00", "\n", "\r\n", '"{}', "\U0010ffff"])
def test_any_text_reaches_the_grader_as_it_is(shared: GradingPool, texts: list[str]) -> None:
    outcomes = shared.grade_all([ask(text, text) for text in texts])
    assert [outcome.verdict for outcome in outcomes] == [Verdict(True, text or None) for text in texts]


@given(st.lists(st.lists(st.text(st.characters())), max_size=4), st.integers(1, 20))
def test_frames_may_arrive_in_any_pieces(messages: list[list[str]], size: int) -> None:
    data = b"".join(pack(*texts) for texts in messages)
    frames, found = Frames(), []
    for start in range(0, len(data), size):
        frames.feed(data[start : start + size])
        while (texts := frames.take()) is not None:
            found.append(texts)
    assert found == messages
    assert not frames.partial


def test_large_texts_go_both_ways_at_once() -> None:
    large = "x" * 20_000_000
    tasks = [task for n in range(3) for task in (ask(f"{n}{large}", f"{n}{large}"), ask(str(n), str(n)))]
    with a_pool(workers=1) as pool:
        outcomes = pool.grade_all(tasks)
    assert [outcome.verdict for outcome in outcomes] == [Verdict(True, task.response) for task in tasks]


def test_time_in_the_queue_does_not_count() -> None:
    with a_pool(workers=1, deadline=1.5) as pool:
        outcomes = pool.grade_all([ask("spin", "0.3") for _ in range(6)])
    assert [outcome.status for outcome in outcomes] == ["graded"] * 6
    assert all(0.3 <= outcome.seconds < 1.5 for outcome in outcomes)


def test_what_a_grader_does_at_first_use_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_process, "WAKE_SECONDS", 0.3)
    with a_pool(deadline=0.8) as pool:
        (outcome,) = pool.grade_all([GradingTask("slow_at_first", "5", "5")])
    assert outcome.verdict == Verdict(True, None)
    assert outcome.seconds < 0.8
    assert pool.restarts == Restarts()


def test_only_a_grader_that_is_asked_for_is_warmed_up_and_only_once() -> None:
    with a_pool() as pool:
        first, second = pool.grade_all([ask("called"), ask("called")])
    assert parsed(first) == "act " * len(WARM_UP) + "act"
    assert parsed(second) == "act " * len(WARM_UP) + "act act"


def test_a_task_over_the_deadline_is_a_timeout_and_its_worker_is_replaced() -> None:
    with a_pool(deadline=0.5) as pool:
        before = pid_of(pool)
        slow, right = pool.grade_all([ask("hang"), ask("5", "5")])
        assert (slow.status, slow.verdict) == ("timeout", None)
        assert slow.error == "grading took longer than 0.5 seconds"
        assert 0.5 <= slow.seconds < LONG
        assert right.verdict == Verdict(True, "5")
        assert pid_of(pool) != before
        assert pool.restarts == Restarts(timeout=1)


def test_a_timeout_is_one_even_if_nobody_polls_meanwhile(tmp_path: Path) -> None:
    with a_pool(deadline=0.3) as pool:
        pid = pid_of(pool)
        pool.submit("slow", ask("spin and tell", f"0.6 {tmp_path / 'told'}"))
        limit = time.monotonic() + LONG
        while not (tmp_path / "told").exists():
            assert time.monotonic() < limit
        pool.submit("next", ask("pid"))
        outcomes: dict[object, Outcome] = {}
        while pool.pending:
            outcomes |= dict(pool.poll(LONG))
        assert outcomes["slow"].status == "timeout"
        assert outcomes["slow"].seconds >= 0.6
        assert parsed(outcomes["next"]) == str(pid)  # the worker is in good health


def test_a_grader_that_raises_is_an_error_and_its_worker_goes_on() -> None:
    with a_pool() as pool:
        before = pid_of(pool)
        (outcome,) = pool.grade_all([ask("fail", "no such number")])
        assert (outcome.status, outcome.verdict) == ("error", None)
        assert outcome.error == "ArithmeticError: no such number"
        assert pid_of(pool) == before
        assert pool.restarts == Restarts()


def test_the_text_of_an_error_is_bounded(shared: GradingPool) -> None:
    (outcome,) = shared.grade_all([ask("fail", "x" * 100_000)])
    assert outcome.error is not None
    assert outcome.error.startswith("ArithmeticError: xxx")
    assert len(outcome.error) == 500


def test_workers_run_in_sessions_of_their_own_and_import_little(shared: GradingPool) -> None:
    session, modules = shared.grade_all([ask("session"), ask("modules")])
    assert int(parsed(session)) != os.getsid(0)
    assert not {"torch", "numpy", "sympy", "pydantic"} & set(parsed(modules).split())


def test_hashes_of_texts_are_the_same_in_all_workers() -> None:
    hashes = set()
    for _ in range(2):
        with a_pool() as pool:
            hashes.add(parsed(pool.grade_all([ask("hash", "x")])[0]))
    assert len(hashes) == 1


def test_neither_threads_nor_signals_are_used() -> None:
    before = threading.active_count(), signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGCHLD)
    with a_pool() as pool:
        pool.grade_all([ask("5")])
        assert before == (
            threading.active_count(),
            signal.getsignal(signal.SIGALRM),
            signal.getsignal(signal.SIGCHLD),
        )


@pytest.mark.parametrize(
    ("graders", "grader", "message"),
    [
        ("tests.no_such_module:GRADERS", "act", "No module named 'tests.no_such_module'"),
        ("tests.hostile_graders:NO_SUCH_NAME", "act", "has no attribute 'NO_SUCH_NAME'"),
        (GRADERS, "no such grader", "there is no grader 'no such grader'; there are act, broken, never_ready"),
        (GRADERS, "broken", "looking for the parser"),
        (GRADERS, "broken", "ImportError: there is no parser"),
    ],
)
def test_workers_that_do_not_start_are_an_error_with_what_they_printed(graders: str, grader: str, message: str) -> None:
    with a_pool(graders=graders) as pool, pytest.raises(GradingPoolError) as raised:
        pool.grade_all([ask("5", "5"), GradingTask(grader, "5", "5")])
    assert f"failed to load the graders of {graders}" in str(raised.value)
    assert "ended by itself with exit code 1" in str(raised.value)
    assert message in str(raised.value)
    assert isinstance(raised.value, BeamlineError)


def test_what_was_graded_before_a_grader_failed_to_load_is_not_lost() -> None:
    found: dict[object, Outcome] = {}

    def poll_for_ever(pool: GradingPool) -> None:
        while True:
            found.update(pool.poll(LONG))

    with a_pool() as pool:
        pool.submit("good", ask("5", "5"))
        pool.submit("bad", GradingTask("broken", "5", "5"))
        with pytest.raises(GradingPoolError, match="there is no parser"):
            poll_for_ever(pool)
        found.update(pool.poll(0.0))
    assert found["good"].verdict == Verdict(True, "5")


def test_few_tasks_wait_behind_one_that_takes_long() -> None:
    with a_pool(workers=2) as pool:
        pool.submit("long", ask("hang"))
        for n in range(100):
            pool.submit(n, ask(str(n)))
        limit = time.monotonic() + LONG / 2
        while pool.pending > pool_process.SENT_AHEAD:
            pool.poll(LONG / 2)
            assert time.monotonic() < limit


def test_an_idle_worker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_pool(workers=2) as pool:
        pool.grade_all([ask("spin", "0.2"), ask("spin", "0.2")])
        monkeypatch.setattr(pool_process, "WAKE_SECONDS", 0.3)
        pool.grade_all([ask("spin", "0.7")])
        assert pool.restarts == Restarts()


def test_a_long_reply_that_nobody_read_in_time_is_no_timeout(shared: GradingPool) -> None:
    with a_pool(deadline=0.7) as pool:
        pid_of(pool)
        pool.submit("large", ask("large", "20000000"))
        shared.grade_all([ask("spin", "1.0")])  # meanwhile nobody polls, and the reply is longer than what is buffered
        ((_, outcome),) = pool.poll(LONG)
        assert len(parsed(outcome)) == 20_000_000


def test_workers_that_are_never_ready_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_process, "START_SECONDS", 0.3)
    with a_pool() as pool, pytest.raises(GradingPoolError, match="the last one was silent for too long"):
        pool.grade_all([GradingTask("never_ready", "5", "5")])


def test_an_interpreter_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with a_pool() as pool, pytest.raises(GradingPoolError, match=r"cannot be started: .*/no/such/python"):
        pool.submit("a", ask("5"))


def test_an_idle_worker_that_is_stopped_costs_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_pool() as pool:
        before = pid_of(pool)
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(pool_process, "WAKE_SECONDS", 0.3)
        (outcome,) = pool.grade_all([ask("5", "5")])
        monkeypatch.setattr(pool_process, "WAKE_SECONDS", LONG)
        assert outcome.verdict == Verdict(True, "5")
        assert pool.restarts == Restarts(crash=1)
        assert pid_of(pool) != before


def test_an_idle_worker_that_is_killed_costs_no_task() -> None:
    with a_pool() as pool:
        before = pid_of(pool)
        os.kill(before, signal.SIGKILL)
        assert has_ended(before)
        outcomes = pool.grade_all([ask(str(n), str(n)) for n in range(20)])
        assert all(outcome.verdict == Verdict(True, str(n)) for n, outcome in enumerate(outcomes))
        assert pool.restarts == Restarts(crash=1)


def test_a_worker_is_started_only_for_a_task() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with a_pool(workers=8) as pool:
        pid = pid_of(pool)
        assert pid_of(pool) == pid
        assert len(os.listdir("/proc/self/fd")) <= before + 4  # of the pool and one worker


def test_closing_ends_workers_at_once_whatever_they_do() -> None:
    pool = a_pool(workers=2)
    pids = {int(parsed(outcome)) for outcome in pool.grade_all([ask("pid")] * 50)}
    for n in range(20):
        pool.submit(n, ask("hang"))
    assert pool.poll(0.2) == []
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < LONG / 2
    assert pool.pending == 0
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # not even a zombie
            os.kill(pid, 0)


def test_a_closed_pool_can_be_closed_again_and_nothing_else() -> None:
    pool = a_pool()
    pool.close()
    pool.close()
    with pytest.raises(GradingPoolError, match="the grading pool is closed"):
        pool.submit("a", ask("5"))
    with pytest.raises(GradingPoolError, match="the grading pool is closed"):
        pool.poll(0.0)


def test_no_descriptors_and_no_processes_are_left_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, pids = descriptors(), []
    for _ in range(20):
        with a_pool() as pool:
            pids.append(pid_of(pool))
    assert descriptors() == before
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@needs_linux
@pytest.mark.parametrize("last", ["tell and hang", "spin and tell"])
def test_workers_end_when_their_parent_is_killed(last: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    argument = str(told) if last == "tell and hang" else f"0 {told}"
    program = f"""
import sys
from beamline.tasks.pool import GradingPool, GradingTask
pool = GradingPool(1, 60.0, 256, {GRADERS!r})
print(pool.grade_all([GradingTask("act", "pid", "")])[0].verdict.parsed, flush=True)
pool.submit("last", GradingTask("act", {last!r}, {argument!r}))
while True:
    pool.poll(60.0)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    limit = time.monotonic() + LONG
    while not told.exists():
        assert time.monotonic() < limit
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert has_ended(worker)


@pytest.mark.parametrize("bounds", [(0, 1.0, 64), (1, 0.0, 64), (1, float("nan"), 64), (1, 1.0, 0)])
def test_bounds_must_be_positive(bounds: tuple[int, float, int]) -> None:
    with pytest.raises(ValueError, match="must be positive, not"):
        GradingPool(*bounds)
