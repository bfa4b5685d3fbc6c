"""Competition math from a raw file to an evaluation, by the commands that a user gives."""

import json
from pathlib import Path

import polars as pl
import pytest

from beamline.config import load_config
from beamline.data.competition import raw_rows
from beamline.data.wording import AFTER, BEFORE
from beamline.report import read_metrics, read_rollouts, rollouts_path
from tests.system.conftest import Cli
from tests.system.runs import ROOT

MATH = ROOT / "recipes" / "quickstart-math.yaml"
SMALL = (
    *(
        "steps=2",
        "data.train.problems=40",
        "data.evaluation.competition.problems=8",
        "evaluation.samples_per_problem=2",
    ),
    *("algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "algorithm.prompts_per_update=4"),
    *("runtime.threads=1", "report.every=0"),
)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw file in the shape of DAPO-Math-17K: 30 problems, one of them contradicted, each row there twice."""
    path = tmp_path_factory.mktemp("raw") / "dapo-math-17k.parquet"
    pl.DataFrame([row.value for row in raw_rows(0, "eval", 30)]).write_parquet(path)
    return path


def test_the_math_recipe_trains_on_cleaned_rows_in_the_wording_of_dapo(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    ended = cli("train", MATH, f"output={run}", *SMALL)
    assert ended.code == 0, ended.err
    data = json.loads((run / "data.json").read_text())
    assert (data["train"]["problems"], data["competition"]["problems"]) == (40, 8)
    assert data["train"]["excluded"] == []
    rows = read_rollouts(rollouts_path(run, 1))
    assert len(rows) == 16
    assert all(row["question"].startswith(BEFORE) and row["question"].endswith(AFTER) for row in rows)
    last = read_metrics(run / "metrics.jsonl")[-1]
    assert last["train/ungraded"] == 0
    assert last["train/well_formed_share"] > 0.5
    assert last["mismatch/logprob_abs_diff_max"] == 0


def test_prompts_of_training_and_evaluation_ask_for_minimal_effort() -> None:
    assert load_config(MATH).chat.template_arguments == {"reasoning_effort": "minimal"}


def test_a_raw_file_is_prepared_and_measured(raw: Path, tmp_path: Path, cli: Cli) -> None:
    prepared = cli("data", "prepare", "dapo", "--from", raw, "--out", tmp_path / "data")
    assert prepared.code == 0, prepared.err
    clean = tmp_path / "data" / "dapo-math-17k-cleaned.parquet"
    manifest = json.loads((tmp_path / "data" / "dapo-math-17k-cleaned.manifest.json").read_text())
    assert (manifest["rows"]["in"], manifest["rows"]["exact_duplicates"], manifest["rows"]["out"]) == (64, 32, 30)
    assert manifest["rows"]["conflicting_answers"]["rows"] == 2
    ended = cli("eval", "starter-math", clean, "--set", "evaluation.samples_per_problem=2", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert 0 < figures["eval/dapo-math-17k-cleaned/avg@2"] < 1
    assert figures["eval/dapo-math-17k-cleaned/ungraded"] == 0


def test_responses_are_graded_by_the_command(tmp_path: Path, cli: Cli) -> None:
    rows = [("**Answer:** 034", "34"), ("Answer: 35", "34"), ("", "34")]
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps({"response": r, "answer": a}) + "\n" for r, a in rows))
    ended = cli("grade", path)
    assert ended.code == 0, ended.err
    made = [json.loads(line) for line in ended.out.splitlines()]
    assert [(row["correct"], row["parsed"]) for row in made] == [(True, "34"), (False, "35"), (False, None)]
    assert all(row["status"] == "graded" and row["seconds"] >= 0 for row in made)
