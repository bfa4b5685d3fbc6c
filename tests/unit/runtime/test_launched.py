"""What torchrun says of a process, and what it cannot have said."""

import pytest

from beamline.cli import going_on
from beamline.runtime.launched import Launched, LaunchError, first, launched, processes

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_what_torchrun_says_is_taken() -> None:
    assert launched() == Launched(rank=3, size=4, local_rank=1, local_size=2)
    assert processes() == 4
    assert not first()


@pytest.mark.parametrize("left", [(), ("MASTER_ADDR", "MASTER_PORT"), ("LOCAL_RANK",)])
def test_without_it_there_is_one_process(left: tuple[str, ...], torchrun: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN.keys() - set(left):
        torchrun.delenv(name)
    assert launched() == Launched()


def test_one_process_of_one_needs_no_others(torchrun: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        torchrun.delenv(name)
    torchrun.setenv("RANK", "0")
    torchrun.setenv("WORLD_SIZE", "1")
    assert launched() == Launched()


@pytest.mark.parametrize("name", TORCHRUN)
def test_a_missing_variable_is_named(name: str, torchrun: pytest.MonkeyPatch) -> None:
    torchrun.delenv(name)
    with pytest.raises(LaunchError, match=rf"variable {name} is missing beside .*: start all processes with torchrun"):
        launched()


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("WORLD_SIZE", "four", "a number from 1 on"),
        ("WORLD_SIZE", "0", "a number from 1 on"),
        ("RANK", "4", "a number from 0 to 3"),
        ("RANK", "-1", "a number from 0 to 3"),
        ("RANK", "", "a number from 0 to 3"),
        ("LOCAL_RANK", "2", "a number from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "5", "a number from 1 to 4"),
        ("MASTER_PORT", "http", "a number from 1 to 65535"),
    ],
)
def test_an_impossible_value_is_named(name: str, value: str, wanted: str, torchrun: pytest.MonkeyPatch) -> None:
    torchrun.setenv(name, value)
    with pytest.raises(LaunchError, match=f"variable {name}={value} is not {wanted}: start all"):
        launched()


def test_the_command_to_go_on_by_starts_as_many_processes_in_the_way_that_they_were(
    torchrun: pytest.MonkeyPatch,
) -> None:
    words, module = ["train", "r.yaml", "checkpoint.resume=latest", "seed=1"], "/site/beamline/__main__.py"
    on = ["train", "r.yaml", "seed=1", "checkpoint.resume=latest"]
    assert going_on([module, *words]) == ["torchrun", "--nproc-per-node", "4", "-m", "beamline", *on]
    for name in TORCHRUN:
        torchrun.delenv(name)
    assert going_on([module, *words]) == ["python", "-m", "beamline", *on]
    assert going_on(["/bin/beamline", *words]) == ["/bin/beamline", *on]
