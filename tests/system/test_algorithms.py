"""Every algorithm and every option of one does its part in the real command line."""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from beamline.config import load_config
from beamline.config.keys import Shape, root
from beamline.records import Completion
from beamline.report import read_metrics, reproducible
from beamline.rollout.local import LocalSampler
from beamline.runtime import engines
from beamline.starter import STARTER
from tests.system.conftest import Cli, Ended
from tests.system.runs import QUICKSTART, ROOT, newest, tensors

SMALL = (
    "data.train.problems=64",
    "data.evaluation={}",
    "rollout.max_response_tokens=56",  # hardly more than an answer needs: some responses are cut
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=5",
    "algorithm.prompts_per_update=2",
    "learner.optimizer.lr=1e-4",
    "learner.optimizer.warmup_updates=0",  # so that ratios of the second update are beyond the clips
    "evaluation.before_training=false",
    "checkpoint={every: 0, export: false}",
    "report={every: 0, rollouts_every: 0}",
    "reward.grading.workers=1",
    "runtime.threads=1",
)
STEPS = 5
"""Steps of a run: the second update of each is off-policy, and from the second on the policy is not the reference."""


@dataclass(frozen=True)
class Trained:
    """What a run came to: its steps without what is not reproducible, and hashes of what its learner saved."""

    lines: list[dict[str, Any]]
    weights: Mapping[str, str]

    def values(self, key: str) -> list[float]:
        """A metric of the steps that have it."""
        return [line[key] for line in self.lines if key in line]

    @property
    def keys(self) -> set[str]:
        """All metrics that a step has."""
        return {key for line in self.lines for key in line}


Train = Callable[..., Trained]


def train_in(folder: Path, cli: Cli, overrides: Sequence[str], steps: int = STEPS) -> Ended:
    return cli("train", QUICKSTART, f"output={folder}", f"steps={steps}", *SMALL, *overrides)


@pytest.fixture(scope="module")
def done() -> dict[tuple[object, ...], Trained]:
    """The runs that were made; a run is the same bytes for all who ask for it."""
    return {}


@pytest.fixture
def train(cli: Cli, tmp_path: Path, done: dict[tuple[object, ...], Trained], monkeypatch: pytest.MonkeyPatch) -> Train:
    def train(*overrides: str, noisy: bool = False) -> Trained:
        key = (*overrides, noisy)
        if key not in done:
            folder = tmp_path / f"run-{len(done)}"
            with monkeypatch.context() as patched:
                if noisy:
                    distort_logprobs(patched, noise)
                ended = train_in(folder, cli, (*overrides, *(["algorithm.guard.mismatch=null"] * noisy)))
            assert ended.code == 0, ended.err
            lines = [reproducible(line) for line in read_metrics(folder / "metrics.jsonl")]
            assert [line["step"] for line in lines] == list(range(STEPS + 1))
            done[key] = Trained(lines[1:], tensors(newest(folder)))
        return done[key]

    return train


def distort_logprobs(patched: pytest.MonkeyPatch, noise: Callable[[Completion], NDArray[np.float32]]) -> None:
    """Have the sampler say what is not so: ``noise`` is added to its log-probabilities."""
    original = LocalSampler.poll

    def poll(sampler: LocalSampler, timeout: float) -> list[Completion]:
        return [replace(done, logprobs=done.logprobs + noise(done)) for done in original(sampler, timeout)]

    patched.setattr(LocalSampler, "poll", poll)


def noise(done: Completion) -> NDArray[np.float32]:
    """A disagreement, the same in every run, in which each rule of correction finds tokens on both sides of its bounds.

    Tokens go up and down by turns, so that whole responses are nearly as they should be. One sample of a group drifts,
    by more than the geometric mask allows and less than the product mask. Two have an outlier: one that the veto finds,
    and one that it finds only with half its bounds.
    """
    tokens = np.resize([0.9, -0.9, 0.5, -0.5], len(done.token_ids)) + {1: 0.0115}.get(done.key.sample, 0.0)
    tokens[0] -= {3: 7.0, 4: 5.0}.get(done.key.sample, 0.0)
    return tokens.astype(np.float32)


# The choices there are, out of the schema.


