from collections.abc import Callable
from pathlib import Path

import pytest

from beamline.config import RunConfig, load_config
from beamline.config.schema import ArithmeticSource, FileSource

Load = Callable[..., RunConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(text: str, *overrides: str, base: dict[str, object] | None = None) -> RunConfig:
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text, encoding="utf-8")
        return load_config(recipe, overrides, base)

    return load


def test_what_the_recipe_leaves_out_keeps_its_default(load: Load) -> None:
    assert load("steps: 7\nlearner: {optimizer: {eps: 0.5}}") == RunConfig.model_validate(
        {"steps": 7, "learner": {"optimizer": {"eps": 0.5}}}
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.optimizer.lr=1e-5", 1e-5),
        ("learner.optimizer.lr=3", 3.0),
        ("data.train.levels=[2,3]", [2, 3]),
        ("checkpoint.resume=latest", "latest"),
        ("policy.r3=true", True),
        ("checkpoint.dir=null", None),
        ("model.path=a=b", "a=b"),
        ("model.path='a, b: c #d'", "a, b: c #d"),
        ("model.path=''", ""),
        ("output=some/folder", Path("some/folder")),
        ("learner.optimizer.betas=[0.5, 0]", (0.5, 0.0)),
    ],
)
def test_an_override_is_read_as_yaml(load: Load, override: str, expected: object) -> None:
    value: object = load("checkpoint: {dir: x}", override)
    for part in override.partition("=")[0].split("."):
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


def test_the_last_override_of_a_key_wins(load: Load) -> None:
    assert load("steps: 1", "steps=2", "steps=3").steps == 3


def test_a_mapping_given_to_a_section_keeps_its_other_keys(load: Load) -> None:
    optimizer = load("learner: {optimizer: {eps: 0.5, lr: 1}}", "learner.optimizer={lr: 2}").learner.optimizer
    assert (optimizer.lr, optimizer.eps) == (2.0, 0.5)


def test_a_bare_engine_keeps_the_other_keys_of_its_section(load: Load) -> None:
    config = load("rollout: {slots: 3}\nlearner: torch", "rollout=local", "learner=torch")
    assert (config.rollout.engine, config.rollout.slots, config.learner.engine) == ("local", 3, "torch")


def test_base_lies_between_defaults_and_recipe(load: Load) -> None:
    config = load("seed: 2", base={"seed": 1, "steps": 5})
    assert (config.seed, config.steps, config.name) == (2, 5, "run")


class TestVariants:
    def test_the_default_variant_need_not_be_named(self, load: Load) -> None:
        assert load("data: {train: {problems: 9}}").data.train == ArithmeticSource(problems=9)

    def test_a_recipe_that_chooses_another_variant_drops_the_defaults_of_the_first(self, load: Load) -> None:
        assert load("data: {train: {source: file, path: p}}").data.train == FileSource(path=Path("p"))

    def test_an_override_that_chooses_another_variant_drops_the_keys_of_the_recipe(self, load: Load) -> None:
        config = load("data: {train: {levels: [2]}}", "data.train.path=x", "data.train.source=file")
        assert config.data.train == FileSource(path=Path("x"))

    def test_choosing_back_restores_the_defaults(self, load: Load) -> None:
        config = load("data: {train: {source: file, path: p}}", "data.train.source=arithmetic")
        assert config.data.train == ArithmeticSource()

    def test_the_choice_may_be_an_interpolation(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEAMLINE_TEST_SOURCE", "file")
        config = load("data: {train: {source: '${oc.env:BEAMLINE_TEST_SOURCE}', path: p}}")
        assert config.data.train == FileSource(path=Path("p"))

    def test_inside_a_mapping_of_names_too(self, load: Load) -> None:
        recipe = "data: {evaluation: {a: {source: arithmetic, problems: 3}}}"
        config = load(recipe, "data.evaluation.a={source: file, path: x}")
        assert config.data.evaluation == {"a": FileSource(path=Path("x"))}


class TestEvaluationSets:
    def test_a_recipe_replaces_the_default_sets(self, load: Load) -> None:
        config = load("data: {evaluation: {a: {source: file, path: x}}}")
        assert config.data.evaluation == {"a": FileSource(path=Path("x"))}

    def test_an_override_adds_a_set(self, load: Load) -> None:
        config = load("data: {evaluation: {a: {source: arithmetic}}}", "data.evaluation.b={source: file, path: x}")
        assert list(config.data.evaluation) == ["a", "b"]

    def test_an_override_changes_a_set(self, load: Load) -> None:
        config = load("steps: 1", "data.evaluation.arithmetic.problems=3")
        assert config.data.evaluation == {"arithmetic": ArithmeticSource(problems=3)}

    def test_an_override_removes_all_sets(self, load: Load) -> None:
        assert load("steps: 1", "data.evaluation={}").data.evaluation == {}


class TestInterpolation:
    def test_an_environment_variable(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEAMLINE_TEST_MODEL", "/models/beam")
        assert load("model: {path: '${oc.env:BEAMLINE_TEST_MODEL}'}").model.path == "/models/beam"

    def test_an_environment_variable_with_a_default(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("BEAMLINE_TEST_MODEL", raising=False)
        assert load("model: {path: '${oc.env:BEAMLINE_TEST_MODEL,starter}'}").model.path == "starter"

    def test_a_number_from_the_environment(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEAMLINE_TEST_STEPS", "12")
        assert load("steps: ${oc.decode:${oc.env:BEAMLINE_TEST_STEPS}}").steps == 12

    def test_another_key_after_overrides(self, load: Load) -> None:
        assert load("name: a\noutput: runs/${name}", "name=b").output == Path("runs/b")

    def test_a_key_that_has_only_its_default(self, load: Load) -> None:
        assert load("checkpoint: {dir: '${output}/saved'}").checkpoint.dir == Path("runs/run/saved")

    def test_an_override_may_interpolate(self, load: Load) -> None:
        assert load("name: a", "output=runs/${name}").output == Path("runs/a")

    def test_inside_a_list(self, load: Load) -> None:
        assert load("seed: 4\ndata: {train: {levels: [1, '${seed}']}}").data.train == ArithmeticSource(levels=[1, 4])

    def test_a_whole_section(self, load: Load) -> None:
        config = load("data: {train: {source: file, path: p}, evaluation: {same: '${data.train}'}}")
        assert config.data.evaluation == {"same": FileSource(path=Path("p"))}

    def test_an_escaped_one_is_text(self, load: Load) -> None:
        assert load(r"model: {path: '\${name}'}").model.path == "${name}"
