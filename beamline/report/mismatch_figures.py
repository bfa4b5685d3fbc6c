"""The plots of what ``beamline mismatch`` found."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from beamline.report.figures import LOOK, Figure, Trace, axis
from beamline.report.mismatch import Cause, Mismatch, Routing, number, replay_share


def mismatch_figures(found: Mismatch) -> list[Figure]:
    """The plots: each cause alone, the way from learner to sampler, routes by layer, and what replay does to them.

    Engines that agree, and routes that are the same in both, have none.
    """
    plots = [_alone(found)]
    if found.observed.max:
        plots.append(_chain(found))
    if found.routing is not None and found.routing.any_layer:
        plots += [_layers(found.routing), _replay(found.routing)]
    return plots


def _alone(found: Mismatch) -> Figure:
    names = {cause.name: _label(cause) for cause in found.causes}
    seen = [cause.alone.mean for cause in found.causes if cause.alone and cause.alone.mean]
    low, high = (math.log10(edge) for edge in (min(seen, default=1e-8), max(seen, default=1e-7)))
    traces = [
        _bars([cause for cause in found.causes if cause.differs is differs], names, name, pattern)
        for differs, name, pattern in ((True, "differs between the engines", ""), (False, "what if it did", "/"))
    ]
    notes = [
        _at(names[cause.name], "0, exactly" if cause.alone else escape(cause.switched))
        for cause in found.causes
        if not cause.alone or not cause.alone.mean
    ]
    layout = _layout(
        xaxis=axis(
            "mean |Δ log p|, logarithmic", ".0e", type="log", range=[math.floor(low - 0.3), high + 0.8], dtick=1
        ),
        yaxis=axis("", range=[len(names) - 0.5, -0.5], categoryarray=list(names.values()), ticks="", showgrid=False),
        annotations=notes,
        barmode="overlay",
        legend=True,
    )
    note = (
        "How much the log-probability of a token changes when the learner's setup is switched in one respect alone. "
        "Striped: sampler and learner do not differ in this; it shows what if they did."
    )
    return Figure("mismatch-alone", "Each cause alone", note, [t for t in traces if t["x"]], layout, wide=True)


def _label(cause: Cause) -> str:
    words = f"{escape(cause.learner)} → {escape(cause.switched)}" if cause.alone else escape(cause.learner)
    return f"{escape(cause.name)}<br><span style='font-size:11px;color:var(--quiet)'>{words}</span>"


def _bars(causes: Sequence[Cause], names: dict[str, str], name: str, pattern: str) -> Trace:
    shown = [(names[cause.name], cause.alone) for cause in causes if cause.alone and cause.alone.mean]
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [label for label, _ in shown],
        "x": [alone.mean for _, alone in shown],
        "text": [number(alone.mean) for _, alone in shown],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [[alone.p99, alone.max] for _, alone in shown],
        "hovertemplate": "mean %{x:.2e}<br>99 % %{customdata[0]:.2e}<br>max %{customdata[1]:.2e}<extra></extra>",
        "marker": {"color": "var(--series-1)", "pattern": {"shape": pattern, "size": 6, "solidity": 0.35}},
    }


def _at(label: str, text: str) -> dict[str, Any]:
    """Words in place of a bar."""
    font = {"color": "var(--quiet)"}
    return {"x": 0, "xref": "paper", "xanchor": "left", "y": label, "text": text, "showarrow": False, "font": font}


class _Bar(NamedTuple):
    """A bar of the chain, from ``left`` up to ``top``."""

    name: str
    top: float
    left: float
    text: str
    color: str


def _chain(found: Mismatch) -> Figure:
    bars = _steps(found)
    trace = {
        "type": "bar",
        "x": [bar.name for bar in bars],
        "base": [bar.left for bar in bars],
        "y": [bar.top - bar.left for bar in bars],
        "text": [bar.text for bar in bars],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": [[bar.top, bar.left] for bar in bars],
        "hovertemplate": "%{customdata[0]:.2e} → %{customdata[1]:.2e}<extra></extra>",
        "marker": {"color": [bar.color for bar in bars]},
    }
    note = (
        "The mean difference from what the sampler wrote down, as the learner's setup becomes the sampler's one cause "
        "after another. A percentage is the part of the whole that a step takes away."
    )
    layout = _layout(xaxis=axis("", showgrid=False), yaxis=axis("mean |Δ log p|", rangemode="tozero"))
    return Figure("mismatch-chain", "From learner to sampler", note, [trace], layout, wide=True)


def _steps(found: Mismatch) -> list[_Bar]:
    """The whole difference, what each step takes away of it or adds to it, and what is left."""
    before = whole = found.observed.mean
    bars = [_Bar("as they are", whole, 0.0, number(whole), "var(--series-grey)")]
    for cause in found.causes:
        if cause.left is not None:
            text = f"{(before - cause.left) / whole:.1%}" if cause.change else "0, exactly"
            color = "var(--series-1)" if cause.left <= before else "var(--series-6)"
            bars.append(_Bar(escape(cause.name), before, cause.left, text, color))
            before = cause.left
    return [*bars, _Bar("left", found.residual, 0.0, number(found.residual), "var(--series-grey)")]


def _layers(routing: Routing) -> Figure:
    shares = {f"{layer.layer}": layer.share for layer in routing.layers} | {"any": routing.any_layer}
    trace = _plain_bars(list(shares), list(shares.values()), ".2%")
    trace["marker"]["color"] = ["var(--series-2)"] * len(routing.layers) + ["var(--series-grey)"]
    note = (
        f"Share of {routing.rows:,} rows, prompts included, for which sampler and learner choose different sets of "
        "experts when each chooses its own."
    )
    layout = _layout(
        xaxis=axis("layer", type="category", showgrid=False), yaxis=axis("share of rows", ".2~%", rangemode="tozero")
    )
    return Figure("mismatch-layers", "Routes by layer", note, [trace], layout)


def _replay(routing: Routing) -> Figure:
    names = ["each its own", "the sampler's in both (R3)", "the learner's in both"]
    trace = _plain_bars(names, [routing.free, routing.replayed, routing.forced], ".2g")
    trace["marker"]["color"] = ["var(--series-grey)", "var(--series-1)", "var(--series-2)"]
    note = "The mean difference of sampler and learner by whose experts each of them uses. "
    if routing.removed is None:
        note += "Too few routes differ to tell how much of it routing causes."
    else:
        note += f"R3 removes {replay_share(routing)} of what routing causes: of the way from the first bar to the last."
    layout = _layout(xaxis=axis("", showgrid=False), yaxis=axis("mean |Δ log p|", rangemode="tozero"))
    return Figure("mismatch-replay", "What replayed routes do", note, [trace], layout)


def _plain_bars(names: list[str], values: list[float], form: str) -> Trace:
    return {
        "type": "bar",
        "x": names,
        "y": values,
        "text": [f"{value:{form}}" if value else "0" for value in values],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"%{{y:{form}}}<extra></extra>",
        "marker": {},
    }


def _layout(legend: bool = False, **options: Any) -> dict[str, Any]:
    return (
        LOOK
        | {
            "margin": {"l": 56, "r": 12, "t": 36 if legend else 24, "b": 44},
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
            "bargap": 0.35,
        }
        | options
    )
