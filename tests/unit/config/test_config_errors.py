from collections.abc import Callable
from pathlib import Path

import pytest

from beamline.config import ConfigError, load_config

Problems = Callable[..., list[str]]


@pytest.fixture
def problems(tmp_path: Path) -> Problems:
    def problems(text: str | bytes, *overrides: str, base: dict[object, object] | None = None) -> list[str]:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_bytes(text.encode() if isinstance(text, str) else text)
        with pytest.raises(ConfigError) as caught:
            load_config(recipe, overrides, base)  # type: ignore[arg-type]
        lines = str(caught.value).replace(f"{tmp_path}/", "").splitlines()
        assert len(lines) == len(caught.value.problems)
        return lines

    return problems


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=true", "steps=true: expected integer >= 1"),
        ("steps='50'", 'steps="50": expected integer >= 1'),
        ("steps=2.5", "steps=2.5: expected integer >= 1"),
        ("steps=2.0", "steps=2.0: expected integer >= 1"),
        ("steps=0", "steps=0: expected integer >= 1"),
        ("steps=null", "steps=null: expected integer >= 1"),
        ("steps={a: 1}", 'steps={"a": 1}: expected integer >= 1'),
        ("seed=9223372036854775808", "seed=9223372036854775808: expected integer >= 0 and < 9223372036854775808"),
        ("learner.optimizer.lr='0.1'", 'learner.optimizer.lr="0.1": expected number >= 0'),
        ("learner.optimizer.lr=false", "learner.optimizer.lr=false: expected number >= 0"),
        ("learner.optimizer.lr=.inf", "learner.optimizer.lr=Infinity: expected a finite number"),
        ("learner.optimizer.lr=.nan", "learner.optimizer.lr=NaN: expected a finite number"),
        ("rollout.top_p=1.5", "rollout.top_p=1.5: expected number > 0 and <= 1"),
        ("algorithm.advantage.norm_by_std='true'", 'algorithm.advantage.norm_by_std="true": expected true or false'),
        ("algorithm.advantage.norm_by_std=1", "algorithm.advantage.norm_by_std=1: expected true or false"),
        ("model.path=3", "model.path=3: expected text"),
        ("output=[a]", 'output=["a"]: expected path'),
        ("checkpoint.dir=3", "checkpoint.dir=3: expected path or null"),
        ("name='a b'", 'name="a b": expected text matching `^[A-Za-z0-9][A-Za-z0-9._-]*$`'),
        ("rollout=locl", 'rollout.engine="locl": expected `local` or `vllm`'),
        (
            "data.train.source=fil",
            'data.train.source="fil": expected `arithmetic` or `competition` or `file` or `mixture`',
        ),
        ("data.train.source=file", "data.train.path: is required (path)"),
        ("data.train.levels=[1,9]", "data.train.levels[1]=9: expected integer >= 1 and <= 5"),
        ("data.train.levels=[]", "data.train.levels=[]: expected list of (integer >= 1 and <= 5), at least 1 long"),
        ("data.evaluation.a.problems=3", "data.evaluation.a.source: expected `arithmetic` or `competition` or `file`"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_valid(problems: Problems, override: str, expected: str) -> None:
    assert problems("name: x", override) == [f"override: {expected}"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lr=1", "lr=1: unknown key; did you mean learner.optimizer.lr?"),
        ("llr=1", "llr=1: unknown key; did you mean learner.optimizer.lr?"),
        ("learner.optimizer.lrr=1", "learner.optimizer.lrr=1: unknown key; did you mean learner.optimizer.lr?"),
        ("optimizer.lr=1", "optimizer.lr=1: unknown key; did you mean learner.optimizer.lr?"),
        ("temperature=1", "temperature=1: unknown key; did you mean rollout.temperature or evaluation.temperature?"),
        ("optimizer={lr: 1, eps: 1}", 'optimizer={"lr": 1, "eps": 1}: unknown key; did you mean learner.optimizer?'),
        ("data.evaluation.arithmetic.level=[1]", "did you mean data.evaluation.arithmetic.levels?"),
        ("data.train.path=x", 'data.train.path="x": exists only with data.train.source=file'),
        ("model.zzzzz=1", "model.zzzzz=1: unknown key; model has the keys path"),
        ("steps.x=1", "steps.x=1: steps is 50, which has no keys"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(problems: Problems, override: str, expected: str) -> None:
    (line,) = problems("name: x", override)
    assert line.startswith("override: ")
    assert line.endswith(expected)


@pytest.mark.parametrize(
    "override", ["learner.parallel.cp=2", "learner.parallel={cp: 2}", "learner={parallel: {cp: 2}}"]
)
def test_a_key_that_is_absent_on_purpose_says_what_to_do_instead(problems: Problems, override: str) -> None:
    (line,) = problems("name: x", "learner=megatron", override)
    assert line.startswith("override: learner.parallel.cp=2: unknown key; there is no context parallelism")
    for instead in ("learner.parallel.tp", "policy.recompute", "learner.micro_batch_tokens"):
        assert instead in line


def test_data_parallel_ranks_are_no_key_but_what_is_left(problems: Problems) -> None:
    (line,) = problems("name: x", "learner=megatron", "learner.parallel.dp=2")
    assert line.startswith("override: learner.parallel.dp=2: unknown key; data parallel are the processes that")


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("foo", "an override has the form dotted.key=value"),
        ("=3", "an override has the form dotted.key=value"),
        ("+steps=1", "an override has the form dotted.key=value"),
        ("a..b=1", "an override has the form dotted.key=value"),
        ("name=", """no value; write name=null, or name='""' for empty text"""),
        ("name=#x", """no value; write name=null, or name='""' for empty text"""),
        ("data.train.levels=[1", "invalid YAML: while parsing a flow sequence"),
        ("data.train={path: a, path: b}", "invalid YAML: while constructing a mapping, found duplicate key path"),
        ("name=${", "invalid interpolation: no viable alternative at input '${'"),
    ],
)
def test_a_malformed_override_is_quoted(problems: Problems, override: str, reason: str) -> None:
    (line,) = problems("name: x", override)
    assert line.startswith(f"override {override!r}: {reason}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "recipe.yaml: the recipe is empty"),
        ("# nothing\n", "recipe.yaml: the recipe is empty"),
        ("[1]", "recipe.yaml: a recipe is a mapping of keys to values"),
        ("steps", "recipe.yaml: a recipe is a mapping of keys to values"),
        ("a: [1", "recipe.yaml:1: invalid YAML: while parsing a flow sequence"),
        (
            "name: x\nsteps: 1\nname: y",
            "recipe.yaml:3: invalid YAML: while constructing a mapping, found duplicate key",
        ),
        ("model:\n  path: x\n  path: y", "recipe.yaml:3: invalid YAML: while constructing a mapping, found duplicate"),
        ("name: x\n---\nname: y", "recipe.yaml:2: invalid YAML: expected a single document"),
        ("name: x\nmodel: !!python/name:os.system x", "recipe.yaml:2: invalid YAML: could not determine a constructor"),
        ("a: &x [*x]", "recipe.yaml:1: invalid YAML: "),
        ("steps: 1\nname: ${", "recipe.yaml:2: name: invalid interpolation: "),
        (b"name: \xff", "recipe.yaml: the recipe is not UTF-8 text: "),
        ("name: x\n1: 2", "recipe.yaml:2: 1: keys are text: quote it"),
        ("name: x\nlearner:\n  optimizer:\n    lrr: 1", "recipe.yaml:4: learner.optimizer.lrr=1: unknown key"),
        ("name: x\nsteps: yes", "recipe.yaml:2: steps=true: expected integer"),
        (
            "data: {evaluation: {a.b: {source: arithmetic}}}",
            "recipe.yaml:1: data.evaluation.a.b: 'a.b' is no name that can stand here: expected a mapping",
        ),
        ("steps: ???", 'recipe.yaml:1: steps="???": must be given a value'),
        ("name: ${nope}", "recipe.yaml:1: name=\"${nope}\": Interpolation key 'nope' not found"),
        ("data:\n  train: ${data}", 'recipe.yaml:2: data.train="${data}": Interpolation to parent node detected'),
    ],
)
def test_a_mistake_in_the_recipe_is_named_with_its_line(problems: Problems, text: str | bytes, expected: str) -> None:
    (line,) = problems(text)
    assert line.startswith(expected)


