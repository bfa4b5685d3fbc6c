"""The plots show the numbers of the lines, and only what is there."""

from typing import Any

import pytest

from beamline.report.figures import EvaluationSet, Figure, evaluation_sets, figures

LINES: list[dict[str, float]] = [
    {"step": 0, "eval/a/avg@8": 0.4, "eval/a/avg@8_low": 0.3, "eval/a/avg@8_high": 0.5, "eval/a/pass@8": 0.7},
    {"step": 1, "train/reward_mean": 0.1, "train/reward_std": 0.5, "timing/step": 5.0, "timing/sampling": 3.0},
    {"step": 2, "train/reward_mean": 0.2, "train/reward_std": 0.25, "timing/step": 4.0, "timing/update": 1.0},
    {"step": 3, "eval/a/avg@8": 0.6, "eval/a/avg@8_low": 0.5, "eval/a/avg@8_high": 0.75, "eval/a/pass@8": 0.9},
]


def draw(name: str, lines: list[dict[str, float]]) -> Figure:
    return next(figure for figure in figures(lines) if figure.id == name)


def trace(figure: Figure, name: str) -> dict[str, Any]:
    [found] = [trace for trace in figure.traces if trace["name"] == name]
    return found


def test_accuracy_shows_avg_and_pass_apart() -> None:
    figure = draw("accuracy", LINES)
    assert (trace(figure, "a avg@8")["x"], trace(figure, "a avg@8")["y"]) == ([0, 3], [0.4, 0.6])
    assert (trace(figure, "a pass@8")["x"], trace(figure, "a pass@8")["y"]) == ([0, 3], [0.7, 0.9])


def test_the_accuracy_band_goes_along_the_upper_and_back_along_the_lower_bound() -> None:
    band = trace(draw("accuracy", LINES), "a avg@8 interval")
    assert list(zip(band["x"], band["y"], strict=True)) == [(0, 0.5), (3, 0.75), (3, 0.5), (0, 0.3)]


def test_a_single_evaluation_has_whiskers_instead_of_a_band() -> None:
    figure = draw("accuracy", LINES[:1])
    whiskers = trace(figure, "a avg@8")["error_y"]
    assert whiskers["array"] == pytest.approx([0.1])
    assert whiskers["arrayminus"] == pytest.approx([0.1])
    assert "a avg@8 interval" not in [trace["name"] for trace in figure.traces]


def test_an_evaluation_without_interval_is_still_drawn() -> None:
    figure = draw("accuracy", [{"step": 0, "eval/a/avg@1": 1.0}])
    assert [trace["name"] for trace in figure.traces] == ["a avg@1"]


def test_sets_and_their_k_are_found_in_order_of_appearance() -> None:
    lines: list[dict[str, float]] = [
        {"step": 0, "eval/b/avg@4": 1.0, "eval/b/avg@4_low": 1.0},
        {"step": 1, "eval/a/avg@16": 1.0},
    ]
    assert evaluation_sets(lines) == [EvaluationSet("b", 4), EvaluationSet("a", 16)]


def test_the_name_of_a_set_is_no_markup() -> None:
    assert trace(draw("accuracy", [{"step": 0, "eval/<b>x/avg@8": 1.0}]), "&lt;b&gt;x avg@8")


def test_the_reward_band_is_one_standard_deviation() -> None:
    band = trace(draw("reward", LINES), "mean ± std")
    assert band["y"] == pytest.approx([0.6, 0.45, -0.05, -0.4])


def test_the_bars_of_a_step_add_up_to_the_step() -> None:
    bars = draw("timing", LINES).traces
    assert [bar["name"] for bar in bars] == ["sampling", "update", "other"]
    assert [sum(seconds) for seconds in zip(*(bar["y"] for bar in bars), strict=True)] == [5.0, 4.0]


def test_many_steps_share_bars_that_keep_the_mean() -> None:
    lines: list[dict[str, float]] = [{"step": n, "timing/step": float(n)} for n in range(1, 1201)]
    [bar] = draw("timing", lines).traces
    assert len(bar["x"]) == 120
    assert (bar["x"][0], bar["y"][0]) == (5.5, 5.5)


def test_a_difference_of_zero_is_drawn_on_a_linear_axis() -> None:
    keys = ("mismatch/logprob_abs_diff_mean", "mismatch/logprob_abs_diff_max")
    assert draw("mismatch", [{"step": 1, keys[0]: 1e-7, keys[1]: 1e-6}]).layout["yaxis"]["type"] == "log"
    assert "type" not in draw("mismatch", [{"step": 1, keys[0]: 0.0, keys[1]: 0.0}]).layout["yaxis"]


def test_a_correction_has_a_plot_where_there_is_one() -> None:
    corrected: dict[str, float] = {"step": 1, "correction/kept_share": 0.9, "correction/dropped_share_veto": 0.1}
    assert [t["name"] for t in draw("correction", [corrected]).traces] == ["kept", "dropped by veto"]
    assert "correction" not in [figure.id for figure in figures(LINES)]


def test_divergences_have_a_plot_where_a_step_moved_the_policy_more_than_once() -> None:
    still: dict[str, float] = {"step": 1, "policy/kl_old": 0.0}
    assert "divergence" not in [figure.id for figure in figures([still])]
    assert draw("divergence", [still, {"step": 2, "policy/kl_old": 1e-3}]).traces[0]["y"] == [0.0, 1e-3]


def test_entropy_is_drawn_by_place_in_the_response_too() -> None:
    line: dict[str, float] = {"step": 1, "policy/entropy": 0.5, "policy/entropy_position_q4": 0.2}
    assert {t["name"]: t["y"] for t in draw("entropy", [line]).traces} == {"all tokens": [0.5], "last quarter": [0.2]}


def test_what_was_not_recorded_has_no_traces() -> None:
    assert all(not figure.traces for figure in figures([{"step": 0, "weights_version": 0}]))
