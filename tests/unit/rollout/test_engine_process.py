import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from types import NoneType

import numpy as np
import pytest

import beamline
from beamline.records import Completion, Key, Request, SamplingParams
from beamline.records.codec import decode
from beamline.rollout.vllm import replica as replica_module
from beamline.rollout.vllm.messages import (
    Abort,
    Asked,
    DeviceMemory,
    Failed,
    Fill,
    Finish,
    Finished,
    Loaded,
    Prepare,
    Prepared,
    Report,
    Sleep,
    Start,
    Stop,
    Submit,
)
from beamline.rollout.vllm.process import serve
from beamline.rollout.vllm.replica import EngineFailedError, Launch, Replica
from beamline.rollout.vllm.wire import Inbox, Outbox
from tests.stub_engine import OUT_OF_MEMORY, PROGRAM, StubEngine, token

ROOT = Path(beamline.__file__).parents[1]
LONG = 120.0  # seconds; only a test that fails comes near it
BRIEF = 0.5  # seconds: a deadline that tests wait for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Starts replicas of the stub, which are stopped after the test."""
    replicas: list[Replica] = []

    def start(*options: object, said: Callable[[str], None] = print, **changes: object) -> Replica:
        settings = {
            "command": (*PROGRAM, *map(str, options)),
            "arguments": {},
            "environment": {"PYTHONPATH": str(ROOT)},
            "log": tmp_path / "engines" / f"stub-{len(replicas)}.log",
            "start_seconds": LONG,
            "token_seconds": LONG,
        }
        replicas.append(Replica(Launch(**(settings | changes)), said))
        return replicas[-1]

    yield start
    for each in replicas:
        each.stop()


def asked(sample: int, tokens: int, prefix: int = 3) -> Asked:
    request = Request(Key("train", 1, "p", sample), np.zeros(prefix, np.int32), SamplingParams(max_tokens=tokens))
    return Asked(request, seed=sample)


def until(happened: Callable[[], object]) -> None:
    limit = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.002)


def completions(replica: Replica, number: int) -> dict[int, Completion]:
    """By their sample, as many as there must be."""
    found: dict[int, Completion] = {}
    limit = time.monotonic() + LONG
    while len(found) < number:
        assert time.monotonic() < limit
        found |= {each.key.sample: each for finished in replica.take(LONG) for each in finished.completions}
    return found


def failure(replica: Replica) -> str:
    """What the error says that ends it."""

    def take_all() -> None:
        while True:
            replica.take(LONG)

    with pytest.raises(EngineFailedError) as caught:
        take_all()
    return str(caught.value)


