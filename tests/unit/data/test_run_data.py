"""The problems of a run: mixtures, overlap that is refused or counted, and what is told of both."""

import json
from pathlib import Path
from typing import Any

import pytest

from beamline.chat import BeamChat
from beamline.config import RunConfig
from beamline.data import DataError
from beamline.data.cleaning import clean
from beamline.data.files import rows_of
from beamline.data.wording import dapo
from beamline.runtime.data import Data, load_data, write_data_report
from beamline.runtime.preview import preview

MIXTURE = {
    "source": "mixture",
    "parts": {
        "file": {"weight": 3.0, "data": {"source": "file", "path": "PATH"}},
        "sums": {"weight": 1.0, "data": {"source": "arithmetic", "problems": 20, "levels": [3]}},
    },
}


def problem_file(folder: Path, *questions: str) -> Path:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"question": question, "answer": 1}) + "\n" for question in questions))
    return path


def run_config(path: Path, tokens: int = 64, **data: Any) -> RunConfig:
    filled = json.loads(json.dumps(data).replace("PATH", str(path)))
    settings = {"data": filled, "rollout": {"max_prompt_tokens": tokens}, "output": str(path.parent / "run")}
    return RunConfig.model_validate(settings)


def report(folder: Path, data: Data) -> dict[str, Any]:
    write_data_report(folder, data.sets, data.overlap)
    read: dict[str, Any] = json.loads((folder / "data.json").read_text())
    return read


def test_a_mixture_is_loaded_part_by_part_without_prompts_over_the_limit(tmp_path: Path, chat: BeamChat) -> None:
    path = problem_file(tmp_path, "1+1", "+".join(["12"] * 20), "2+2", "{")
    data = load_data(run_config(path, 32, train=MIXTURE), chat)
    assert [(part.name, part.problems) for part in data.train.parts] == [("file", 3), ("sums", 20)]
    assert [p.id for p in data.train.problems][:3] == ["file/own:1", "file/own:3", "file/own:4"]
    record = report(tmp_path, data)["train"]
    assert (record["problems"], record["parts"]) == (23, {"file": 3, "sums": 20})
    assert [row["where"] for row in record["excluded"]] == ["file, own:2"]
    drawn = data.train.take(seed=0, first=0, count=40)
    assert sum(problem.id.startswith("sums/") for problem in drawn) == 10


def test_a_part_of_which_no_prompt_can_be_used_is_an_error_that_names_it(tmp_path: Path, chat: BeamChat) -> None:
    path = problem_file(tmp_path, "+".join(["12"] * 20))
    with pytest.raises(DataError, match="data set 'file': no problem of 1 can be used"):
        load_data(run_config(path, 32, train=MIXTURE), chat)


def test_easy_problems_come_first_when_they_are_asked_to(tmp_path: Path, chat: BeamChat) -> None:
    sums = {"source": "arithmetic", "problems": 30, "levels": [3, 1, 2]}
    data = load_data(run_config(problem_file(tmp_path, "x"), train=sums, order="easy_first", evaluation={}), chat)
    levels = [problem.extra["level"] for problem in data.train.take(seed=0, first=0, count=60)]
    assert levels[:30] == levels[30:] == sorted(levels[:30])
    assert set(levels) == {1, 2, 3}


def test_the_order_is_random_unless_it_is_asked_for(tmp_path: Path, chat: BeamChat) -> None:
    data = load_data(run_config(problem_file(tmp_path, "1+1", "2+2"), train=MIXTURE), chat)
    assert data.train.difficulties == ()


def test_a_part_without_difficulties_cannot_be_ordered_by_them(tmp_path: Path, chat: BeamChat) -> None:
    with pytest.raises(DataError, match="data set 'train': problem 'file/own:1' has no difficulty"):
        load_data(run_config(problem_file(tmp_path, "1+1"), train=MIXTURE, order="easy_first"), chat)


def test_competition_problems_have_no_difficulty(tmp_path: Path, chat: BeamChat) -> None:
    source = {"source": "competition", "problems": 10}
    with pytest.raises(DataError, match="has no difficulty; data"):
        load_data(run_config(problem_file(tmp_path, "x"), 512, train=source, order="easy_first"), chat)


def test_a_prepared_file_keeps_its_difficulties(tmp_path: Path, chat: BeamChat) -> None:
    rows = [{"question": f"{n}+{n}", "answer": 2 * n, "difficulty": n} for n in (3, 1, 2)]
    prepared = tmp_path / "own.parquet"
    clean(rows_of(rows), "own").frame().write_parquet(prepared)
    train = {"source": "file", "path": "PATH"}
    data = load_data(run_config(prepared, 512, train=train, order="easy_first", evaluation={}), chat)
    assert [problem.answer for problem in data.train.take(seed=0, first=0, count=3)] == ["2", "4", "6"]


FILES: dict[str, Any] = {
    "train": {"source": "arithmetic", "problems": 20, "levels": [3]},
    "evaluation": {"own": {"source": "file", "path": "PATH"}},
}


def shared_question(chat: BeamChat, folder: Path) -> str:
    train = load_data(run_config(problem_file(folder, "x"), **FILES), chat).train
    return train.problems[5].text.replace("+", " + ")


def test_overlap_is_refused_unless_it_is_allowed_and_then_it_is_told(tmp_path: Path, chat: BeamChat) -> None:
    question = shared_question(chat, tmp_path)
    path = problem_file(tmp_path, question, "1+1")
    with pytest.raises(DataError, match="1 of 2 problems of evaluation set 'own' are also trained on"):
        load_data(run_config(path, **FILES), chat)
    allowed = run_config(path, **FILES, allow_overlap=True)
    data = load_data(allowed, chat)
    assert data.overlap == {"own": 1}
    record = report(tmp_path, data)
    assert record["own"]["also_trained_on"] == 1
    assert "also_trained_on" not in record["train"]
    assert "overlap     own: 1 problems are also trained on" in preview(allowed).splitlines()


def test_the_wording_around_a_problem_hides_no_overlap(tmp_path: Path, chat: BeamChat) -> None:
    path = problem_file(tmp_path, dapo(shared_question(chat, tmp_path)))
    with pytest.raises(DataError, match="1 of 1 problems of evaluation set 'own'"):
        load_data(run_config(path, 512, **FILES), chat)


def test_the_preview_of_a_mixture_has_a_line_for_each_part(tmp_path: Path) -> None:
    lines = preview(run_config(problem_file(tmp_path, "1+1", "2+2"), train=MIXTURE)).splitlines()
    assert [line for line in lines if line.startswith("training")] == [
        "training    22 problems in 2 parts",
        "training    file: 75.0% of each step, 2 problems, passed through 600.00 times",
        "training    sums: 25.0% of each step, 20 problems, passed through 20.00 times",
    ]