def variants(shape: Shape, prefix: str) -> list[tuple[str, ...]]:
    """The override that chooses each variant but that of the quickstart, of each section and switch below."""
    if shape.discriminator is not None:
        return [(f"{prefix}={name}",) for name in shape.variants]
    if shape.fields:
        return [each for name, child in shape.fields.items() for each in variants(child, f"{prefix}.{name}")]
    return [(f"{prefix}={value}",) for value in others(shape)]


def options(shape: Shape, prefix: str) -> list[tuple[str, ...]]:
    """For each variant of each section below: each other value of each of its switches, and all its numbers halved."""
    if not shape.variants:
        return [each for name, child in shape.fields.items() for each in options(child, f"{prefix}.{name}")]
    made: list[tuple[str, ...]] = []
    for name, variant in shape.variants.items():
        fields = {f"{prefix}.{key}": field for key, field in variant.fields.items() if key not in NO_OPTION}
        switches = [f"{key}={value}" for key, field in fields.items() for value in others(field)]
        numbers = [f"{key}={halved(field)}" for key, field in fields.items() if halved(field)]
        made += [(f"{prefix}={name}", switch) for switch in switches] + (
            [(f"{prefix}={name}", *numbers)] * bool(numbers)
        )
    return made


def others(field: Shape) -> list[str]:
    """The values of a switch that are not its default."""
    values = ["true", "false"] if field.spec.get("type") == "boolean" else field.spec.get("enum", [])
    return [value for value in values if value != str(field.default).lower()]


