"""Every cause by which sampler and learner can differ: switched alone, then one after another."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beamline.config.schema import RunConfig
from beamline.mismatch.evaluator import Evaluator
from beamline.mismatch.frozen import Floats
from beamline.mismatch.setup import Setup, learner_setup, sampler_setup
from beamline.report.mismatch import Cause, Size


@dataclass(frozen=True, slots=True)
class _Switch:
    """One respect in which engines can differ: a field of their setups.

    Alone it is measured from ``base`` to the same with ``to`` in the field; where that is None, there is nothing to
    switch to. ``words`` say what it is switched to, or why it is not.
    """

    name: str
    field: str
    learner: str
    sampler: str
    differs: bool
    base: Setup
    to: Any
    words: str


def size(change: Floats) -> Size:
    """How large the changes ``[T]`` of tokens are."""
    absolute = np.abs(change)
    return Size(float(absolute.mean()), float(np.quantile(absolute, 0.99)), float(absolute.max()))


def causes(config: RunConfig, evaluate: Evaluator, other: str | None) -> tuple[list[Cause], Setup]:
    """Each cause, and the setup at the end of the chain, where everything is the sampler's.

    ``other`` says what the other weights are that ``evaluate`` has; None if it has none.
    """
    setup, end, found = learner_setup(config), sampler_setup(config), []
    for switch in _switches(config, evaluate, other):
        alone = change = left = None
        if switch.to is not None:
            alone = size(evaluate(replace(switch.base, **{switch.field: switch.to})) - evaluate(switch.base))
        before, setup = setup, replace(setup, **{switch.field: getattr(end, switch.field)})
        if switch.differs:
            change = size(evaluate(setup) - evaluate(before)).mean
            left = size(evaluate(setup) - evaluate.recorded).mean
        found.append(
            Cause(switch.name, switch.learner, switch.sampler, switch.differs, switch.words, alone, change, left)
        )
    return found, setup


def _switches(config: RunConfig, evaluate: Evaluator, other: str | None) -> Iterator[_Switch]:
    """In the order in which they are made. What is not the learner's engine is evaluated by the sampler's."""
    learner, sampler = learner_setup(config), sampler_setup(config)
    base = replace(learner, engine="sampler", packed=False)
    yield _batch_composition(config, learner)
    yield _kernels(evaluate, learner, base)
    yield _attention(learner)
    yield _routing(evaluate, base)
    for field, name, what_if in (
        ("dtype", "compute type", "bfloat16" if learner.dtype == "float32" else "float32"),
        ("kv_dtype", "KV cache type", "float8_e4m3"),
        ("head_dtype", "logits type", "bfloat16"),
    ):
        of_learner, of_sampler = getattr(learner, field), getattr(sampler, field)
        differs = of_learner != of_sampler
        to = of_sampler if differs else what_if
        yield _Switch(name, field, _type(of_learner), _type(of_sampler), differs, base, to, to)
    own, another = f"{learner.temperature:g}", 0.7 if learner.temperature == 1 else 1.0
    yield _Switch("temperature", "temperature", own, own, False, base, another, f"{another:g}")
    words = "there is no earlier checkpoint" if other is None else other
    yield _Switch("weights", "weights", "these", "these", False, base, None if other is None else "other", words)


def _type(name: str) -> str:
    return "as computed" if name == "same" else name


def _batch_composition(config: RunConfig, learner: Setup) -> _Switch:
    packed, alone = f"packed, {config.learner.micro_batch_tokens:,} rows", "each sequence alone"
    return _Switch("batch composition", "packed", packed, "any: bits do not depend on it", True, learner, False, alone)


def _kernels(evaluate: Evaluator, learner: Setup, base: Setup) -> _Switch:
    """Under parity there is nothing to switch as long as the sampler finds the bits of the learner."""
    kernels, module = "the sampler's", "Hugging Face module"
    of_learner = module if learner.engine == "module" else kernels
    differs = of_learner == module or not np.array_equal(evaluate(learner), evaluate(base))
    to, words = ("sampler", kernels) if differs else ("module", module)
    return _Switch("kernels", "engine", of_learner, kernels, differs, learner, to, words)


def _attention(learner: Setup) -> _Switch:
    own, torchs, base = "the sampler's", "torch's fused attention", replace(learner, engine="parity")
    if learner.dtype != "float32":
        return _Switch("attention kernel", "engine", torchs, own, False, base, None, "the pass on kernels is float32")
    of_learner = torchs if learner.engine == "module" else own
    return _Switch("attention kernel", "engine", of_learner, own, False, base, "torch attention", torchs)


def _routing(evaluate: Evaluator, base: Setup) -> _Switch:
    """Under R3 it is the same in both engines, and the what-if is to be without."""
    own, recorded = "its own choice", "the sampler's"
    learner = recorded if base.routes == "recorded" else own
    if not evaluate.shape.moe_layers:
        return _Switch("routing", "routes", "no experts", "no experts", False, base, None, "the model has no experts")
    pairs = zip(evaluate.routes("own"), evaluate.routes("recorded"), strict=True)
    if all(np.array_equal(own_routes, recorded_routes) for own_routes, recorded_routes in pairs):
        what_if = "as a bfloat16 sampler"
        return _Switch("routing", "routes", learner, recorded, False, base, "bfloat16", what_if)
    if base.routes == "recorded":
        return _Switch("routing", "routes", learner, recorded, False, base, "own", own)
    return _Switch("routing", "routes", learner, recorded, True, base, "recorded", recorded)
