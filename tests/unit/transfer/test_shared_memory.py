import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

import beamline.transfer.memory
from beamline.records import codec
from beamline.transfer.memory import attach, host_memory
from beamline.transfer.plan import TransferError

ATTACHER = """
import sys
from beamline.transfer.memory import attach
memory = attach(bytes.fromhex(sys.argv[1]))
print(int(memory.buffer.sum()))
memory.buffer.fill_(2)
"""
OWNER = """
import sys
from beamline.transfer.memory import host_memory
memory = host_memory(4096)
memory.buffer.fill_(7)
print(memory.descriptor.hex(), flush=True)
sys.stdin.read()
"""


def owner() -> tuple[subprocess.Popen[str], bytes]:
    """A process that has made memory and waits, and what it described."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, bytes.fromhex(process.stdout.readline())


def test_another_process_sees_and_writes_the_same_bytes() -> None:
    memory = host_memory(5000)
    memory.buffer.fill_(1)
    seen = subprocess.run(
        [sys.executable, "-c", ATTACHER, memory.descriptor.hex()], capture_output=True, text=True, check=True
    )
    assert (seen.stdout, seen.stderr) == ("5000\n", "")  # no word of a resource tracker either
    assert (memory.buffer == 2).all()
    memory.close()


def test_it_outlives_an_owner_that_is_killed_and_nothing_is_left_behind() -> None:
    named = set(os.listdir("/dev/shm"))
    process, descriptor = owner()
    memory = attach(descriptor)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (memory.buffer == 7).all()
    assert set(os.listdir("/dev/shm")) - named == set()
    memory.close()
    with pytest.raises(TransferError, match=f"process {process.pid} no longer has the shared memory of 4096 bytes"):
        attach(descriptor)


def test_closing_gives_the_memory_back() -> None:
    files = len(os.listdir("/proc/self/fd"))
    mine = host_memory(1 << 20)
    other = attach(mine.descriptor)
    assert mapped() == 2
    mine.close()
    other.close()
    assert mapped() == 0
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(mine.buffer) == len(other.buffer) == 0
    mine.close()


def mapped() -> int:
    """How many views of such memory this process has open."""
    return Path("/proc/self/maps").read_text().count("/memfd:beamline")


def test_what_was_closed_cannot_be_attached() -> None:
    memory = host_memory(100)
    memory.close()
    with pytest.raises(TransferError, match="has ended or closed it"):
        attach(memory.descriptor)


def test_another_file_under_the_same_number_is_not_taken_for_it() -> None:
    memory = host_memory(100)
    memory.close()
    following = host_memory(100)  # gets the lowest free number, which is the one just closed
    with pytest.raises(TransferError, match="is another one now"):
        attach(memory.descriptor)
    following.close()


def test_more_than_the_machine_has_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beamline.transfer.memory, "_available", lambda: 999)
    with pytest.raises(TransferError, match=r"1000 bytes is asked for and the machine has 999 left; use smaller"):
        host_memory(1000)


def test_the_memory_is_taken_at_once() -> None:
    memory = host_memory(1 << 20)
    place = codec.decode(memory.descriptor, beamline.transfer.memory._Descriptor).place
    assert isinstance(place, beamline.transfer.memory._OnHost)
    assert os.fstat(place.file).st_blocks * 512 == 1 << 20
    memory.close()


def test_what_the_machine_has_left_is_a_part_of_what_it_has() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert total / 1000 < beamline.transfer.memory._available() < total


def test_other_bytes_describe_no_memory() -> None:
    with pytest.raises(msgspec.ValidationError):
        attach(codec.encode({"place": {"type": "elsewhere"}}))


def test_memory_of_a_gpu_that_is_not_there_is_an_error_that_says_which_are() -> None:
    place = beamline.transfer.memory._OnCuda("another GPU", 8, b"", 8, 0, b"", 0, b"", False)
    with pytest.raises(TransferError, match=r"on GPU another GPU, and this process sees \[.*CUDA_VISIBLE_DEVICES"):
        attach(codec.encode(beamline.transfer.memory._Descriptor(place)))


def test_views_may_outlive_closing() -> None:
    memory = host_memory(8)
    view = memory.buffer.view(torch.float32)
    memory.close()
    view.fill_(3)
    assert view.tolist() == [3, 3]