def lives(pid: int) -> bool:
    """Whether a process runs; one that waits to be noticed by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def log_of(replica: Replica, tmp_path: Path) -> str:
    return (tmp_path / "engines" / f"{replica.name}.log").read_text()


def test_requests_end_with_their_tokens(start: Callable[..., Replica]) -> None:
    replica = start()
    assert replica.ready().versions == {"stub": "1"}
    replica.send(Submit([asked(0, 5), asked(1, 7)]))
    found = completions(replica, 2)
    assert {n: each.token_ids.tolist() for n, each in found.items()} == {
        0: [token(0, 3 + n) for n in range(5)],
        1: [token(1, 3 + n) for n in range(7)],
    }
    until(lambda: replica.take(0.01) or replica.tokens)
    assert (replica.tokens, replica.in_flight) == (12, 0)


def test_an_engine_does_not_take_itself_for_a_rank_of_whoever_started_it(
    start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME")
    of_torchrun += ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "1")
    replica = start()
    replica.ready()
    text = Path(f"/proc/{replica.pid}/environ").read_text()
    names = {each.partition("=")[0] for each in text.split("\0")}
    assert names.isdisjoint(of_torchrun)
    assert {"RANKING", "PATH"} <= names


def test_what_finishes_while_an_answer_is_awaited_is_kept(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 1)]))
    until(lambda: wait([replica.connection], LONG))
    assert replica.ask(Sleep(1, 1), DeviceMemory) == DeviceMemory(1000, 600, 0.0)
    assert set(completions(replica, 1)) == {0}


def test_several_answers_can_be_awaited_in_any_order(start: Callable[..., Replica]) -> None:
    replica = start(arguments={"ranks": 2})
    replica.ready()
    for command in (Prepare(1, [[], []], 8), Fill(2, 0, [[b"a"], [b"b"]]), Fill(3, 1, [[b"c"], [b""]]), Finish(4, 7)):
        replica.send(command)
    assert replica.answer(4, Loaded) == Loaded(
        [[zlib.crc32(each) for each in rank] for rank in ([b"a", b"c"], [b"b", b""])]
    )
    assert [replica.answer(number, NoneType) for number in (3, 2)] == [None] * 2
    assert replica.answer(1, Prepared) == Prepared([[], []])
    replica.send(Submit([asked(0, 1)]))
    assert completions(replica, 1)[0].versions.tolist() == [7]


def test_aborted_requests_are_given_back_and_no_longer_in_flight(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    endless = asked(0, 1_000_000_000)
    replica.send(Submit([endless]))
    assert replica.in_flight == 1
    until(lambda: replica.take(0.01) or replica.tokens)
    (partial,) = replica.ask(Abort(1, [endless.request.key, asked(9, 1).request.key]), list[Completion])
    assert partial.finish == "abort"
    assert partial.token_ids.tolist()[:3] == [token(0, 3), token(0, 4), token(0, 5)]
    assert replica.in_flight == 0


def test_big_messages_pass_both_ways(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    big = 4_000_000
    replica.send(Submit([asked(0, 2, big), asked(1, 2, big)]))
    found = completions(replica, 2)
    assert [found[n].routes.shape for n in (0, 1)] == [(big + 1, 2, 4)] * 2


def test_two_replicas_can_be_waited_for_together(start: Callable[..., Replica]) -> None:
    replicas = [start(), start()]
    for each in replicas:
        each.ready()
        assert each.take(0.0) == []
    replicas[1].send(Submit([asked(1, 1)]))
    assert wait([each.connection for each in replicas], LONG) == [replicas[1].connection]
    assert set(completions(replicas[1], 1)) == {1}
    os.kill(replicas[0].pid, signal.SIGKILL)  # an end wakes who waits, too
    until(lambda: replicas[0].connection in wait([each.connection for each in replicas], LONG))
    assert "SIGKILL" in failure(replicas[0])


def test_an_exception_is_reported_with_its_cause_and_the_log(start: Callable[..., Replica], tmp_path: Path) -> None:
    replica = start("--fault", "die")
    replica.ready()
    replica.send(Submit([asked(0, 1)]))
    log = tmp_path / "engines" / "stub-0.log"
    assert failure(replica) == f"engine stub-0 failed\nRuntimeError: the stub was told to die\nits log: {log}"
    assert "in step" in log.read_text()
    assert not lives(replica.pid)


def test_what_finished_before_a_failure_is_delivered(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "die", "--after", 200)
    replica.ready()
    replica.send(Submit([asked(0, 1), asked(1, 2), asked(2, 200), asked(3, 201)]))
    until(lambda: not lives(replica.pid))
    with pytest.raises(EngineFailedError):
        replica.ask(Sleep(1, 1), DeviceMemory)
    assert set(completions(replica, 3)) == {0, 1, 2}
    failure(replica)


def test_what_arrived_before_a_kill_is_delivered(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 1), asked(1, 1_000_000_000)]))
    until(lambda: wait([replica.connection], LONG))
    os.kill(replica.pid, signal.SIGKILL)
    until(lambda: not lives(replica.pid))
    assert set(completions(replica, 1)) == {0}
    assert "SIGKILL" in failure(replica)


def test_a_killed_engine_is_named_with_what_kills(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "kill", "--after", 3)
    replica.ready()
    replica.send(Submit([asked(0, 9)]))
    text = failure(replica)
    assert text.startswith("engine stub-0 was killed by SIGKILL\n")
    assert "dmesg" in text


def test_workers_end_with_their_engine(start: Callable[..., Replica], tmp_path: Path) -> None:
    replica = start("--fault", "kill-with-worker")
    replica.ready()
    replica.send(Submit([asked(0, 9)]))
    until(lambda: not lives(replica.pid))
    assert wait([replica.connection], LONG)  # which the worker does not keep open
    assert "SIGKILL" in failure(replica)
    (worker,) = [int(line.split()[-1]) for line in log_of(replica, tmp_path).splitlines() if "] worker " in line]
    assert not lives(worker)


def test_an_engine_that_hangs_is_ended_and_says_where(start: Callable[..., Replica], tmp_path: Path) -> None:
    replica = start("--fault", "hang", "--after", 2, token_seconds=BRIEF)
    replica.ready()
    replica.send(Submit([asked(0, 9)]))
    until(lambda: "the stub hangs" in log_of(replica, tmp_path))
    text = failure(replica)
    assert "engine stub-0 hangs" in text
    assert "without a token of 1 requests in flight" in text
    assert "in hang" in text
    assert not lives(replica.pid)


def test_an_idle_engine_does_not_hang(start: Callable[..., Replica]) -> None:
    replica = start(token_seconds=1e-6)
    replica.ready()
    assert replica.take(0.01) == []


def pass_time(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the clock forward."""
    now = time.monotonic
    monkeypatch.setattr(replica_module.time, "monotonic", lambda: now() + seconds)


