"""`beamline mismatch` on models and runs: figures that add up and are the same every time, in all their forms."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beamline.mismatch.frozen import freeze
from beamline.records import Rollout
from beamline.report import read_rollouts, rollouts_path
from beamline.report.mismatch import read_mismatch
from beamline.runtime.console import RunConsole
from beamline.runtime.subject import find_subject
from tests.system.conftest import Cli
from tests.system.runs import PER_STEP, SAMPLES
from tests.system.test_report_page import BROWSER, rendered

BFLOAT16 = ("--set", "rollout.dtype=bfloat16")
SHORT = ("--set", "rollout.max_response_tokens=24", "--set", "runtime.threads=1")
LAST, BEFORE = 6, 4
"""The steps of the newest checkpoint of the tiny run, and of the one before it."""


def record(cli: Cli, *arguments: object) -> dict[str, Any]:
    """What a command prints as JSON, and nothing else."""
    ended = cli("mismatch", *arguments, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def cause(found: dict[str, Any], name: str) -> dict[str, Any]:
    [named] = [each for each in found["causes"] if each["name"] == name]
    return dict(named)


def test_a_bfloat16_sampler_of_the_starter_is_explained_to_the_end(cli: Cli) -> None:
    found = record(cli, "starter", *BFLOAT16, *SHORT, "--sequences", 40)
    assert (found["model"], found["step"], found["sequences"]) == ("starter", 0, 40)
    assert found["residual"] == 0
    assert found["observed"]["mean"] == found["routing"]["free"] > 1e-5
    assert cause(found, "compute type")["left"] == 0
    assert found["settings"] == [BFLOAT16[1], SHORT[1], SHORT[3]]


def test_the_starter_as_it_is_has_nothing_to_explain(cli: Cli) -> None:
    ended = cli("mismatch", "starter", *SHORT, "--sequences", 3)
    assert ended.code == 0
    assert "agree to the last bit" in ended.out
    assert "0.7" in ended.out
    assert ended.out.count("what if") == 7


def test_the_same_seed_gives_the_same_figures(cli: Cli) -> None:
    arguments = ("starter", *BFLOAT16, *SHORT, "--sequences", 8)
    once = record(cli, *arguments)
    assert record(cli, *arguments) == once
    assert (
        record(cli, *arguments, "--set", "rollout.slots=3", "--set", "learner.micro_batch_tokens=50")["routing"]
        == (once["routing"])
    )
    other = record(cli, *arguments, "--set", "seed=1")
    assert other["observed"] != once["observed"]


def test_a_run_gets_its_record_and_a_section_in_its_report(finished: Path, cli: Cli) -> None:
    ended = cli("mismatch", finished, *BFLOAT16, "--sequences", 16)
    assert ended.code == 0, ended.err
    found = read_mismatch(finished)
    assert found is not None
    assert (found.step, found.sequences, found.residual) == (LAST, 16, 0)
    [weights] = [each for each in found.causes if each.name == "weights"]
    assert weights.switched == f"step {BEFORE}"
    assert weights.alone is not None
    assert weights.alone.mean > 0
    page = (finished / "report.html").read_text()
    assert "Why sampler and learner disagree" in page
    assert "with rollout.dtype=bfloat16" in page


def test_a_checkpoint_leaves_the_run_as_it_is(finished: Path, cli: Cli) -> None:
    report = (finished / "report.html").read_bytes()
    found = record(cli, finished / "checkpoints" / f"global_step_{BEFORE}", "--sequences", 4)
    assert (found["step"], cause(found, "weights")["switched"]) == (BEFORE, "step 2")
    assert not (finished / "mismatch.json").exists()
    assert (finished / "report.html").read_bytes() == report


def drawn_after(of: object, sequences: int, *settings: str) -> list[Rollout]:
    subject = find_subject(str(of), list(settings))
    with RunConsole(1, 1) as console:
        return list(freeze(subject, subject.weights(), sequences, console).rollouts)


@pytest.mark.usefixtures("cli")  # which sets back what is deterministic and how many threads there are
def test_the_batch_is_what_the_next_step_sampled(reference: Path) -> None:
    rows = read_rollouts(rollouts_path(reference, BEFORE + 1))
    drawn = drawn_after(reference / "checkpoints" / f"global_step_{BEFORE}", PER_STEP * SAMPLES)
    assert [(r.key.step, r.key.problem, r.key.sample, r.response_tokens) for r in drawn] == [
        (row["step"], row["problem"], row["sample"], row["tokens"]) for row in rows
    ]
    means = [float(np.mean(r.response_logprobs, dtype=np.float64)) for r in drawn]
    assert means == pytest.approx([row["logprob_mean"] for row in rows], rel=1e-6)  # the mean of float32 there


@pytest.mark.usefixtures("cli")
def test_fewer_sequences_are_the_beginning_of_more() -> None:
    """Of a group only as many samples as are asked for; of several groups the first ones."""
    few, more, groups = (drawn_after("starter", n, *SHORT[1::2]) for n in (3, 8, 12))
    tokens = [(r.key, r.token_ids.tolist()) for r in groups]
    assert len(tokens) == 12
    assert len({r.key.problem for r in groups}) == 2
    for fewer in (few, more):
        assert [(r.key, r.token_ids.tolist()) for r in fewer] == tokens[: len(fewer)]


def test_adapters_with_replayed_routes_are_explained_to_the_end(adapted: Path, cli: Cli) -> None:
    found, first = (
        record(cli, adapted / "checkpoints" / f"global_step_{step}", *BFLOAT16, "--sequences", 16) for step in (3, 1)
    )
    assert found["r3"]
    assert found["residual"] == 0
    assert not cause(found, "routing")["differs"]
    for each, before in ((found, "step 2"), (first, "without adapters")):
        assert cause(each, "weights")["switched"] == before
        assert cause(each, "weights")["alone"]["mean"] > 0


def test_the_module_of_transformers_is_explained_to_the_end(cli: Cli) -> None:
    found = record(cli, "starter", *BFLOAT16, *SHORT, "--set", "policy.parity=false", "--sequences", 16)
    assert found["residual"] == 0
    assert 0 < cause(found, "kernels")["change"] < 1e-5


def test_recorded_support_is_explained_to_the_end(cli: Cli) -> None:
    recorded = (
        "--set",
        "rollout.record_support=true",
        "--set",
        "rollout.top_p=0.8",
        "--set",
        "rollout.temperature=0.9",
    )
    found = record(cli, "starter", *BFLOAT16, *SHORT, *recorded, "--sequences", 16)
    assert found["residual"] == 0
    assert cause(found, "temperature")["switched"] == "1"


def test_a_folder_gets_the_record_and_a_page(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "new" / "folder"
    ended = cli("mismatch", "starter", *BFLOAT16, *SHORT, "--sequences", 4, "--out", out)
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in out.iterdir()) == ["mismatch.html", "mismatch.json"]
    again = cli("mismatch", "starter", "--out", out)
    assert again.code == 1
    assert f"{out / 'mismatch.html'} is there already" in again.err


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_the_page_is_drawn_in_a_browser(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "page"
    assert cli("mismatch", "starter", *BFLOAT16, *SHORT, "--sequences", 4, "--out", out).code == 0
    dom = rendered(out / "mismatch.html", tmp_path / "profile")
    assert 'data-ready="4"' in dom
    assert "data-error" not in dom[: dom.index("<head>")]
    assert dom.count('class="main-svg"') >= 4


MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "no such model": (("nowhere",), "ModelError: model folder nowhere does not exist"),
    "no sequences": (("starter", "--sequences", "0"), "'--sequences'"),
    "an engine that cannot be taken apart": (("starter", "--set", "rollout.engine=vllm"), "--set rollout=local"),
    "a setting that is not there": (("starter", "--set", "rollout.dtyp=bfloat16"), "did you mean rollout.dtype?"),
}


@pytest.mark.parametrize(("arguments", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_told_in_one_line(arguments: tuple[str, ...], message: str, cli: Cli) -> None:
    ended = cli("mismatch", *arguments)
    assert ended.code != 0
    assert message in ended.err
    assert ended.out == ""


def test_a_run_without_a_checkpoint_says_so(finished: Path, cli: Cli) -> None:
    (finished / "checkpoints").rename(finished / "elsewhere")
    ended = cli("mismatch", finished)
    assert ended.code == 1
    assert "has no checkpoint yet" in ended.err