def halved(field: Shape) -> str:
    """Half of a number, or a number just inside of the bound of one that is not set; empty for what is none."""
    if isinstance(field.default, bool) or not isinstance(field.default, int | float | None):
        return ""
    if field.default is None:
        return str(0.01 + next(kind["exclusiveMinimum"] for kind in field.spec["anyOf"] if "exclusiveMinimum" in kind))
    return str(field.default // 2 if field.spec["type"] == "integer" else field.default / 2)


def algorithm(walk: Callable[[Shape, str], list[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """What ``walk`` finds in the settings of the algorithm; strategies of sampling have tests of their own."""
    fields = root().fields["algorithm"].fields
    return [each for name, field in fields.items() if name != "sampling" for each in walk(field, f"algorithm.{name}")]


NO_OPTION = {"name", "place", "anchor"}
"""What chooses a variant, and what all losses share: it has tests of its own."""
VARIANTS, OPTIONS = algorithm(variants), algorithm(options)
PLAIN = load_config(QUICKSTART).model_dump(mode="json")
LOSSES = list(root().fields["algorithm"].fields["loss"].variants)

AROUND = {
    r"algorithm.advantage=(maxrl|pass_at_k)": ["reward.wrong=0", "reward.overlong.buffer_tokens=0"],
    r"algorithm.renormalize_after_mask": ["algorithm.mask_truncated=true"],
    r"algorithm.loss=dppo algorithm.loss.divergence": ["algorithm.loss.threshold=0.01"],
    r"algorithm.loss=dppo algorithm.loss.threshold": ["learner.optimizer.lr=1e-3"],
    r"algorithm.loss=gspo algorithm.loss.clip": ["learner.optimizer.lr=3e-6"],
    r"algorithm.kl=loss algorithm.kl.estimator": ["algorithm.kl.unbiased_gradient=false"],
}
"""What a choice needs around it, so that it is allowed and makes a difference."""


def around(choice: Sequence[str]) -> list[str]:
    return next((needed for pattern, needed in AROUND.items() if re.match(pattern, " ".join(choice))), [])


def noisy(choice: Sequence[str]) -> bool:
    """Whether a choice is about differences between the engines, of which there are none."""
    return choice[0].startswith("algorithm.correction")


def default_of(choice: Sequence[str]) -> bool:
    """Whether a choice is what the quickstart is already."""
    key, _, value = choice[0].partition("=")
    chosen: Any = PLAIN
    for part in key.split("."):
        chosen = chosen[part]
    return value in (chosen.get("name"), chosen.get("place")) if isinstance(chosen, dict) else value == chosen


EXTRA = {
    r"algorithm.correction.weight=tis": {"correction/capped_share"},
    r"algorithm.correction.weight=(mis|icepop)": {"correction/dropped_share_weight"},
    r"algorithm.correction.sequence_mask": {"correction/dropped_share_sequence_mask"},
    r"algorithm.correction.veto": {"correction/dropped_share_veto"},
    r"algorithm.kl=reward": {"train/kl_penalty_mean"},
    r"algorithm.kl=loss": {"policy/kl_reference"},
}
"""Metrics that ``docs/metrics.md`` promises with a choice."""
CORRECTION = {"correction/kept_share", "correction/weight_mean", "correction/weight_max"}


def promised(choice: Sequence[str]) -> set[str]:
    extra = next((keys for pattern, keys in EXTRA.items() if re.match(pattern, choice[0])), set())
    return extra | (CORRECTION if choice[0].startswith("algorithm.correction") else set())


# What each does.


@pytest.mark.parametrize("choice", [each for each in VARIANTS if not default_of(each)], ids=" ".join)
def test_every_variant_learns_otherwise_than_the_quickstart(choice: tuple[str, ...], train: Train) -> None:
    run = partial(train, *around(choice), noisy=noisy(choice))
    plain, chosen = run(), run(*choice)
    if choice[0].startswith("algorithm.guard"):
        assert chosen == plain
        return
    assert chosen.weights != plain.weights
    assert chosen.values("policy/updates")[-1] > 0
    new = {key for key in chosen.keys - plain.keys if "kept_share_length" not in key}
    assert new == promised(choice)


@pytest.mark.parametrize("choice", OPTIONS, ids=" ".join)
def test_every_option_of_a_variant_changes_what_is_learned(choice: tuple[str, ...], train: Train) -> None:
    variant = [each for each in choice[:1] if not default_of(choice)]
    run = partial(train, *around(choice), *variant, noisy=noisy(choice))
    assert run(*choice[1:]).weights != run().weights


@pytest.mark.parametrize("section", ["loss", "advantage", "aggregation", "kl", "correction"])
def test_no_two_variants_are_the_same(section: str, train: Train) -> None:
    choices = [each for each in VARIANTS if each[0].startswith(f"algorithm.{section}") and not default_of(each)]
    runs = {
        " ".join(choice): (around(choice), train(*around(choice), *choice, noisy=noisy(choice)).weights)
        for choice in choices
    }
    same = [(a, b) for a, b in combinations(runs, 2) if runs[a] == runs[b]]
    assert same == []


CORRECTIONS = [
    "{weight: tis, sequence_mask: geometric}",
    "{weight: {name: mis, level: sequence}, sequence_mask: product}",
    "{weight: icepop, veto: outlier}",
]


@pytest.mark.parametrize("rules", CORRECTIONS)
def test_where_the_engines_agree_no_correction_changes_a_byte(rules: str, train: Train) -> None:
    corrected = train(f"algorithm.correction={rules}")
    assert corrected.weights == train().weights
    assert set(corrected.values("correction/kept_share") + corrected.values("correction/weight_max")) == {1.0}


@pytest.mark.parametrize("loss", LOSSES)
def test_where_the_engines_agree_it_does_not_matter_which_a_loss_compares_with(loss: str, train: Train) -> None:
    other = next(iter(others(root().fields["algorithm"].fields["loss"].variants[loss].fields["anchor"])))
    chosen = [] if loss == "clip" else [f"algorithm.loss={loss}"]
    assert train(f"algorithm.loss={{name: {loss}, anchor: {other}}}").weights == train(*chosen).weights


def test_where_they_do_not_agree_it_matters(train: Train) -> None:
    learner, sampler = (train(f"algorithm.loss.anchor={each}", noisy=True) for each in ("learner", "sampler"))
    assert learner.weights == train().weights
    assert learner.weights != sampler.weights
    assert sampler.values("policy/kl_old") != learner.values("policy/kl_old")


def test_with_exact_engines_the_first_ratio_is_1_and_the_mismatch_exactly_0(train: Train) -> None:
    run = train("algorithm.prompts_per_update=4")
    assert set(run.values("mismatch/logprob_abs_diff_max")) == {0.0}
    assert set(run.values("mismatch/ratio_mean")) == {1.0}
    for key in ("policy/kl_old", "policy/clip_share_low", "policy/clip_share_high"):
        assert set(run.values(key)) == {0.0}


FILTERS = {"rollout.top_p=0.9": 0.7, "rollout.top_k=2": 1.3, "rollout.min_p=0.1": 1.3, "rollout.min_tokens=54": 1.3}
"""Filters of the sampler, and the temperature they are tried at."""


@pytest.mark.parametrize("choice", FILTERS)
def test_with_the_support_recorded_a_filter_changes_what_is_drawn_and_leaves_no_mismatch(
    choice: str, train: Train
) -> None:
    temperature = f"rollout.temperature={FILTERS[choice]}"
    run = train(temperature, "rollout.record_support=true", choice)
    assert run.weights != train(temperature).weights
    assert run.values("policy/updates")[0] == 2
    assert set(run.values("mismatch/logprob_abs_diff_max")) == {0.0}
    assert set(run.values("mismatch/ratio_mean")) == {1.0}


def test_the_temperature_changes_what_is_drawn(train: Train) -> None:
    assert train("rollout.temperature=0.7").weights != train("rollout.temperature=1.3").weights


def test_a_support_that_holds_everything_changes_nothing(train: Train) -> None:
    everything = ("rollout.record_support=true", "rollout.top_k=100000")
    assert train(*everything).weights == train().weights


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(
    ("place", "metric", "sign"), [("reward", "train/kl_penalty_mean", -1.0), ("loss", "policy/kl_reference", 1.0)]
)
def test_the_divergence_from_the_reference_grows_from_exactly_0(
    place: str, metric: str, sign: float, estimator: str, train: Train
) -> None:
    once = ["algorithm.prompts_per_update=4"] * (place == "loss")  # its values are of all updates of a step
    first, *later = train(*once, f"algorithm.kl={place}", f"algorithm.kl.estimator={estimator}").values(metric)
    assert first == 0
    assert all(later)
    if estimator != "k1":  # of which a single value may have either sign
        assert all(sign * value > 0 for value in later)


@pytest.mark.parametrize(("place", "models"), [("none", 1), ("reward", 2), ("loss", 2)])
def test_a_reference_model_is_loaded_only_for_a_penalty(
    place: str, models: int, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    original = engines.load_module
    monkeypatch.setattr(engines, "load_module", lambda config: loaded.append(config) or original(config))
    ended = train_in(tmp_path, cli, [f"algorithm.kl={place}"], steps=1)
    assert ended.code == 0, ended.err
    assert len(loaded) == models


def test_a_learning_rate_of_0_leaves_the_model_as_it_was(cli: Cli, tmp_path: Path) -> None:
    kl = ("algorithm.kl={place: loss, coefficient: 1}", "learner.optimizer.lr=0")
    assert train_in(tmp_path, cli, kl).code == 0
    files = newest(tmp_path).glob("policy/*.safetensors")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    given = load_file(STARTER / "model.safetensors")
    differing = [name for name in given if not torch.equal(given[name].float(), saved[name])]
    assert (saved.keys(), differing) == (given.keys(), [])
    lines = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert all(line["policy/lr"] == line["policy/kl_old"] == line["policy/kl_reference"] == 0 for line in lines)
    assert lines[-1]["policy/updates"] == 2 * len(lines)


def test_responses_that_were_cut_are_masked_and_stay_in_the_denominator_unless_asked(train: Train) -> None:
    masked = train("algorithm.mask_truncated=true")
    renormalized = train("algorithm.mask_truncated=true", "algorithm.renormalize_after_mask=true")
    first, other, plain = masked.lines[0], renormalized.lines[0], train().lines[0]
    cut = first["train/truncated_share"] * first["train/graded"]
    assert cut > 0
    assert first["policy/counted_tokens"] - first["policy/kept_tokens"] == cut * 56
    assert plain["policy/counted_tokens"] == plain["policy/kept_tokens"] == first["policy/counted_tokens"]
    assert [other[key] for key in ("policy/counted_tokens", "policy/kept_tokens")] == [
        first[key] for key in ("policy/counted_tokens", "policy/kept_tokens")
    ]
    assert masked.weights != renormalized.weights


def test_the_metrics_that_are_always_promised_are_there(train: Train) -> None:
    tables = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `((?:train|policy|mismatch)/[^`<]+)` \|.*\| ([^|]+) \|$", tables, re.MULTILINE)
    present = {name for name, when in rows if "with `" not in when}
    assert len(present) > 40
    assert present - set(train().lines[0]) == set()


def test_a_run_of_off_policy_corrections_is_the_same_bytes_again(cli: Cli, tmp_path: Path, train: Train) -> None:
    overrides = (
        "algorithm.loss=clip_cov",
        "algorithm.correction={weight: icepop, sequence_mask: product, veto: outlier}",
        "algorithm.kl={place: loss, estimator: k2}",
    )
    first = train(*overrides)
    assert train_in(tmp_path / "again", cli, overrides).code == 0
    again = [reproducible(line) for line in read_metrics(tmp_path / "again" / "metrics.jsonl")][1:]
    assert Trained(again, tensors(newest(tmp_path / "again"))) == first


def shifted(done: Completion) -> NDArray[np.float32]:
    return np.full(len(done.token_ids), -0.25, np.float32)


def test_a_sampler_that_is_another_policy_ends_the_run_before_anything_is_learned(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distort_logprobs(monkeypatch, shifted)
    ended = train_in(tmp_path, cli, ["checkpoint.every=1"])
    assert ended.code == 1
    assert ended.err.startswith(
        "GuardError: before the first update the log-probabilities of sampler and learner differ by 0.25 nats in the "
        "mean, where algorithm.guard.mismatch=0.1 is allowed. Likely causes: "
    )
    assert ended.err.rstrip().endswith("algorithm.guard.mismatch=null trains all the same")
    assert "Traceback" not in ended.err
    assert not (tmp_path / "checkpoints").exists()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0]


@pytest.mark.parametrize("limit", ["null", "0.3"])
def test_a_mismatch_that_the_guard_allows_goes_on_and_is_reported(
    limit: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distort_logprobs(monkeypatch, shifted)
    ended = train_in(tmp_path, cli, [f"algorithm.guard.mismatch={limit}"], steps=1)
    assert ended.code == 0, ended.err
    (line,) = read_metrics(tmp_path / "metrics.jsonl")[1:]
    assert line["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.25, abs=1e-6)  # roundings of float32
    assert line["mismatch/kl_k1"] == pytest.approx(-0.25, abs=1e-6)
    assert newest(tmp_path).name == "global_step_1"


def test_the_guard_looks_again_when_a_run_is_gone_on_with(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train_in(tmp_path, cli, [], steps=1).code == 0
    distort_logprobs(monkeypatch, shifted)
    ended = train_in(tmp_path, cli, ["checkpoint.resume=latest"])
    assert ended.code == 1
    assert ended.err.startswith("GuardError: ")
    assert newest(tmp_path).name == "global_step_1"


@pytest.mark.parametrize("seed", range(4))
def test_the_guard_looks_at_whatever_is_learned_first(
    seed: int, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one group an update the first has no signal in some of these runs, and another one is learned from first."""
    distort_logprobs(monkeypatch, shifted)
    ended = train_in(tmp_path, cli, [f"seed={seed}", "algorithm.prompts_per_update=1"], steps=1)
    assert ended.code == 1
    assert ended.err.startswith("GuardError: ")


def test_a_wrong_sampler_is_found_although_a_correction_leaves_nothing_to_learn_from(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distort_logprobs(monkeypatch, shifted)
    nothing = ["algorithm.correction.sequence_mask={name: geometric, low: 50, high: 51}"]
    ended = train_in(tmp_path, cli, nothing, steps=1)
    assert ended.code == 1
    assert ended.err.startswith("GuardError: ")


def test_a_run_does_not_go_on_against_another_reference(cli: Cli, tmp_path: Path) -> None:
    model, run = shutil.copytree(STARTER, tmp_path / "model"), tmp_path / "run"
    settings = (f"model.path={model}", "algorithm.kl={place: loss, coefficient: 1}", "checkpoint.resume=latest")
    assert train_in(run, cli, settings, steps=1).code == 0
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, model / "model.safetensors")
    ended = train_in(run, cli, settings, steps=2)
    assert ended.code == 1
    assert f"the weights in model.path={model}, which the run needs" in ended.err
    assert train_in(run, cli, (*settings, "checkpoint.allow_other_config=true"), steps=2).code == 0
