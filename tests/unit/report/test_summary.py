"""Headlines, cautions and the choice of sample responses."""

import pytest

from beamline.report import RolloutRow
from beamline.report.summary import cautions, choose_samples, compact, duration, headlines, pieces
from tests.fake_run import fake_row as row

EVALUATION: dict[str, float] = {"eval/a/avg@8": 0.384, "eval/a/avg@8_low": 0.33, "eval/a/avg@8_high": 0.44}


def graded(problem: int, sample: int, correct: bool) -> RolloutRow:
    return row(sample) | {"problem": str(problem), "correct": correct}


def texts(lines: list[dict[str, float]]) -> dict[str, tuple[str, str]]:
    cards = headlines(lines, steps=50)
    return {card.label: (card.value.replace("\u00a0", " "), card.detail.replace("\u00a0", " ")) for card in cards}


def test_accuracy_is_told_from_the_first_to_the_last_evaluation() -> None:
    last = {"step": 50, "eval/a/avg@8": 0.851, "eval/a/avg@8_low": 0.82, "eval/a/avg@8_high": 0.88}
    value, detail = texts([{"step": 0} | EVALUATION, {"step": 9}, last])["a avg@8"]
    assert value == "38.4 → 85.1 %"
    assert detail == "95 % interval 33–44 → 82–88 %"


def test_a_single_evaluation_is_no_progress() -> None:
    assert texts([{"step": 0} | EVALUATION])["a avg@8"] == ("38.4 %", "95 % interval 33–44 %")


def test_steps_tokens_time_and_memory_are_told() -> None:
    lines: list[dict[str, float]] = [
        {"step": n, "train/tokens": 6000, "timing/step": 40.0, "memory/peak_bytes": n * 2**30} for n in (1, 2, 3)
    ]
    cards = texts(lines)
    assert cards["Steps"] == ("3", "of 50")
    assert cards["Tokens sampled"][0] == "18.0 k"
    assert cards["Time"] == ("2 min 0 s", "40.0 s a step")
    assert cards["Peak memory"][0] == "3.00 GiB"


def test_ungraded_responses_and_a_missing_evaluation_are_cautioned_of() -> None:
    notes = " ".join(cautions([{"step": 1, "train/graded": 254, "train/ungraded": 2}]))
    assert "2 of 256 training responses could not be graded" in notes
    assert "No evaluation has been recorded yet" in notes


def test_a_clean_run_needs_no_caution() -> None:
    assert cautions([{"step": 1, "train/graded": 256, "train/ungraded": 0, "eval/a/ungraded": 0} | EVALUATION]) == []


def test_ungraded_evaluation_responses_are_cautioned_of() -> None:
    assert "3 evaluation responses of a" in cautions([{"step": 1, "eval/a/ungraded": 3} | EVALUATION])[0]


def test_right_and_wrong_responses_are_chosen_of_different_problems() -> None:
    rows = [graded(p, s, correct=(p + s) % 2 == 0) for p in range(8) for s in range(4)]
    chosen = choose_samples(rows, 6)
    assert [sample.verdict for sample in chosen] == ["right"] * 3 + ["wrong"] * 3
    assert len({sample.row["problem"] for sample in chosen}) == 6


@pytest.mark.parametrize(
    ("rights", "wrongs", "expected"), [(1, 9, (1, 5)), (9, 1, (5, 1)), (0, 9, (0, 6)), (2, 1, (2, 1))]
)
def test_one_kind_fills_up_for_the_other(rights: int, wrongs: int, expected: tuple[int, int]) -> None:
    rows = [graded(n, 0, correct=n < rights) for n in range(rights + wrongs)]
    verdicts = [sample.verdict for sample in choose_samples(rows, 6)]
    assert (verdicts.count("right"), verdicts.count("wrong")) == expected


def test_no_sample_is_chosen_when_none_is_wanted() -> None:
    assert choose_samples([graded(0, 0, correct=False)], 0) == []


def test_an_ungraded_response_is_not_called_wrong() -> None:
    timeout: RolloutRow = row(0) | {"correct": False, "status": "timeout"}
    assert choose_samples([timeout], 1)[0].verdict == "ungraded"


def test_control_tokens_are_cut_out_and_control_characters_made_visible() -> None:
    found = [(piece.text, piece.control) for piece in pieces("<|start|>a <| b\x1b\r\n\t<|end|>")]
    assert found == [("<|start|>", True), ("a <| b␛␍\n\t", False), ("<|end|>", True)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.25, "4.2 s"), (59.4, "59.4 s"), (200, "3 min 20 s"), (4325, "1 h 12 min"), (360_000, "100 h 0 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (9379, "9,379"), (527_700, "527.7 k"), (21.3e6, "21.3 M"), (2e9, "2.0 B")]
)
def test_counts(count: float, text: str) -> None:
    assert compact(count) == text
