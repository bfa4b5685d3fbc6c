"""The page: data is text, nothing comes from the network, and what is missing is said."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from beamline.report import MetricsWriter, rollouts_path, write_report, write_rollouts
from tests.fake_run import fake_row as row
from tests.fake_run import write_fake_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_run(tmp_path_factory.mktemp("runs") / "arithmetic", dump_every=7)


def page(run: Path, samples: int = 8) -> str:
    """The report without the script of plotly.js."""
    text = write_report(run, samples).read_text()
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", text, flags=re.DOTALL)


def test_a_run_is_shown(fake_run: Path) -> None:
    text = page(fake_run)
    assert text.count('class="plot"') == 10
    assert "Not recorded yet" not in text
    assert "Step 7 · 8 of 256 responses" in text
    assert "Step 49 · 8 of 256 responses" in text
    assert "samples_per_prompt: 8" in text


def test_plotly_is_inlined_once(fake_run: Path) -> None:
    assert write_report(fake_run, 8).read_text().count("* plotly.js v") == 1


def test_text_of_the_run_is_escaped_everywhere(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"name: {EVIL}\nmodel:\n  path: {EVIL}\n")
    MetricsWriter(tmp_path / "metrics.jsonl").append({"step": 1, "eval/<script>x/avg@8": 0.5})
    evil = row(0, EVIL) | {
        "question": EVIL,
        "answer": EVIL,
        "parsed": EVIL,
        "problem": EVIL,
        "parts": {EVIL: 1.0, "b": 0.0},
    }
    write_rollouts(rollouts_path(tmp_path, 1), [evil])
    text = page(tmp_path)
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert "<script>x" not in text
    assert "<img" not in text


def test_figure_data_cannot_end_its_script(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").append({"step": 1, "eval/<!--<script>x/avg@8": 0.5})
    data = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page(tmp_path), re.DOTALL)
    assert data
    assert "<" not in data[1]
    assert json.loads(data[1])[0]["id"] == "accuracy"


def test_whitespace_of_a_response_is_kept(tmp_path: Path) -> None:
    write_rollouts(rollouts_path(tmp_path, 1), [row(0, "\n\n  a\n\tb  ")])
    assert '<div class="text response">\n\n  a\n\tb  </div>' in page(tmp_path)


def test_the_page_forbids_and_needs_no_network(fake_run: Path) -> None:
    text = page(fake_run)
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", text)


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert "No step has been recorded yet" in text
    assert "No responses have been dumped" in text
    assert "The run has no config.yaml" in text


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    text = page(write_fake_run(tmp_path / "run", steps=3, evaluate_every=0))
    assert "No evaluation has been recorded yet" in text


def test_a_plot_without_data_says_so(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").append({"step": 0, "weights_version": 0, "eval/a/avg@8": 0.5})
    assert page(tmp_path).count("Not recorded yet") == 7


def test_a_run_of_one_step_shows_its_only_dump_once(tmp_path: Path) -> None:
    assert page(write_fake_run(tmp_path / "run", steps=1)).count("of 256 responses") == 1


def test_a_torn_last_line_is_no_obstacle(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run", steps=2)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "trai')
    assert "<dt>Steps</dt><dd>2</dd>" in page(run)


def test_a_report_replaces_the_one_before(tmp_path: Path) -> None:
    run = write_fake_run(tmp_path / "run", steps=1)
    first = write_report(run, 8).read_bytes()
    assert write_report(run, 8).read_bytes() == first


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        write_report(tmp_path / "nothing", 8)


def test_reports_need_no_torch() -> None:
    code = "import sys, beamline.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
