"""Why an engine failed, from its log: the first cause, not the last symptom.

The log has lines of several processes, and formats of vLLM 0.33 (``vllm/logger.py``: every line of a record, those of a
traceback included, begins with its prefix) beside raw tracebacks of Python.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile, islice

STACK = "Stack (most recent call first):"
"""What faulthandler writes above the stack of a thread."""

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(
    r"(?P<process>\([^()]+ pid=\d+\) ?)?"
    r"(?P<record>(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+:\d+\] ?)?"
    r"(?:\[rank\d+\]: ?)?"  # of torch
)
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_DEATH = re.compile(r"died unexpectedly \(exit code|^Fatal Python error|^terminate called|^\*\*\* SIG[A-Z]+")
_SYMPTOM = re.compile(
    r"See root cause above|[Ss]ee stack trace|check the stack trace above|^RuntimeError: (Executor failed|cancelled)"
    r"|EngineDeadError|^(BrokenPipeError|ConnectionResetError|EOFError|SystemExit|KeyboardInterrupt)\b"
    r"|^RuntimeError: One or more workers failed"
)
_MESSAGE_LINES = 6  # of an exception; NCCL says what matters in the third
_LAST_LINES = 12  # of a log that shows no failure
_FRAMES = 4  # of the stack of an engine that hangs

_ADVICE = (
    (
        r"No available memory for the cache|larger than the available KV cache",
        "too little of the GPU is left for the cache: raise rollout.vllm.memory_share, or shorten the responses",
    ),
    (
        r"out of memory|OutOfMemoryError|Free memory on device",
        "the GPU has too little free memory: lower rollout.vllm.memory_share or rollout.vllm.max_sequences, or end "
        "other processes on it (nvidia-smi lists them)",
    ),
    (
        r"SIGKILL|exit code: -9\b",
        "the kernel kills like this when the machine's own memory runs out (`dmesg | grep -i oom` tells), and so do "
        "cluster managers and people",
    ),
    (
        r"No CUDA GPUs are available|Failed to infer device type|Device string must not be empty"
        r"|[Nn]o NVIDIA (driver|GPU)|invalid device ordinal"
        r"|CUDA driver version is insufficient|NVML\w*: (Driver|NVML Shared Library) Not",
        "no usable GPU was found: see whether nvidia-smi lists those of CUDA_VISIBLE_DEVICES, and whether vLLM was "
        "built for this driver",
    ),
    (
        r"NCCL|nccl[A-Z]",
        "the GPUs of the engine could not talk to each other: run with NCCL_DEBUG=INFO and read the log; in a "
        "container, /dev/shm may be too small",
    ),
)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a log without its prefix."""

    source: str  # the process that wrote it; empty for what bypasses vLLM's logger
    record: str  # equal for the lines of one record
    level: str
    text: str


def root_cause(log: str, end: str = "") -> str:
    """The first failure in the log of an engine, with advice if the kind is known; else where it was or its end.

    ``end`` is how its process ended, which counts if the log shows no failure.
    """
    failure = first_failure(log)
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, failure or end)), None)
    return "\n".join(filter(None, [failure or _stack(log) or _last_lines(log), advice and f"advice: {advice}"]))


def first_failure(log: str) -> str | None:
    """The message of the first exception or crash that is not the consequence of another one."""
    lines = [_parse(line) for line in log.splitlines()]
    found = sorted([*_exceptions(lines), *_deaths(lines)])
    causes = [text for _, text in found if not _SYMPTOM.search(text)]
    return next(iter(causes or [text for _, text in found]), None)


def _stack(log: str) -> str | None:
    """The innermost frames of the last stack that an engine was made to show."""
    _, shown, after = log.rpartition(STACK)
    frames = [line for line in after.splitlines() if line.startswith("  File ")]
    return "\n".join(["its main thread was here:", *frames[:_FRAMES]]) if shown else None


def _parse(line: str) -> _Line:
    line = _COLOR.sub("", line).rstrip()
    prefix = _PREFIX.match(line)
    assert prefix is not None  # every part of it is optional
    return _Line(prefix["process"] or "", (prefix["record"] or "").strip(), prefix["level"] or "", line[prefix.end() :])


def _exceptions(lines: Sequence[_Line]) -> Iterator[tuple[int, str]]:
    """Where each traceback begins, and its exception. What was only warned about, or ignored, is left out."""
    for start, line in enumerate(lines):
        if line.text != _TRACEBACK or line.level not in ("", "ERROR", "CRITICAL"):
            continue
        following = (lines[n] for n in range(start + 1, len(lines)))
        own = (each.text for each in following if (each.source, each.record) == (line.source, line.record))
        message = _message(own)
        preceding = (lines[n] for n in range(start - 1, -1, -1))
        before = next((each.text for each in preceding if each.source == line.source), "")
        if message and not before.startswith(("Exception ignored in", "--- Logging error")):
            yield start, message


def _message(texts: Iterable[str]) -> str:
    """The exception below the frames of a traceback; no more is read than that."""
    below = dropwhile(lambda text: not text or text[0].isspace(), texts)
    message: list[str] = []
    for text in islice(below, _MESSAGE_LINES):
        if not text or text == _TRACEBACK or text.startswith(_CHAINED):
            break
        message.append(text)
    return "\n".join(message)


def _deaths(lines: Sequence[_Line]) -> Iterator[tuple[int, str]]:
    """Crashes that leave no traceback."""
    for number, line in enumerate(lines):
        if _DEATH.search(line.text):
            yield number, line.text


def _last_lines(log: str) -> str:
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    return "\n".join(["the last lines of its log:", *lines[-_LAST_LINES:]]) if lines else "its log is empty"
