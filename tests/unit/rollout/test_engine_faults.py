"""Logs as vLLM 0.33 and what it runs on write them; of most, only the lines that matter here."""

import pytest

from beamline.rollout.vllm.faults import STACK, root_cause
from beamline.rollout.vllm.replica import stage

FRAMES = (
    '  File "/usr/lib/vllm/v1/worker/gpu_worker.py", line 412, in load_model\n'
    "    self.model_runner.load_model()\n"
    "    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~^^\n"
)
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
SEE_ABOVE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL "
    "version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 999"
)


def record(text: str, process: str = "EngineCore pid=123", level: str = "ERROR", place: str = "core.py:1586") -> str:
    """A record of vLLM's logger."""
    prefix = f"({process}) {level} 12-01 11:00:00 [{place}] "
    return prefix + text.replace("\n", "\r\n" + prefix) + "\n"


def traceback(exception: str) -> str:
    return f"Traceback (most recent call last):\n{FRAMES}{exception}"


WORKER = record(
    f"WorkerProc hit an exception.\n{traceback(OUT_OF_MEMORY)}\n{traceback(OUT_OF_MEMORY)}\n",  # its note repeats it
    process="Worker_TP1 pid=130",
    place="multiproc_executor.py:1189",
)
CORE = record(
    "EngineCore encountered a fatal error.\n"
    + traceback(
        "RuntimeError: Worker failed with error 'CUDA out of memory.', please check the stack trace above for the root "
        "cause"
    )
)
FRONT = traceback(SEE_ABOVE) + "\n"
INFO = record("Starting to load model beam...", level="INFO")


def test_the_first_process_that_failed_is_blamed() -> None:
    assert root_cause(INFO + WORKER + CORE + FRONT).splitlines()[0] == OUT_OF_MEMORY


def test_symptoms_that_come_first_are_passed_over() -> None:
    assert root_cause(CORE + FRONT + WORKER).splitlines()[0] == OUT_OF_MEMORY
    dead = traceback("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    assert root_cause(f"{dead}\n{WORKER}").splitlines()[0] == OUT_OF_MEMORY


def test_a_symptom_is_better_than_nothing() -> None:
    assert root_cause(INFO + FRONT) == SEE_ABOVE


@pytest.mark.parametrize("link", ["During handling of the above", "The above"])
def test_a_chain_of_exceptions_begins_with_its_cause(link: str) -> None:
    rest = "exception, another exception occurred" if link.startswith("During") else "exception was the direct cause of"
    chain = f"{traceback('ValueError: first')}\n\n{link} {rest}:\n\n{traceback('RuntimeError: second')}"
    assert root_cause(chain) == "ValueError: first"
    assert root_cause(record(f"EngineCore failed to start.\n{chain}")) == "ValueError: first"


def test_lines_of_processes_may_be_mixed() -> None:
    mine = record(traceback("ValueError: mine")).splitlines()
    other = record("still here", process="Worker_TP0 pid=7", level="INFO").strip()
    assert root_cause("\n".join(f"{line}\n{other}\nraw" for line in mine)) == "ValueError: mine"
    theirs = record(traceback("ValueError: theirs"), process="Worker_TP0 pid=7").splitlines()  # at the same instant
    assert root_cause("\n".join(f"{a}\n{b}" for a, b in zip(mine, theirs, strict=True))) == "ValueError: mine"


def test_colors_and_prefixes_of_ranks_are_left_out() -> None:
    colored = record(traceback("ValueError: red")).replace(
        "(EngineCore pid=123)", "\x1b[0;36m(EngineCore pid=123)\x1b[0;0m"
    )
    assert root_cause(colored.replace("ERROR", "\x1b[31mERROR\x1b[0m")) == "ValueError: red"
    ranked = "\n".join(f"[rank1]: {line}" for line in traceback("ValueError: of a rank").splitlines())
    assert root_cause(ranked) == "ValueError: of a rank"


def test_a_message_of_several_lines_is_kept() -> None:
    message = "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no such model [type=x]"
    assert root_cause(record(traceback(f"{message}\n\nafter")) + "after\n") == message


def test_what_did_no_harm_is_not_blamed() -> None:
    harmless = record(f"no usage statistics\n{traceback('OSError: no home')}", level="WARNING")
    ignored = f"Exception ignored in: <function f at 0x7f>\n{traceback('TypeError: at exit')}\n"
    assert root_cause(harmless + ignored + WORKER).splitlines()[0] == OUT_OF_MEMORY
    assert "OSError" in root_cause(harmless)  # but as the end of the log
    assert root_cause(harmless).startswith("the last lines of its log:")


def test_a_worker_that_was_killed_comes_before_what_others_say_of_it() -> None:
    died = "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor."
    peer = traceback("torch.distributed.DistBackendError: NCCL error: remote process exited")
    text = root_cause(record(died, place="multiproc_executor.py:380") + f"{peer}\n" + FRONT)
    assert text.splitlines()[0] == died
    assert "dmesg" in text


def test_a_crash_in_native_code_is_found() -> None:
    crash = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x7f (most recent call first):\n  File 'x', line 1\n"
    )
    assert root_cause(INFO + crash) == "Fatal Python error: Segmentation fault"


def test_an_engine_that_hangs_was_somewhere() -> None:
    frames = [f'  File "/a.py", line {n} in f{n}' for n in range(9)]
    text = root_cause("\n".join([INFO, STACK, *frames]), "hangs")
    assert text.splitlines() == ["its main thread was here:", *frames[:4]]


def test_without_a_failure_the_end_of_the_log_is_shown() -> None:
    text = root_cause("\n".join(f"line {n}" for n in range(99)))
    assert text.splitlines() == ["the last lines of its log:", *(f"line {n}" for n in range(87, 99))]
    assert root_cause("\n \n") == "its log is empty"


@pytest.mark.parametrize(
    ("exception", "advice"),
    [
        (OUT_OF_MEMORY, "lower rollout.vllm.memory_share"),
        (
            "ValueError: Free memory on device cuda:0 (9.1/139.8 GiB) on startup is less than",
            "lower rollout.vllm.memory_share",
        ),
        ("ValueError: No available memory for the cache blocks. Try increasing", "raise rollout.vllm.memory_share"),
        ("RuntimeError: No CUDA GPUs are available", "no usable GPU"),
        ("RuntimeError: Failed to infer device type, please set the environment", "no usable GPU"),
        ("RuntimeError: Device string must not be empty", "no usable GPU"),
        (NCCL, "NCCL_DEBUG=INFO"),
    ],
)
def test_known_kinds_come_with_advice(exception: str, advice: str) -> None:
    text = root_cause(record(traceback(exception)))
    assert text.startswith(f"{exception}\nadvice: ")
    assert advice in text


def test_a_kill_is_advised_on_only_if_the_log_shows_no_failure() -> None:
    assert "dmesg" in root_cause(INFO, "was killed by SIGKILL")
    assert root_cause(traceback("ValueError: first"), "was killed by SIGKILL") == "ValueError: first"


def test_the_stage_of_a_start_is_that_of_its_last_known_line() -> None:
    loading = INFO + "Loading safetensors checkpoint shards:  25% Completed | 1/4 [00:01<00:03]\r"
    assert stage("") == "beginning"
    assert stage(loading) == "loading weights"
    assert stage(loading + record("Starting torch.compile", level="INFO")).startswith(
        "compiling kernels: the first start"
    )
    assert stage(loading + "Capturing CUDA graphs (mixed):  5%|" + "\nwhat else is logged") == "capturing graphs"