def test_a_recipe_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: cannot read the recipe: No such file or directory"):
        load_config(tmp_path / "nope.yaml")


def test_a_recipe_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the recipe: Is a directory"):
        load_config(tmp_path)


def test_an_unset_environment_variable_is_named(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEAMLINE_TEST_UNSET", raising=False)
    assert problems("steps: 1\nmodel:\n  path: ${oc.env:BEAMLINE_TEST_UNSET}") == [
        'recipe.yaml:3: model.path="${oc.env:BEAMLINE_TEST_UNSET}": environment variable BEAMLINE_TEST_UNSET is not'
        " set; export it, or write ${oc.env:BEAMLINE_TEST_UNSET,default}"
    ]


def test_a_required_key_that_cannot_be_resolved_is_one_problem(problems: Problems) -> None:
    assert len(problems("data: {train: {source: file, path: '${nope}'}}")) == 1


def test_text_of_an_environment_variable_is_no_number(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAMLINE_TEST_STEPS", "12")
    assert problems("steps: ${oc.env:BEAMLINE_TEST_STEPS}") == [
        'recipe.yaml:1: steps="12": expected integer >= 1; an environment variable is text, and'
        " ${oc.decode:${oc.env:NAME}} reads it as a value"
    ]


def test_sections_that_interpolate_each_other_are_an_error(problems: Problems) -> None:
    lines = problems("model: {path: '${policy}'}\npolicy: {dtype: '${reward}'}\nreward: {grader: '${model}'}")
    assert [line.rpartition(": ")[2] for line in lines] == ["the interpolation leads back to itself"] * 3


def test_an_interpolated_section_with_unknown_keys(problems: Problems) -> None:
    assert problems("model: ${runtime}") == [
        "recipe.yaml:1: model.threads=2: unknown key; did you mean runtime.threads?"
    ]


def test_every_problem_is_listed_at_once(problems: Problems) -> None:
    lines = problems("steps: true\nlr: 1", "foo", "reward.grader=fp8", "seed.x=3")
    assert [line.partition(": ")[0] for line in lines] == [
        "override 'foo'",
        "override",
        "recipe.yaml:1",
        "override",
        "recipe.yaml:2",
    ]


def test_contradictions_between_keys_come_through(problems: Problems) -> None:
    assert problems("reward: {right: 0, wrong: 0}") == ["reward.wrong=0.0 must be smaller than reward.right=0.0"]


def test_a_contradiction_that_may_follow_from_another_mistake_is_not_listed(problems: Problems) -> None:
    assert len(problems("reward: {right: 0, wrong: 0}", "foo")) == 1


def test_a_key_of_the_old_variant_given_beside_the_new_one_is_an_error(problems: Problems) -> None:
    overrides = ["data.train.levels=[1]", "data.train.source=file", "data.train.path=x"]
    expected = "data.train.levels=[1]: exists only with data.train.source=arithmetic"
    assert problems("name: x", *overrides) == [f"override: {expected}"]


def test_choosing_the_same_variant_again_hides_no_mistake(problems: Problems) -> None:
    (line,) = problems("data: {train: {source: file, path: p, levels: [1]}}", "data.train.source=file")
    assert line.startswith("recipe.yaml:1: data.train.levels=[1]: exists only with")


def test_a_key_that_no_variant_knows_is_never_dropped(problems: Problems) -> None:
    (line,) = problems("data: {train: {source: file, pth: p}}", "data.train.source=arithmetic")
    assert line.startswith('recipe.yaml:1: data.train.pth="p": unknown key')


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ({"steps": "3"}, 'base: steps="3": expected integer >= 1'),
        ({3: 4}, "base: 3: keys are text: quote it"),
        ({"steps": "${"}, "base: steps: invalid interpolation: no viable alternative at input '${'"),
        ({"steps": {1}}, "base: steps: Value 'set' is not a supported primitive type"),
    ],
)
def test_a_mistake_in_the_base(problems: Problems, base: dict[object, object], expected: str) -> None:
    assert problems("name: x", base=base) == [expected]
