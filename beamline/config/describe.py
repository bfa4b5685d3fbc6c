"""The documentation of every key: as comments in a YAML file, and as ``docs/configuration.md``."""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from beamline.config.compose import to_yaml
from beamline.config.keys import ANY_NAME, REQUIRED, Key, keys, root
from beamline.config.layers import KeyPath, key_lines
from beamline.config.schema import RunConfig

HEADER = """\
# Configuration

Every key of a recipe, generated from the schema by `python -m beamline.config.describe > docs/configuration.md`.
"""

TABLE = """
## {title}

{meaning}

| key | type | default | meaning |
|---|---|---|---|
"""


def describe(config: RunConfig) -> str:
    """The complete configuration as YAML, every key under its meaning, type, bounds and default; a valid recipe."""
    text, documented = to_yaml(config), {(key.name, key.condition): key for key in keys()}
    path_of = {line: path for path, line in key_lines(text).items()}
    values = config.model_dump(mode="json")
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        path = path_of.get(number, ())
        key = documented.get(_documented_name(path, values))
        if len(path) == 1 and parts:
            parts.append("")
        if key is not None:
            parts += _comment(key, indent="  " * (len(path) - 1))
        parts.append(line)
    return "\n".join(parts) + "\n"


def reference_markdown() -> str:
    """The text of ``docs/configuration.md``: for each section of the schema a table of its keys."""
    tables = {"": [TABLE.format(title="The run", meaning=root().meaning)]}
    for key in keys():
        top = key.name.partition(".")[0]
        if key.shape.fields and key.name == top:
            tables[top] = [TABLE.format(title=f"`{top}`", meaning=key.meaning)]
        else:
            tables[top if top in tables else ""].append(_row(key))
    return HEADER + "".join(part for table in tables.values() for part in table)


def _documented_name(path: KeyPath, values: Mapping[str, Any]) -> tuple[str, str]:
    """The name and the condition under which the key at a path is documented."""
    name, condition, shape = [], "", root()
    for part in path:
        if shape.discriminator is not None and part != shape.discriminator:
            condition = f"{shape.discriminator}={values[shape.discriminator]}"
        name.append(ANY_NAME if shape.entry is not None else part)
        shape, values = shape.child(part) or shape, values[part]
    return ".".join(name), condition


def _comment(key: Key, indent: str) -> list[str]:
    prefix = "" if key.default is REQUIRED else "default "
    facts = "" if key.shape.fields else f"{key.shape.kind}; {prefix}{_default(key)}"
    lines = [line for text in (key.meaning, facts) for line in textwrap.wrap(text, 110 - len(indent))]
    return [f"{indent}# {line}" for line in lines]


def _row(key: Key) -> str:
    kind, default = ("section", "") if key.shape.fields else (key.shape.kind, _default(key))
    meaning = f"With `{key.condition}`: {key.meaning}" if key.condition else key.meaning
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{key.name}`", kind, default, meaning)) + " |\n"


def _default(key: Key) -> str:
    if key.default is REQUIRED:
        return "required"
    return f"`{key.default if isinstance(key.default, str) else json.dumps(key.default)}`"


if __name__ == "__main__":
    print(reference_markdown(), end="")
