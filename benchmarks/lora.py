"""Adapters and route replay: what they reach, and what they cost.

    python -m benchmarks.lora

``unmerged``: the embedded sampler with an adapter of rank 16 beside the starter's weights, against itself with the
adapter merged into them; the same prompts and response lengths, and the same tokens but for rounding. ``r3``: a whole
step of the quickstart's size (sampling, checks, update) with route replay, against one without; the learning rate is 0,
so that every round draws the same tokens. ``learning``: 20 steps of the quickstart by the real command line, every
weight against adapters (``recipes/quickstart-lora.yaml``), with the accuracy before and after and its 95 % interval.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from beamline.algorithms.loss import LossConfig
from beamline.chat import BeamChat
from beamline.config import load_config
from beamline.config.schema import RunConfig
from beamline.policy.weights import named_tensors
from beamline.records import Experience, SamplingParams
from beamline.report import read_metrics
from beamline.rollout import collect
from beamline.runtime.engines import build, check_model, load_adapters, load_models, load_module, sampler_of
from beamline.starter import STARTER
from benchmarks.harness import OURS, Apart, Comparison, Figures, comparison_table, paired, parser, record, train, write
from benchmarks.sampling import prompts
from benchmarks.workload import LONGEST, SEED, as_ours, lengths, problems, requests, run_config, sample

RANK = 16
TARGETS = {"unmerged": 0.8, "r3": 1 / 1.05}
PROBLEMS, SAMPLES = 32, 8  # of the quickstart's step
STEPS, SEEDS = 20, 3
AVERAGE = "eval/arithmetic/avg@8"
RECIPES = {"every weight": "quickstart", "adapters of rank 16": "quickstart-lora"}


class Sampling:
    """Sampling with an adapter, unmerged or merged into the weights."""

    def __init__(self, merged: bool) -> None:
        as_ours()
        config, tokens = with_policy(run_config(LONGEST), lora={"rank": RANK}), lengths(512)
        module, adapters = load_module(config), load_adapters(config)
        assert adapters is not None
        generator = torch.Generator().manual_seed(SEED)
        for b in adapters.b:
            b.data.normal_(0, 0.01, generator=generator)
        if merged:
            adapters.merge_into(named_tensors(module))
            config = run_config(LONGEST)
        self._sampler = sampler_of(config, module, 0, None if merged else adapters)
        self._asked = requests(problems(len(tokens)), prompts(len(tokens)), tokens)
        self._tokens = sum(tokens)

    def __call__(self) -> Figures:
        start = time.perf_counter()
        sample(self._sampler, self._asked)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens_per_s": self._tokens / seconds}


class Step:
    """A step: samples of the quickstart's problems, and one update from them."""

    def __init__(self, r3: bool) -> None:
        as_ours()
        config = load_config(
            Path("recipes/quickstart.yaml"), ["learner.optimizer.lr=0", f"policy.r3={str(r3).lower()}"]
        )
        self._config, self._chat, self._engines = config, BeamChat(STARTER), build(config, load_models(config))
        self._routes = check_model(config) if r3 else None
        self._engines.sync(version=0)

    def __call__(self) -> Figures:
        config, start = self._config, time.perf_counter()
        params = SamplingParams(config.rollout.max_response_tokens, stop_ids=self._chat.stop_ids)
        job = collect.Job("train", 1, problems(PROBLEMS), SAMPLES, params, routes_of=self._routes)
        groups = collect.sample(self._engines.sampler, job, self._chat, config.rollout.deadline_seconds)
        batch = [
            Experience(rollout, 1.0 - 2.0 * (i % 2), group=number)
            for number, group in enumerate(groups)
            for i, rollout in enumerate(group.rollouts)
        ]
        loss = LossConfig(config.algorithm, config.rollout.max_response_tokens, config.seed, on_policy=True)
        self._engines.learner.step(self._engines.learner.prepare(batch, loss))
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens_per_s": sum(e.rollout.response_tokens for e in batch) / seconds}


def main() -> None:
    """Measure and write the results."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--out", type=Path, default=Path("build/bench/lora"), help="where the runs go")
    arguments = options.parse_args()
    comparisons = {
        "unmerged": _in_turn(partial(Sampling, False), partial(Sampling, True), arguments.rounds, "unmerged"),
        "r3": _in_turn(partial(Step, True), partial(Step, False), arguments.rounds, "r3"),
    }
    learning = {
        name: [_learned(recipe, seed, arguments.out) for seed in range(SEEDS)] for name, recipe in RECIPES.items()
    }
    workloads = {name: record(found, TARGETS[name]) for name, found in comparisons.items()}
    table = comparison_table("adapters and route replay", comparisons, TARGETS, "tokens_per_s", "tokens/s")
    write("lora", {"workloads": workloads, "learning": learning}, table, arguments.results)
    Console().print(_table(learning))


def with_policy(config: RunConfig, **policy: Any) -> RunConfig:
    """A configuration whose section ``policy`` says this and nothing else."""
    return RunConfig.model_validate(config.model_dump() | {"policy": policy})


def _in_turn(ours: Any, peer: Any, rounds: int, label: str) -> Comparison:
    with Apart(ours, OURS) as one, Apart(peer, OURS) as other:
        return paired(one, other, rounds, label=label)


def _learned(recipe: str, seed: int, out: Path) -> dict[str, Any]:
    folder = out / f"{recipe}-{seed}"
    settings = [f"steps={STEPS}", f"evaluation.every={STEPS}", "checkpoint.export=false", "report.every=0"]
    train(recipe, [f"seed={seed}", *settings], folder)
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if AVERAGE in line]
    return {
        "seed": seed,
        "before": lines[0][AVERAGE],
        "after": lines[-1][AVERAGE],
        "interval": [lines[-1][f"{AVERAGE}_low"], lines[-1][f"{AVERAGE}_high"]],
    }


def _table(learning: dict[str, list[dict[str, Any]]]) -> Table:
    table = Table("trained", "seed", "before", f"after {STEPS} steps", "95 % interval")
    for name, runs in learning.items():
        for run in runs:
            interval = "[{:.1%}, {:.1%}]".format(*run["interval"])
            table.add_row(name, str(run["seed"]), f"{run['before']:.1%}", f"{run['after']:.1%}", interval)
        table.add_row(name, "mean", "", f"{sum(run['after'] for run in runs) / len(runs):.1%}", "")
    return table


if __name__ == "__main__":
    main()
