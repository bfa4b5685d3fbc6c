from pathlib import Path

import pytest

from beamline.report import evaluation_folder, find_evaluations, write_report
from beamline.report.metrics import DamagedFileError
from beamline.report.problems import read_results
from tests.fake_run import write_fake_problems


def test_results_are_those_of_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    for step, right in ((0, 1), (5, 3), (10, 6)):
        write_fake_problems(tmp_path, step, right, problems=1)
    (results,) = read_results(tmp_path)
    assert (results.name, results.first_step, results.last_step) == ("arithmetic", 0, 10)
    assert [(before and before.right, row.right) for before, row in results.rows] == [(1, 6)]


def test_the_hardest_problems_come_first(tmp_path: Path) -> None:
    write_fake_problems(tmp_path, 0, right=8, problems=6)
    assert [row.right for _, row in read_results(tmp_path)[0].rows] == [6, 6, 7, 7, 8, 8]


def test_a_problem_that_is_new_has_no_result_before(tmp_path: Path) -> None:
    write_fake_problems(tmp_path, 0, right=1, problems=1)
    write_fake_problems(tmp_path, 5, right=1, problems=2)
    assert [before is None for before, _ in read_results(tmp_path)[0].rows] == [True, False]


def test_steps_are_numbers_in_their_order(tmp_path: Path) -> None:
    for step in (5, 10, 0):
        evaluation_folder(tmp_path, step).mkdir(parents=True)
    (tmp_path / "export" / "evals" / "step_x").mkdir()
    assert [step for step, _ in find_evaluations(tmp_path)] == [0, 5, 10]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_fake_problems(tmp_path, 0, right=1)
    path = evaluation_folder(tmp_path, 0) / "arithmetic.problems.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DamagedFileError, match=r"arithmetic\.problems\.jsonl holds a row"):
        read_results(tmp_path)


def test_the_page_lists_problems_with_what_they_came_to(tmp_path: Path) -> None:
    write_fake_problems(tmp_path, 0, right=2, problems=1, question="What is <b>1</b>?", majority_answer="7")
    write_fake_problems(tmp_path, 5, right=6, problems=1, question="What is <b>1</b>?", majority_answer="7")
    text = write_report(tmp_path, 0).read_text()
    assert "What is &lt;b&gt;1&lt;/b&gt;?" in text
    assert "Right at step 0 → 5" in text
    assert "2/8 → 6/8" in text
    assert '<td class="text">7</td>' in text


def test_a_page_without_evaluations_has_no_such_section(tmp_path: Path) -> None:
    assert "Evaluation problems" not in write_report(tmp_path, 0).read_text()
