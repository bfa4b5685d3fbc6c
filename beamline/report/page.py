"""``report.html``: one file that shows a run, opens offline and asks nothing of the network."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jinja2
import yaml
from plotly.offline import get_plotlyjs

from beamline.checkpoint.files import write_atomic
from beamline.data.wording import bare
from beamline.report.figures import Figure, figures
from beamline.report.metrics import DamagedFileError, read_metrics
from beamline.report.mismatch import (
    Mismatch,
    conclusion,
    mismatch_headlines,
    number,
    read_mismatch,
)
from beamline.report.mismatch_figures import mismatch_figures
from beamline.report.problems import read_results
from beamline.report.rollouts import find_rollouts, read_rollouts
from beamline.report.summary import Sample, cautions, choose_samples, headlines

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"bare": bare, "difference": number}
_MOST_PROBLEMS = 500  # of a set that are listed


@dataclass(frozen=True, slots=True)
class _Dump:
    """What is shown of one rollout dump."""

    step: int
    rows: int
    samples: list[Sample]


def write_report(run: Path, samples: int) -> Path:
    """Write ``<run>/report.html`` from what the run has on disk so far, and return its path.

    ``samples`` responses are shown of the first and of the last rollout dump. What the run has not recorded yet is
    named on the page as missing.

    Raises:
        FileNotFoundError: ``run`` is not a folder.
        ValueError: the metrics or a rollout dump are damaged.
        yaml.YAMLError: the configuration is damaged.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"report: {run} is not the folder of a run")
    path = run / "report.html"
    write_atomic(path, [_render(run, samples).encode()])
    return path


def _render(run: Path, samples: int) -> str:
    metrics, config = run / "metrics.jsonl", run / "config.yaml"
    lines = read_metrics(metrics) if metrics.exists() else []
    config_text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    settings = _settings(config, config_text)
    plots = figures(lines) if lines else []
    explained = _explained(read_mismatch(run))
    return _ENVIRONMENT.get_template("report.html.j2").render(
        name=settings.get("name", run.resolve().name),
        model=settings.get("model", {}).get("path", ""),
        lines=len(lines),
        headlines=headlines(lines, settings.get("steps")) if lines else [],
        cautions=cautions(lines) if lines else [],
        figures=plots,
        figure_data=_drawn([*plots, *explained["mismatch_figures"]]),
        evaluations=read_results(run),
        most_problems=_MOST_PROBLEMS,
        dumps=_dumps(run, samples),
        config=config_text,
        plotly=get_plotlyjs(),
        **explained,
    )


def write_mismatch_page(folder: Path, found: Mismatch) -> Path:
    """Write ``mismatch.html`` into a folder, a page of its own with what was found, and return its path."""
    path, explained = folder / "mismatch.html", _explained(found)
    page = _ENVIRONMENT.get_template("mismatch.html.j2").render(
        name=found.model,
        figure_data=_drawn(explained["mismatch_figures"]),
        plotly=get_plotlyjs(),
        **explained,
    )
    write_atomic(path, [page.encode()])
    return path


def _explained(found: Mismatch | None) -> dict[str, Any]:
    """What the template of the section takes."""
    return {
        "mismatch": found,
        "mismatch_conclusion": conclusion(found) if found else "",
        "mismatch_headlines": mismatch_headlines(found) if found else [],
        "mismatch_figures": mismatch_figures(found) if found else [],
    }


def _drawn(plots: list[Figure]) -> list[dict[str, Any]]:
    return [asdict(plot) for plot in plots if plot.traces]


def _settings(path: Path, text: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(text) or {}
        return {**settings, "model": {**(settings.get("model") or {})}}
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise DamagedFileError(f"{path} is not a run's configuration: {error}") from error


def _dumps(run: Path, samples: int) -> list[_Dump]:
    """Samples of the first and the last dump: none, one or two."""
    paths = find_rollouts(run)
    chosen = []
    for path in dict.fromkeys(paths[:1] + paths[-1:]):
        rows = read_rollouts(path)
        if rows:
            chosen.append(_Dump(rows[0]["step"], len(rows), choose_samples(rows, samples)))
    return chosen