def test_time_with_nothing_to_do_does_not_count(start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    replica = start("--fault", "hang")
    replica.ready()
    pass_time(2 * LONG, monkeypatch)
    replica.send(Submit([asked(0, 1)]))
    assert replica.take(0.0) == []
    monkeypatch.setattr(replica_module, "STOP_SECONDS", 0.05)
    replica.stop()


def test_time_in_which_nobody_listened_does_not_count(
    start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 1), asked(1, 1_000_000_000)]))
    until(lambda: wait([replica.connection], LONG))
    pass_time(2 * LONG, monkeypatch)
    assert set(completions(replica, 1)) == {0}
    assert replica.take(0.0) == []


def test_time_in_which_a_long_report_arrives_does_not_count(
    start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 2, 16_000_000)]))
    until(lambda: wait([replica.connection], LONG))
    until(lambda: len(replica.connection.recv(1 << 20, socket.MSG_PEEK)) > 1 << 12)
    pass_time(2 * LONG, monkeypatch)
    assert set(completions(replica, 1)) == {0}


def test_an_answer_that_does_not_come_is_noticed(start: Callable[..., Replica], tmp_path: Path) -> None:
    replica = start("--fault", "hang", token_seconds=BRIEF)
    replica.ready()
    replica.send(Submit([asked(0, 9)]))
    until(lambda: "the stub hangs" in log_of(replica, tmp_path))
    big = bytes(8_000_000)  # more than a socket takes: sending must not wait
    with pytest.raises(EngineFailedError, match=r"hangs.*the answer to Fill"):
        replica.ask(Fill(5, 0, [[big]]), NoneType)
    assert not lives(replica.pid)


def test_the_root_cause_of_a_failure_in_the_core_is_found(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "out-of-memory", "--after", 1)
    replica.ready()
    replica.send(Submit([asked(0, 9)]))
    text = failure(replica)
    assert OUT_OF_MEMORY in text
    assert "rollout.vllm.memory_share" in text
    assert "See root cause above" not in text


def test_an_engine_that_refuses_to_start_says_why(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "refuse", arguments={"model": "beam"})
    with pytest.raises(EngineFailedError, match=r"ValueError: the stub refuses to start with \['model'\]"):
        replica.ready()


def test_a_start_has_a_deadline(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "hang-in-start", start_seconds=BRIEF)
    with pytest.raises(EngineFailedError, match=r"hangs.*its start"):
        replica.ready()
    assert not lives(replica.pid)


def test_a_program_that_is_missing_is_named(start: Callable[..., Replica]) -> None:
    with pytest.raises(EngineFailedError, match=r"engine stub-0 cannot be started: .*no-such-program"):
        start(command=("no-such-program",))


def test_a_program_that_knows_nothing_of_engines_is_shown(start: Callable[..., Replica]) -> None:
    replica = start(command=(sys.executable, "-c", "print('what?'); raise SystemExit(3)"))
    with pytest.raises(EngineFailedError, match=r"(?s)ended with exit code 3.*what\?"):
        replica.ready()


def test_a_slow_start_says_what_it_does(
    start: Callable[..., Replica], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "SAY_SECONDS", 0.0)
    go_on, heard = tmp_path / "go on", []

    def hear(text: str) -> None:
        heard.append(text)
        if "loading weights" in text:
            go_on.touch()

    start("--fault", "slow", arguments={"until": str(go_on)}, said=hear).ready()
    assert heard[-1].startswith("engine stub-0: loading weights (")


def test_only_the_log_of_this_start_counts(start: Callable[..., Replica], tmp_path: Path) -> None:
    log = tmp_path / "old.log"
    log.write_text(f"Traceback (most recent call last):\n  File\n{OUT_OF_MEMORY}\n")
    replica = start("--fault", "refuse", log=log)
    with pytest.raises(EngineFailedError) as caught:
        replica.ready()
    assert "the stub refuses" in str(caught.value)
    assert OUT_OF_MEMORY in log.read_text()


