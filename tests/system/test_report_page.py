"""The report in a real browser: every plot is drawn, no script fails, nothing is asked of the network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from beamline.report import MetricsWriter, rollouts_path, write_report, write_rollouts
from tests.fake_run import fake_row, write_fake_run

TIMEOUT = 120
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LINES = {
    "reward": 1,
    "response-length": 3,
    "mismatch": 3,
    "correction": 3,
    "entropy": 5,
    "clip-share": 2,
    "divergence": 1,
    "grad-norm": 1,
    "accuracy": 7,
}
BANDS = {"reward": 1, "accuracy": 2}
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=10000",
    "--window-size=1280,2400",
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


def rendered(page: Path, profile: Path, *switches: str) -> str:
    """The document as it stands after its scripts have run; the source of plotly.js is left out."""
    assert BROWSER is not None
    command = [BROWSER, *SWITCHES, *switches, f"--user-data-dir={profile}", "--dump-dom", page.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", done.stdout, flags=re.DOTALL)


def plots(dom: str) -> dict[str, str]:
    """What stands inside of each plot, by its name."""
    starts = [(match[1], match.start()) for match in re.finditer(r'<div class="plot[^"]*" id="([^"]+)"', dom)]
    ends = [start for _, start in starts[1:]] + [dom.index("<h2>Sampled responses")]
    return {name: dom[start:end] for (name, start), end in zip(starts, ends, strict=True)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_fake_run(tmp_path_factory.mktemp("runs") / "arithmetic", dump_every=25)
    return write_report(run, samples=8)


@pytest.fixture(scope="module")
def dom(report: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return rendered(report, tmp_path_factory.mktemp("profile"))


def test_all_plots_are_drawn_without_an_error(dom: str) -> None:
    [root] = re.findall(r"<html[^>]*>", dom)
    assert 'data-ready="10"' in root
    assert "data-error" not in root


@pytest.mark.parametrize("name", LINES)
def test_a_plot_holds_its_lines_and_bands(dom: str, name: str) -> None:
    plot = plots(dom)[name]
    assert 'class="main-svg"' in plot
    assert len(re.findall(r'<path class="js-line"[^>]*d="M[^"]+L', plot)) == LINES[name] + BANDS.get(name, 0)
    assert len(re.findall(r'<path class="js-fill"[^>]*d="M[^"]+L', plot)) == BANDS.get(name, 0)


def test_the_time_of_each_step_is_a_stack_of_bars(dom: str) -> None:
    bars = re.findall(r'<g class="point"><path[^>]*d="M[^"]+Z"', plots(dom)["timing"])
    assert len(bars) >= 50 * 6


def test_the_page_refers_to_no_address_outside_itself(dom: str) -> None:
    addresses = re.findall(r"""(?:src|href)=["']([^"'#]*)""", dom) + re.findall(r"""url\(["']?([^)"']+)""", dom)
    assert [address for address in addresses if not address.startswith(("data:", "#", "file://"))] == []


def test_colors_follow_the_scheme_of_the_reader(report: Path, dom: str, tmp_path: Path) -> None:
    dark = rendered(report, tmp_path, "--blink-settings=preferredColorScheme=0")
    light_line, dark_line = "rgb(63, 91, 216)", "rgb(139, 160, 255)"
    assert light_line in plots(dom)["entropy"]
    assert dark_line not in plots(dom)["entropy"]
    assert dark_line in plots(dark)["entropy"]


def test_a_response_cannot_run_a_script(tmp_path: Path) -> None:
    MetricsWriter(tmp_path / "metrics.jsonl").append({"step": 1, "train/accuracy": 0.5})
    evil = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    write_rollouts(rollouts_path(tmp_path, 1), [fake_row(0, evil)])
    dom = rendered(write_report(tmp_path, samples=1), tmp_path / "profile")
    assert "<title>taken" not in dom
    assert "&lt;script&gt;document.title" in dom
    assert 'data-ready="1"' in dom


def test_an_empty_run_has_a_page_without_errors(tmp_path: Path) -> None:
    dom = rendered(write_report(tmp_path, samples=8), tmp_path / "profile")
    assert 'data-ready="0"' in dom
    assert "data-error" not in re.findall(r"<html[^>]*>", dom)[0]
