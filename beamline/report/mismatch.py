"""``mismatch.json``: why sampler and learner disagree, cause by cause, and what the page says of it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from beamline.checkpoint.files import write_json
from beamline.report.metrics import DamagedFileError
from beamline.report.summary import Headline

_NAME = "mismatch.json"
_LEAST_SHARE = 0.005  # of the difference that a cause explains to be named in the conclusion


@dataclass(frozen=True, slots=True)
class Size:
    """Absolute changes of the log-probability of a token: mean, 99 % quantile and largest of all tokens."""

    mean: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Cause:
    """Something by which two engines can differ, and what it does to log-probabilities.

    ``learner`` and ``sampler`` say what each of them has, ``switched`` what the learner's setup was changed to in this
    one respect to measure ``alone``. Where the two do not differ that is a what-if. ``alone`` is None where there is
    nothing to switch to, and ``switched`` says why.
    ``change`` is the mean absolute change of the step that goes from learner to sampler in this respect too, after all
    causes before it; ``left`` is the mean absolute difference from the sampler that remains then. Both are None where
    the two do not differ.
    """

    name: str
    learner: str
    sampler: str
    differs: bool
    switched: str
    alone: Size | None
    change: float | None
    left: float | None


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """The share of rows for which learner and sampler choose different sets of experts in a layer."""

    layer: int
    share: float


@dataclass(frozen=True, slots=True)
class Routing:
    """What the choice of experts does, measured in the learner's types and on the sampler's kernels.

    Mean absolute differences between the two: ``free``, each with its own routes; ``replayed``, both with the
    sampler's (R3); ``forced``, both with the learner's. ``removed`` is the part of the difference by routing that R3
    removes, ``(free - replayed) / (free - forced)``, with its 95 % interval, a bootstrap over sequences. It is None
    where that interval of ``free - forced`` has no lower bound above 0: too few routes differ to tell.
    """

    rows: int
    layers: tuple[LayerRoutes, ...]
    any_layer: float
    free: float
    replayed: float
    forced: float
    removed: float | None
    removed_low: float | None
    removed_high: float | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What ``beamline mismatch`` found.

    ``settings`` are those that took the place of the subject's own. ``observed`` is the difference between what the
    sampler wrote down and what the learner computes; ``residual`` what of its mean no cause explains. ``routing`` is
    None for a model without experts.
    """

    model: str
    step: int
    settings: tuple[str, ...]
    seed: int
    r3: bool
    sequences: int
    tokens: int
    observed: Size
    causes: tuple[Cause, ...]
    residual: float
    routing: Routing | None


def as_json(found: Mismatch) -> dict[str, Any]:
    """The record as plain data."""
    return asdict(found)


def write_mismatch(folder: Path, found: Mismatch) -> Path:
    """Write ``mismatch.json`` into a folder, whole or not at all, and return its path."""
    path = folder / _NAME
    write_json(path, as_json(found))
    return path


def read_mismatch(folder: Path) -> Mismatch | None:
    """What was found of a run; None where nobody has looked.

    Raises:
        DamagedFileError: the file is not what was written.
    """
    path = folder / _NAME
    if not path.exists():
        return None
    try:
        return msgspec.convert(json.loads(path.read_bytes()), Mismatch)
    except (ValueError, msgspec.ValidationError) as error:
        raise DamagedFileError(f"{path} is not a record of beamline mismatch: {error}; run it again") from error


def number(value: float) -> str:
    """A difference of log-probabilities in two digits; only what is exactly 0 is called so."""
    return f"{value:.2g}" if value else "0"


def conclusion(found: Mismatch) -> str:
    """What was found, in a few sentences."""
    if not found.observed.max:
        return f"Sampler and learner agree to the last bit on all {found.tokens:,} tokens." + _largest_what_if(found)
    text = f"Sampler and learner differ by {number(found.observed.mean)} in the mean |Δ log p|"
    parts = [f"{name} explains {100 * share:.0f} %" for name, share in _shares(found) if abs(share) >= _LEAST_SHARE]
    parts.append(f"{number(found.residual)} is left" if found.residual else "nothing is left")
    return f"{text}: {', '.join(parts[:-1])}, and {parts[-1]}." + _of_replay(found)


def _largest_what_if(found: Mismatch) -> str:
    what_ifs = [(cause.alone.mean, cause) for cause in found.causes if cause.alone and not cause.differs]
    if not what_ifs:
        return ""
    mean, cause = max(what_ifs, key=lambda what_if: what_if[0])
    return f" Of what could come between them, the largest would be {cause.name} ({cause.switched}): {number(mean)}."


def _shares(found: Mismatch) -> list[tuple[str, float]]:
    """The part of the mean difference that each step takes away, the largest first."""
    shares, before = [], found.observed.mean
    for cause in found.causes:
        if cause.left is not None:
            value = f" ({cause.sampler})" if "type" in cause.name else ""
            shares.append((f"{cause.name}{value}", (before - cause.left) / found.observed.mean))
            before = cause.left
    return sorted(shares, key=lambda share: -share[1])


def _of_replay(found: Mismatch) -> str:
    routing = found.routing
    if routing is None or not routing.any_layer:
        return ""
    text = (
        f" R3 {'has taken' if found.r3 else 'would take'} it from {number(routing.free)} to {number(routing.replayed)}"
    )
    if routing.removed is None:
        return f"{text}; too few routes differ to say more."
    return f"{text}, which is {replay_share(routing)} of what routing causes."


def replay_share(routing: Routing) -> str:
    """The part of the difference by routing that R3 removes, with its interval."""
    if routing.removed is None or routing.removed_low is None or routing.removed_high is None:
        return "not measurable"
    return f"{100 * routing.removed:.0f} % [{100 * routing.removed_low:.0f}, {100 * routing.removed_high:.0f}]"


def mismatch_headlines(found: Mismatch) -> list[Headline]:
    """The numbers to read first."""
    seen, routing = found.observed, found.routing
    spread = f"99 % {number(seen.p99)}, max {number(seen.max)}" if seen.max else "to the last bit"
    cards = [Headline("Mean |Δ log p|", number(seen.mean), spread)]
    if routing is not None:
        cards.append(Headline("Rows with other experts", f"{routing.any_layer:.2%}", "in any layer"))
        if routing.any_layer:
            change = f"{number(routing.free)}\u00a0→\u00a0{number(routing.replayed)}"
            part = "too few routes differ to tell how much of it"
            if routing.removed is not None:
                part = f"{replay_share(routing)} of what routing causes"
            cards.append(Headline("Mean without and with R3", change, part))
    cards.append(Headline("Left unexplained", number(found.residual), "" if found.residual else "exactly"))
    return cards