def test_a_failure_is_raised_again(start: Callable[..., Replica]) -> None:
    replica = start("--fault", "refuse")
    with pytest.raises(EngineFailedError, match="the stub refuses") as first:
        replica.ready()
    replica.send(Submit([asked(0, 1)]))
    assert failure(replica) == str(first.value)
    with pytest.raises(EngineFailedError, match="the stub refuses"):
        replica.ask(Sleep(1, 1), DeviceMemory)
    replica.stop()


def test_stop_leaves_no_process(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 1_000_000_000)]))
    replica.stop()
    assert not lives(replica.pid)
    replica.stop()


def test_stop_ends_an_engine_that_will_not(start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "STOP_SECONDS", 0.05)
    replica = start("--fault", "stubborn")
    replica.ready()
    replica.stop()
    assert not lives(replica.pid)


def test_an_engine_outlives_the_thread_that_made_it_and_ctrl_c(start: Callable[..., Replica]) -> None:
    made: list[Replica] = []

    def make() -> None:
        made.append(start())
        made[0].ready()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (replica,) = made
    os.kill(replica.pid, signal.SIGINT)
    replica.send(Submit([asked(0, 3)]))
    assert set(completions(replica, 1)) == {0}
    assert os.getsid(replica.pid) != os.getsid(0)  # nor does a terminal reach it


@pytest.mark.parametrize("fault", [[], ["--fault", "hang"]], ids=["idle", "hanging"])
def test_an_engine_ends_when_its_controller_is_killed(fault: list[str], tmp_path: Path) -> None:
    log = tmp_path / "stub.log"
    program = f"""
from multiprocessing.connection import wait
from pathlib import Path
from beamline.rollout.vllm.messages import Submit
from beamline.rollout.vllm.replica import Launch, Replica
from tests.stub_engine import PROGRAM
from tests.unit.rollout.test_engine_process import asked
replica = Replica(Launch((*PROGRAM, *{fault}), {{}}, {{}}, Path({str(log)!r}), 120, 120), print)
replica.ready()
if {bool(fault)}:
    replica.send(Submit([asked(0, 9)]))
print(replica.pid, flush=True)
wait([replica.connection])
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    controller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
    assert controller.stdout is not None
    engine = int(controller.stdout.readline())
    until(lambda: not fault or "the stub hangs" in log.read_text())
    assert lives(engine)
    controller.kill()
    controller.wait()
    controller.stdout.close()
    until(lambda: not lives(engine))


def test_the_first_command_must_be_start(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = socket.socketpair()
    inbox, outbox = Inbox(ours), Outbox(ours)
    outbox.put(Submit([]))
    with pytest.raises(SystemExit) as ended:
        serve(theirs, lambda _: pytest.fail("nothing is to be built"))
    assert ended.value.code == 1
    assert "must be Start" in decode(inbox.next(LONG), Report).traceback
    assert "must be Start" in capsys.readouterr().err
    outbox.put(Stop())
    serve(theirs, lambda _: pytest.fail("nothing is to be built"))
    outbox.close(LONG)


def test_an_engine_ends_when_its_controller_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    outbox.put(Start(0, {}))
    outbox.put(Submit([asked(0, 2)]))
    outbox.close(LONG)
    ours.close()
    serve(theirs, lambda _: StubEngine(Namespace(fault=None)))
    ours, theirs = socket.socketpair()
    theirs.sendall(b"not read")  # then the end looks different
    ours.close()
    serve(theirs, lambda _: pytest.fail("nothing is to be built"))


def test_an_engine_that_stops_halfway_through_a_message_hangs(start: Callable[..., Replica], tmp_path: Path) -> None:
    """The process goes on, its threads do not: what a call into a driver does that does not come back."""
    replica = start(token_seconds=BRIEF)
    replica.ready()
    replica.send(Submit([asked(0, 2, 16_000_000)]))
    until(lambda: wait([replica.connection], LONG))
    until(lambda: len(replica.connection.recv(1 << 20, socket.MSG_PEEK)) > 1 << 12)  # the long one has begun
    os.kill(replica.pid, signal.SIGSTOP)
    assert "without a token of 1 requests" in failure(replica)
    assert not lives(replica.pid)


def test_a_log_that_is_gone_hides_nothing(start: Callable[..., Replica], tmp_path: Path) -> None:
    replica = start()
    replica.ready()
    for log in tmp_path.rglob("*.log"):
        log.unlink()
    os.kill(replica.pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match="was killed by SIGKILL"):
        replica.ask(Prepare(1, [[]], 8), Prepared)


def test_time_in_which_everything_stood_still_does_not_count(
    start: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is paused: the clock jumps while this process waits."""
    replica = start()
    replica.ready()
    replica.send(Submit([asked(0, 1_000_000_000)]))
    until(lambda: replica.take(0.0) or replica.tokens)
    os.kill(replica.pid, signal.SIGSTOP)
    while replica.take(0.01) or wait([replica.connection], 0.0):
        pass  # what it had sent
    pass_time(2 * LONG, monkeypatch)
    assert replica.take(0.01) == []
    os.kill(replica.pid, signal.SIGCONT)
    drawn = replica.tokens
    until(lambda: replica.take(0.01) or replica.tokens > drawn)


