"""docs/metrics.md and METRICS name the same metrics."""

import re
from pathlib import Path

import pytest

from beamline.report.figures import PHASES
from beamline.report.names import METRICS, is_metric

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


DEFINITIONS, ALIASES = DOCS.read_text().split("\n## Names elsewhere\n")


def test_every_metric_is_documented_once_and_nothing_else_is() -> None:
    documented = re.findall(r"^\| `([a-z_]+/[^`]*|step|weights_version)` \|", DEFINITIONS, re.MULTILINE)
    assert documented == list(METRICS)


def test_every_metric_has_its_names_elsewhere_or_is_said_to_have_none() -> None:
    table, without = ALIASES.split("No counterpart in any of the three:")
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = [name for text in (*rows, without) for name in re.findall(r"`([^`]+)`", text)]
    assert sorted(named) == sorted(METRICS)


@pytest.mark.parametrize(
    "name", ["step", "policy/lr", "eval/aime-2025/avg@16", "eval/a b/avg@8_low", "eval/x/ungraded"]
)
def test_names_with_their_places_filled_are_metrics(name: str) -> None:
    assert is_metric(name)


@pytest.mark.parametrize(
    "name", ["lr", "policy/lr2", "eval/avg@8", "eval/x/avg@0", "eval/x/y/avg@8", "eval/<set>/avg@<k>"]
)
def test_other_names_are_not(name: str) -> None:
    assert not is_metric(name)


def test_the_phases_of_the_timing_plot_are_metrics() -> None:
    assert all(is_metric(f"timing/{phase}") for phase in PHASES)
