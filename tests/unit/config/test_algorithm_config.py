"""The settings of the algorithm: what fits together, in which words the rest is refused, what a choice drops."""

from pathlib import Path

import pytest
import yaml

from beamline.config import ConfigError, RunConfig, load_config, to_yaml
from beamline.config.advantages import GrpoAdvantage
from beamline.config.correction import IcepopWeight, MaskedWeight
from beamline.config.keys import Shape, root
from beamline.config.losses import ClipLoss, DppoLoss, GspoLoss

RECIPE = "algorithm: {loss: {name: clip, clip_low: 0.3, dual_clip: 3}, samples_per_prompt: 8}\n"
NEEDS = {
    "algorithm.advantage=maxrl": ["reward.wrong=0"],
    "algorithm.sampling=oversample": ["algorithm.sampling.cutoff_tokens=16"],
    "algorithm.loss=kl_cov": ["algorithm.prompts_per_update=16"],
}
"""What some variants need beside their defaults."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def problems(recipe: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    return str(caught.value).splitlines()


def variants(shape: Shape, prefix: str) -> list[str]:
    """``section=variant`` for every variant of every section below."""
    if shape.variants:
        return [f"{prefix}={name}" for name in shape.variants]
    return [each for name, child in shape.fields.items() for each in variants(child, f"{prefix}.{name}")]


VARIANTS = variants(root().fields["algorithm"], "algorithm")


def test_every_union_of_the_schema_is_tried() -> None:
    unions = {each.partition("=")[0].removeprefix("algorithm.") for each in VARIANTS}
    corrections = {"correction.weight", "correction.sequence_mask", "correction.veto"}
    assert unions >= {"sampling", "advantage", "loss", "kl"} | corrections


@pytest.mark.parametrize("choice", VARIANTS)
def test_every_variant_is_valid_with_its_defaults_and_loads_again_from_yaml(choice: str, recipe: Path) -> None:
    config = load_config(recipe, [choice, *NEEDS.get(choice, [])])
    chosen = yaml.safe_load(to_yaml(config))
    for part in choice.partition("=")[0].split("."):
        chosen = chosen[part]
    assert choice.partition("=")[2] in (chosen.get("name"), chosen.get("place"))
    recipe.write_text(to_yaml(config))
    assert load_config(recipe) == config


def test_settings_that_are_not_the_defaults_load_again_from_yaml(recipe: Path) -> None:
    overrides = [
        "algorithm.loss={name: dppo, divergence: kl, threshold: 5e-2}",
        "algorithm.kl={place: loss, estimator: k2, unbiased_gradient: false, coefficient: 1e-4}",
        "algorithm.sampling={name: oversample, factor: 1.1, cutoff_tokens: 7}",
        "algorithm.guard.mismatch=null",
    ]
    config = load_config(recipe, overrides)
    recipe.write_text(to_yaml(config))
    assert load_config(recipe) == config
    assert config.algorithm.loss == DppoLoss(divergence="kl", threshold=0.05)


@pytest.mark.parametrize("override", ["algorithm.loss=gspo", "algorithm.loss.name=gspo", "algorithm.loss={name: gspo}"])
def test_another_variant_inherits_nothing_of_the_recipe_and_of_the_defaults(override: str, recipe: Path) -> None:
    loss = load_config(recipe, [override]).algorithm.loss
    assert loss == GspoLoss()
    assert loss.clip_low != ClipLoss().clip_low


@pytest.mark.parametrize(
    "override", ["algorithm.loss=clip", "algorithm.loss.name=clip", "algorithm.loss={name: clip, clip_high: 0.28}"]
)
def test_the_same_variant_chosen_again_keeps_what_the_recipe_says(override: str, recipe: Path) -> None:
    assert load_config(recipe, [override]).algorithm.loss == ClipLoss(clip_low=0.3, dual_clip=3)


def test_a_choice_in_the_recipe_drops_the_defaults_of_the_other(recipe: Path) -> None:
    recipe.write_text("algorithm: {loss: gspo, advantage: grpo}")
    algorithm = load_config(recipe).algorithm
    assert (algorithm.loss, algorithm.advantage) == (GspoLoss(), GrpoAdvantage())


def test_a_bare_text_chooses_inside_the_correction_too(recipe: Path) -> None:
    recipe.write_text("algorithm: {correction: {weight: {name: icepop, low: 0.7}}}")
    assert load_config(recipe).algorithm.correction.weight == IcepopWeight(low=0.7)
    chosen = load_config(recipe, ["algorithm.correction.weight=mis"]).algorithm.correction
    assert (chosen.weight, chosen.active) == (MaskedWeight(), True)
    assert not load_config(recipe, ["algorithm.correction.weight=none"]).algorithm.correction.active


@pytest.mark.parametrize("loss", ["dppo", "reinforce"])
def test_a_setting_given_beside_the_choice_counts_although_the_old_variant_had_the_same(
    loss: str, recipe: Path
) -> None:
    overrides = [f"algorithm.loss={loss}", "algorithm.loss.anchor=learner"]
    assert load_config(recipe, overrides).algorithm.loss.anchor == "learner"
    recipe.write_text(f"algorithm: {{loss: {{name: {loss}, anchor: learner}}}}")
    assert load_config(recipe).algorithm.loss.anchor == "learner"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["algorithm.loss=clip_cov", "algorithm.loss.covariance_low=5"],
            "algorithm.loss: covariance_low=5.0 must be smaller than covariance_high=5.0",
        ),
        (
            ["algorithm.correction.weight={name: icepop, low: 6}"],
            "algorithm.correction.weight: low=6.0 must be smaller than high=5.0",
        ),
        (
            ["algorithm.correction.sequence_mask={name: geometric, low: 1.01}"],
            "algorithm.correction.sequence_mask: low=1.01 must be smaller than high=1.01",
        ),
        (
            ["algorithm.correction.sequence_mask={name: product, high: 0.5}"],
            "algorithm.correction.sequence_mask: low=0.5 must be smaller than high=0.5",
        ),
        (
            ["algorithm.correction.veto={name: outlier, high: 1e-5}"],
            "algorithm.correction.veto: low=0.0001 must be smaller than high=1e-05",
        ),
    ],
)
def test_bounds_that_keep_nothing_are_refused(overrides: list[str], reason: str, recipe: Path) -> None:
    assert problems(recipe, *overrides) == [reason]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("algorithm.loss.clip_low=1", "expected number > 0 and < 1"),
        ("algorithm.loss.clip_high=0", "expected number > 0 and <= 1000000.0"),
        ("algorithm.loss.dual_clip=1", "expected number > 1 and <= 1000000.0 or null"),
        ('algorithm.loss.anchor="both"', "expected `learner` or `sampler`"),
        ("algorithm.samples_per_prompt=1", "expected integer >= 2 and <= 100000"),
        ("algorithm.prompts_per_update=0", "expected integer >= 1"),
        ("algorithm.guard.mismatch=0", "expected number > 0 or null"),
        (
            'algorithm.aggregation="mean"',
            "expected `token_mean` or `sequence_mean_token_mean` or `sequence_sum` or `prompt_mean`",
        ),
        ('algorithm.correction="tis"', "expected a section with the keys weight, sequence_mask, veto"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_valid(override: str, reason: str, recipe: Path) -> None:
    assert problems(recipe, override) == [f"override: {override}: {reason}"]


@pytest.mark.parametrize(
    ("choice", "override", "reason"),
    [
        (
            "algorithm.sampling={name: oversample, cutoff_tokens: 9}",
            "algorithm.sampling.factor=1",
            "expected number > 1 and <= 100",
        ),
        ("algorithm.sampling=dynamic", "algorithm.sampling.rounds=0", "expected integer >= 1 and <= 1000"),
        ("algorithm.sampling=replace", "algorithm.sampling.min_share=0", "expected number > 0 and <= 1"),
        ("algorithm.advantage=pass_at_k", "algorithm.advantage.k=0", "expected integer >= 1 and <= 100000"),
        ("algorithm.loss=gspo", "algorithm.loss.clip_low=0", "expected number > 0 and < 1"),
        ("algorithm.loss=kl_cov", "algorithm.loss.share=0", "expected number > 0 and <= 1"),
        ("algorithm.correction.weight=tis", "algorithm.correction.weight.cap=0", "expected number > 0"),
        ("algorithm.kl=loss", "algorithm.kl.coefficient=0", "expected number > 0 and <= 1000000.0"),
        ("algorithm.kl=reward", 'algorithm.kl.estimator="k4"', "expected `k1` or `k2` or `k3`"),
    ],
)
def test_a_value_out_of_the_range_of_its_variant_is_refused(
    choice: str, override: str, reason: str, recipe: Path
) -> None:
    (line,) = problems(recipe, choice, override)
    assert line.startswith(f"override: {override}: {reason}")


@pytest.mark.parametrize("name", ["loss", "advantage", "sampling", "kl", "correction.weight", "correction.veto"])
def test_a_variant_that_does_not_exist_is_named_with_those_that_do(name: str, recipe: Path) -> None:
    (line,) = problems(recipe, f"algorithm.{name}=nope")
    shape = root()
    for part in f"algorithm.{name}".split("."):
        shape = shape.child(part) or shape
    choices = " or ".join(f"`{variant}`" for variant in shape.variants)
    assert line.endswith(f': algorithm.{name}.{shape.discriminator}="nope": expected {choices}')


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.loss.covariance_low=2"],
            "algorithm.loss.covariance_low=2: exists only with algorithm.loss.name=clip_cov",
        ),
        (
            ["algorithm.loss=gspo", "algorithm.loss.dual_clip=3"],
            "algorithm.loss.dual_clip=3: exists only with algorithm.loss.name=clip",
        ),
        (
            ["algorithm.advantage=rloo", "algorithm.advantage.norm_by_std=false"],
            "algorithm.advantage.norm_by_std=false: exists only with algorithm.advantage.name=grpo",
        ),
        (
            ["algorithm.kl=reward", "algorithm.kl.unbiased_gradient=true"],
            "algorithm.kl.unbiased_gradient=true: exists only with algorithm.kl.place=loss",
        ),
        (["algorithm.loss.clip=0.2"], "algorithm.loss.clip=0.2: unknown key; did you mean algorithm.loss.clip_low?"),
    ],
)
def test_a_key_that_is_another_variants_is_refused_with_its_owner(
    overrides: list[str], expected: str, recipe: Path
) -> None:
    assert problems(recipe, *overrides) == [f"override: {expected}"]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["algorithm.prompts_per_update=5"],
            "algorithm.prompts_per_update=5 does not divide algorithm.prompts_per_step=32",
        ),
        (
            ["algorithm.advantage=pass_at_k", "algorithm.advantage.k=9"],
            "algorithm.advantage.k=9 must be smaller than algorithm.samples_per_prompt=8: of all samples there is one "
            "set, which says nothing of any of them",
        ),
        (
            ["algorithm.correction.weight=tis", "algorithm.loss.anchor=sampler"],
            "algorithm.correction has no use with algorithm.loss.anchor=sampler (loss clip): the ratio compares with "
            "the sampler already; use algorithm.loss.anchor=learner, or no correction",
        ),
        (
            ["algorithm.correction.veto=outlier", "algorithm.loss=reinforce"],
            "algorithm.correction has no use with algorithm.loss.anchor=sampler (loss reinforce): the ratio compares "
            "with the sampler already; use algorithm.loss.anchor=learner, or no correction",
        ),
        (
            ["algorithm.advantage=maxrl"],
            "algorithm.advantage.name=maxrl divides by the mean reward, so that wrong answers must earn nothing: use "
            "reward.wrong=0, not -1.0",
        ),
        (
            ["algorithm.advantage=maxrl", "reward.wrong=0", "reward.overlong.buffer_tokens=4"],
            "algorithm.advantage.name=maxrl knows right and wrong alone, and no penalty between them: use "
            "reward.overlong.buffer_tokens=0, or another advantage",
        ),
        (
            ["algorithm.advantage=pass_at_k", "algorithm.kl=reward"],
            "algorithm.advantage.name=pass_at_k knows right and wrong alone, and no penalty between them: use "
            "algorithm.kl.place=none, or another advantage",
        ),
        (
            ["algorithm.advantage=gdpo", "algorithm.kl=reward"],
            "algorithm.kl.place=reward has no coefficient under algorithm.advantage.name=gdpo, which scales every part "
            "of the reward alike: use algorithm.kl.place=loss, or another advantage",
        ),
        (
            ["algorithm.advantage=reinforce_plus_plus", "algorithm.sampling=dynamic"],
            "algorithm.sampling.name=dynamic leaves out groups of equal rewards, from which "
            "algorithm.advantage.name=reinforce_plus_plus learns: use group_baseline=true, or plain sampling",
        ),
        (
            ["algorithm.loss=kl_cov"],
            "algorithm.loss.name=kl_cov penalizes changes since the step began, and with one update a step there is "
            "none: use an algorithm.prompts_per_update smaller than algorithm.prompts_per_step=32",
        ),
        (
            ["algorithm.loss=gspo", "algorithm.correction.weight=icepop"],
            "algorithm.correction.weight.name=icepop leaves out single tokens, and algorithm.loss.name=gspo has one "
            "ratio a response: use weight.level=sequence, a sequence_mask, or another loss",
        ),
        (
            ["algorithm.renormalize_after_mask=true", "algorithm.correction.weight=tis"],
            "algorithm.renormalize_after_mask=true has no use where nothing is masked: use "
            "algorithm.mask_truncated=true or a correction that leaves tokens out, or switch it off",
        ),
        (
            ["algorithm.sampling={name: oversample, cutoff_tokens: 64}", "rollout.max_response_tokens=64"],
            "algorithm.sampling.cutoff_tokens=64 must be smaller than rollout.max_response_tokens=64, or everything is "
            "drawn to its end",
        ),
        (
            ["rollout.min_tokens=97", "rollout.record_support=true"],
            "rollout.min_tokens=97 is more than rollout.max_response_tokens=96",
        ),
        (
            ["rollout.record_support=true"],
            "rollout.record_support=true has no use where every token is allowed: none of rollout.top_p, top_k, min_p "
            "and min_tokens is set",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_a_way_out(
    overrides: list[str], reason: str, recipe: Path
) -> None:
    (line,) = problems(recipe, *overrides)
    assert line.removeprefix("algorithm: ") == reason


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage=pass_at_k", "algorithm.advantage.k=7"],
        ["algorithm.advantage=pass_at_k", "algorithm.kl=loss"],
        ["algorithm.advantage=gdpo", "algorithm.kl=loss"],
        ["algorithm.advantage={name: reinforce_plus_plus, group_baseline: true}", "algorithm.sampling=replace"],
        ["algorithm.sampling={name: oversample, cutoff_tokens: 63}", "rollout.max_response_tokens=64"],
        ["algorithm.loss={name: kl_cov, anchor: sampler}"],
        ["algorithm.loss=gspo", "algorithm.correction.weight={name: mis, level: sequence}"],
        ["algorithm.renormalize_after_mask=true", "algorithm.mask_truncated=true"],
        ["rollout.min_tokens=96", "rollout.record_support=true"],
        ["algorithm.correction.veto=outlier", "algorithm.loss=gspo"],
        ["algorithm.loss=reinforce", "algorithm.correction.weight=none"],
        ["algorithm.prompts_per_update=4"],
    ],
)
def test_what_stands_at_the_border_of_a_rule_is_allowed(overrides: list[str], recipe: Path) -> None:
    load_config(recipe, overrides)


FILTERS = {"top_p": (0.9, 1.0), "top_k": (5, 0), "min_p": (0.1, 0.0), "min_tokens": (3, 0)}


@pytest.mark.parametrize("key", FILTERS)
def test_a_filter_is_trained_on_only_with_its_support(key: str, recipe: Path) -> None:
    value, neutral = FILTERS[key]
    assert problems(recipe, f"rollout.{key}={value}") == [
        f"rollout.{key}={value} cannot be trained on unless the learner knows which tokens were allowed; use "
        f"rollout.record_support=true, or rollout.{key}={neutral}"
    ]
    config = load_config(recipe, [f"rollout.{key}={value}", "rollout.record_support=true"])
    assert getattr(config.rollout, key) == value


def test_evaluation_filters_are_free(recipe: Path) -> None:
    assert load_config(recipe, ["evaluation.top_p=0.9"]) != RunConfig()