def test_other_processes_may_have_any_name(start: Callable[..., Replica]) -> None:
    rename = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xd0\\x9f\\xd1', 0, 0, 0); print(1, flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        other.stdout.readline()
        replica = start()
        replica.ready()
        replica.stop()
        assert not lives(replica.pid)
    finally:
        other.stdin.close()
        other.wait()
        other.stdout.close()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_controller_may_have_closed_its_streams(closed: str, tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from beamline.rollout.vllm.messages import Submit
from beamline.rollout.vllm.replica import Launch, Replica
from tests.stub_engine import PROGRAM
from tests.unit.rollout.test_engine_process import asked, completions
replica = Replica(Launch(PROGRAM, {{}}, {{}}, Path({str(tmp_path / "stub.log")!r}), 60, 60), lambda line: None)
replica.ready()
replica.send(Submit([asked(0, 2)]))
Path({str(tmp_path / "done")!r}).write_text(str(sorted(completions(replica, 1))))
replica.stop()
"""
    (tmp_path / "controller.py").write_text(program)
    command = f"{sys.executable} {tmp_path / 'controller.py'} {closed}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, shell=True, env=environment, timeout=LONG, check=True)
    assert (tmp_path / "done").read_text() == "[0]"


def test_a_default_timeout_of_sockets_is_not_ours(start: Callable[..., Replica]) -> None:
    socket.setdefaulttimeout(0.05)
    try:
        replica = start()
    finally:
        socket.setdefaulttimeout(None)
    replica.ready()
    os.kill(replica.pid, signal.SIGSTOP)
    replica.send(Submit([asked(0, 2, 4_000_000)]))
    assert not wait([replica.connection], 0.2)  # longer than that timeout
    os.kill(replica.pid, signal.SIGCONT)
    assert set(completions(replica, 1)) == {0}


def test_what_cannot_be_sent_is_not_in_flight(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    unclear = Asked(replace(asked(0, 1).request, key=Key("train", 1, "\ud800", 0)), seed=0)
    with pytest.raises(UnicodeEncodeError):
        replica.send(Submit([unclear]))
    assert replica.in_flight == 0


def test_an_answer_of_another_kind_is_the_engines_fault(start: Callable[..., Replica]) -> None:
    replica = start()
    replica.ready()
    with pytest.raises(EngineFailedError, match="sent what is no answer to Sleep"):
        replica.ask(Sleep(1, 1), Loaded)
    assert not lives(replica.pid)


def test_a_forked_process_can_start_engines_of_its_own(start: Callable[..., Replica], tmp_path: Path) -> None:
    start().ready()
    child = os.fork()
    if not child:
        try:
            mine = Replica(Launch(PROGRAM, {}, {}, tmp_path / "mine.log", LONG, LONG), lambda line: None)
            mine.ready()
            mine.stop()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_failure_waits_for_a_busy_controller(capsys: pytest.CaptureFixture[str]) -> None:
    """Its last words, and what had finished before, are more than a socket takes."""
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    for command in (Start(0, {}), Submit([asked(0, 2, 4_000_000), asked(1, 4, 4_000_000)])):
        outbox.put(command)

    def fail() -> None:
        with pytest.raises(SystemExit):
            serve(theirs, lambda _: StubEngine(Namespace(fault="die", after=3)))

    engine = threading.Thread(target=fail)
    engine.start()
    until(lambda: "told to die" in capsys.readouterr().err)
    assert engine.is_alive()
    inbox, reports = Inbox(ours), []
    while not reports or not isinstance(reports[-1], Failed):
        reports.append(decode(inbox.next(LONG), Report))
    assert [each.completions[0].key.sample for each in reports if isinstance(each, Finished)] == [0]
    engine.join()
    outbox.close(LONG)
