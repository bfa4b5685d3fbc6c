"""What `beamline mismatch` found, as a file, in words and as a section of the page."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from beamline.report import write_report
from beamline.report.figures import Figure
from beamline.report.metrics import DamagedFileError
from beamline.report.mismatch import (
    Cause,
    LayerRoutes,
    Mismatch,
    Routing,
    Size,
    as_json,
    conclusion,
    mismatch_headlines,
    number,
    read_mismatch,
    write_mismatch,
)
from beamline.report.mismatch_figures import mismatch_figures
from beamline.report.page import write_mismatch_page
from tests.fake_run import write_fake_run

BATCH = Cause("batch composition", "packed", "any", True, "alone", Size(0.0, 0.0, 0.0), 0.0, 0.004)
ROUTES = Cause(
    "routing", "its own choice", "the sampler's", True, "the sampler's", Size(0.003, 0.02, 1.0), 0.003, 0.001
)
COMPUTE = Cause("compute type", "float32", "bfloat16", True, "bfloat16", Size(0.001, 0.01, 0.2), 0.001, 0.0)
HOTTER = Cause("temperature", "1", "1", False, "0.7", Size(0.02, 0.2, 2.0), None, None)
WEIGHTS = Cause("weights", "these", "these", False, "there is no earlier checkpoint", None, None, None)
ROUTING = Routing(
    rows=500,
    layers=(LayerRoutes(3, 0.01), LayerRoutes(4, 0.05)),
    any_layer=0.06,
    free=0.004,
    replayed=0.001,
    forced=0.0012,
    removed=1.07,
    removed_low=0.98,
    removed_high=1.12,
)
FOUND = Mismatch(
    model="starter",
    step=7,
    settings=("rollout.dtype=bfloat16",),
    seed=0,
    r3=False,
    sequences=64,
    tokens=3391,
    observed=Size(0.004, 0.03, 1.1),
    causes=(BATCH, ROUTES, COMPUTE, HOTTER, WEIGHTS),
    residual=0.0,
    routing=ROUTING,
)
AGREED = replace(
    FOUND,
    observed=Size(0.0, 0.0, 0.0),
    causes=(replace(BATCH, left=0.0), HOTTER, WEIGHTS),
    routing=replace(ROUTING, any_layer=0.0, free=0.0, replayed=0.0, forced=0.0, removed=None),
)
EVIL = "</script><script>alert(1)</script>"


def figure(found: Mismatch, name: str) -> Figure:
    [drawn] = [plot for plot in mismatch_figures(found) if plot.id == f"mismatch-{name}"]
    return drawn


def text_of(path: Path) -> str:
    """A page without the script of plotly.js."""
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", path.read_text(), flags=re.DOTALL)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    for found in (FOUND, AGREED, replace(FOUND, routing=None)):
        write_mismatch(tmp_path, found)
        assert read_mismatch(tmp_path) == found


def test_a_run_that_nobody_looked_at_has_none(tmp_path: Path) -> None:
    assert read_mismatch(tmp_path) is None


@pytest.mark.parametrize("damage", [{"tokens": "many"}, {"causes": [{}]}, {"observed": None}])
def test_a_damaged_file_is_an_error_that_names_it(damage: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mismatch.json").write_text(json.dumps(as_json(FOUND) | damage))
    with pytest.raises(DamagedFileError, match=r"mismatch.json is not a record .* run it again"):
        read_mismatch(tmp_path)


def test_only_what_is_exactly_0_is_called_so() -> None:
    assert (number(0.0), number(1e-12), number(0.00131), number(1.5)) == ("0", "1e-12", "0.0013", "1.5")


def test_the_conclusion_names_causes_by_what_they_explain() -> None:
    assert conclusion(FOUND) == (
        "Sampler and learner differ by 0.004 in the mean |Δ log p|: routing explains 75 %, compute type (bfloat16) "
        "explains 25 %, and nothing is left. R3 would take it from 0.004 to 0.001, which is 107 % [98, 112] of what "
        "routing causes."
    )


def test_the_conclusion_says_what_is_not_explained() -> None:
    text = conclusion(replace(FOUND, residual=0.0005, routing=None))
    assert text.endswith("compute type (bfloat16) explains 25 %, and 0.0005 is left.")


def test_the_conclusion_of_a_replayed_run_says_what_replay_has_done() -> None:
    assert "R3 has taken it from 0.004 to 0.001" in conclusion(replace(FOUND, r3=True))


def test_the_conclusion_of_engines_that_agree_says_what_could_come_between_them() -> None:
    assert conclusion(AGREED) == (
        "Sampler and learner agree to the last bit on all 3,391 tokens. Of what could come between them, the largest "
        "would be temperature (0.7): 0.02."
    )


def test_a_share_that_is_not_known_is_not_invented() -> None:
    rare = replace(ROUTING, removed=None, removed_low=None, removed_high=None)
    assert "too few routes differ to say more" in conclusion(replace(FOUND, routing=rare))
    assert "Too few routes differ" in figure(replace(FOUND, routing=rare), "replay").note


def test_what_differs_and_what_if_are_bars_apart() -> None:
    differs, what_if = figure(FOUND, "alone").traces
    assert (differs["x"], what_if["x"]) == ([0.003, 0.001], [0.02])
    assert [trace["marker"]["pattern"]["shape"] for trace in (differs, what_if)] == ["", "/"]


def test_what_has_no_bar_has_words() -> None:
    texts = [note["text"] for note in figure(FOUND, "alone").layout["annotations"]]
    assert texts == ["0, exactly", "there is no earlier checkpoint"]


def test_the_way_to_the_sampler_goes_down_by_what_each_step_takes() -> None:
    [bars] = figure(FOUND, "chain").traces
    assert bars["x"] == ["as they are", "batch composition", "routing", "compute type", "left"]
    assert bars["base"] == [0, 0.004, 0.001, 0, 0]
    assert bars["y"] == pytest.approx([0.004, 0, 0.003, 0.001, 0])
    assert bars["text"] == ["0.004", "0, exactly", "75.0%", "25.0%", "0"]


def test_a_step_away_from_the_sampler_has_another_color() -> None:
    worse = replace(ROUTES, left=0.005)
    [bars] = figure(replace(FOUND, causes=(worse, COMPUTE)), "chain").traces
    assert bars["marker"]["color"][1] != bars["marker"]["color"][2]
    assert bars["text"][1] == "-25.0%"


def test_layers_have_their_global_index() -> None:
    [bars] = figure(FOUND, "layers").traces
    assert (bars["x"], bars["y"]) == (["3", "4", "any"], [0.01, 0.05, 0.06])


def test_engines_that_agree_have_no_way_to_go() -> None:
    assert [plot.id for plot in mismatch_figures(AGREED)] == ["mismatch-alone"]
    assert [card.value for card in mismatch_headlines(AGREED)] == ["0", "0.00%", "0"]


def test_a_model_without_experts_has_no_plots_of_routes() -> None:
    found = replace(FOUND, routing=None)
    assert [plot.id for plot in mismatch_figures(found)] == ["mismatch-alone", "mismatch-chain"]
    assert len(mismatch_headlines(found)) == 2


def test_a_run_with_a_record_has_a_section(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run", steps=3)
    assert "Why sampler and learner disagree" not in text_of(write_report(run, 2))
    write_mismatch(run, FOUND)
    text = text_of(write_report(run, 2))
    assert "at step 7: 64 sequences with 3,391 response tokens, with rollout.dtype=bfloat16" in text
    assert conclusion(FOUND) in text
    plots = re.findall(r'<div class="plot" id="(mismatch-[^"]+)"', text)
    assert plots == ["mismatch-alone", "mismatch-chain", "mismatch-layers", "mismatch-replay"]


def test_the_page_of_its_own_has_the_same_figures(tmp_path: Path) -> None:
    text = text_of(write_mismatch_page(tmp_path, FOUND))
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    assert data
    assert [plot["id"] for plot in json.loads(data[1])] == [plot.id for plot in mismatch_figures(FOUND)]
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)


def test_every_figure_stands_in_the_table(tmp_path: Path) -> None:
    text = text_of(write_mismatch_page(tmp_path, FOUND))
    assert re.findall(r'<td class="number">(.*?)</td>', text)[5:10] == ["0.003", "0.02", "1", "0.003", "0.001"]
    assert text.count('<span class="quiet">what if</span>') == 1


def test_names_and_settings_are_escaped(tmp_path: Path) -> None:
    evil = replace(FOUND, model=EVIL, settings=(EVIL,), causes=(replace(ROUTES, name=EVIL, switched=EVIL, alone=None),))
    text = text_of(write_mismatch_page(tmp_path, evil))
    assert "alert(1)" in text
    assert "<script>alert" not in text
    drawn = json.dumps([asdict(plot) for plot in mismatch_figures(evil)])  # plotly would take it for markup
    assert "alert(1)" in drawn
    assert "<script>" not in drawn
