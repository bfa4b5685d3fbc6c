from pathlib import Path

from beamline.config import RunConfig, load_config, to_yaml
from beamline.config.describe import describe, reference_markdown
from beamline.config.keys import keys
from beamline.config.schema import DataConfig, FileSource

REFERENCE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_committed_reference_is_up_to_date() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference_markdown(), (
        "docs/configuration.md is out of date; run: python -m beamline.config.describe > docs/configuration.md"
    )


def test_every_key_is_documented() -> None:
    assert [key.name for key in keys() if not key.meaning] == []


def test_a_row_of_the_reference() -> None:
    meaning = "Nucleus sampling; 1 in training, unless the support is recorded."
    row = f"| `rollout.top_p` | number > 0 and <= 1 | `1.0` | {meaning} |\n"
    assert row in reference_markdown()


def test_a_key_of_a_variant_says_so() -> None:
    assert "| `data.train.path` | path | required | With `source=file`: The file." in reference_markdown()


def test_a_description_is_the_yaml_with_comments() -> None:
    lines = [line for line in describe(RunConfig()).splitlines() if line and not line.lstrip().startswith("#")]
    assert lines == to_yaml(RunConfig()).splitlines()


def test_a_description_is_a_recipe(tmp_path: Path) -> None:
    sets = {"on": FileSource(path=Path("a b" * 60))}
    config = RunConfig(data=DataConfig(train=FileSource(path=Path("x")), evaluation=sets))
    recipe = tmp_path / "described.yaml"
    recipe.write_text(describe(config), encoding="utf-8")
    assert load_config(recipe) == config


def test_a_key_is_described_above_its_value() -> None:
    text = describe(RunConfig.model_validate({"learner": {"optimizer": {"warmup_updates": 5}}}))
    assert (
        "    # Updates over which the rate rises linearly to `lr`.\n"
        "    # integer >= 0; default `0`\n"
        "    warmup_updates: 5\n"
    ) in text


def test_keys_of_the_chosen_variant_are_described() -> None:
    text = describe(RunConfig(data=DataConfig(train=FileSource(path=Path("x")))))
    assert "    # The file. Rows that cannot be used are left out, counted and listed.\n    # path; required\n" in text
