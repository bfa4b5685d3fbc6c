"""Messages between this process and an engine process."""

import socket
import threading

import pytest

from beamline.records.codec import decode
from beamline.rollout.vllm.messages import Failed, Progress, Report, Stop
from beamline.rollout.vllm.wire import Inbox, Outbox, WireError

LONG = 60.0


def test_nobody_waits_for_the_other_side_to_read() -> None:
    ours, theirs = socket.socketpair()
    outbox, inbox = Outbox(ours), Inbox(theirs)
    texts = [str(n) * 1_000_000 for n in range(9)]
    for text in texts:
        outbox.put(Failed(text))
    assert [decode(inbox.next(LONG) or b"", Report) for _ in texts] == [Failed(text) for text in texts]
    outbox.close(LONG)


def test_however_it_is_cut_a_message_comes_whole() -> None:
    ours, theirs = socket.socketpair()
    copy, inbox = Inbox(theirs), Inbox(theirs)
    outbox = Outbox(ours)
    outbox.put(Progress(1))
    outbox.put(Stop())
    outbox.close(LONG)
    sent = theirs.recv(1 << 20)
    found = []
    for at in range(len(sent)):
        ours.sendall(sent[at : at + 1])
        if (message := copy.next(0.0)) is not None:
            found.append(message)
    ours.sendall(sent)
    assert found == [inbox.next(LONG), inbox.next(LONG)]
    assert decode(found[0], Report) == Progress(1)
    assert inbox.next(0.0) is None


def test_half_a_message_is_waited_for_and_lost_with_its_sender() -> None:
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    ours.sendall(b"\x05\0\0\0\0\0\0\0hal")
    assert inbox.next(0.01) is None
    ours.sendall(b"f!")
    assert inbox.next(0.0) == b"half!"
    ours.sendall(b"\x05\0\0\0\0\0\0\0hal")
    ours.close()
    with pytest.raises(EOFError):
        inbox.next(None)


def test_what_was_sent_before_the_end_is_received() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"not read")
    ours.sendall(b"\x01\0\0\0\0\0\0\0!")
    inbox = Inbox(theirs)
    ours.close()  # with something unread: the other side sees a reset, not an end
    assert inbox.next(LONG) == b"!"
    with pytest.raises(EOFError):
        inbox.next(LONG)


def test_what_announces_too_much_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(b"what is this?")
    with pytest.raises(WireError, match="bytes is announced"):
        Inbox(theirs).next(LONG)


def test_an_empty_message_is_one() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(bytes(8) + b"\x01\0\0\0\0\0\0\0!")
    inbox = Inbox(theirs)
    assert [inbox.next(LONG), inbox.next(LONG)] == [b"", b"!"]


def test_an_outbox_whose_reader_is_gone_ends() -> None:
    ours, theirs = socket.socketpair()
    outbox = Outbox(ours)
    theirs.close()
    for _ in range(9):
        outbox.put(Failed("x" * 1_000_000))
    outbox.close(LONG)
    assert not [thread for thread in threading.enumerate() if thread is outbox._thread]
