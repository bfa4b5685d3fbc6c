"""From a recipe file and dotted overrides to a checked configuration, and back to YAML."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails, to_json

from beamline.config.errors import ConfigError, Problem, shown
from beamline.config.keys import Shape, nearest, root
from beamline.config.layers import (
    KeyPath,
    Tree,
    assign,
    drop_stale,
    find,
    merge,
    plain,
    read_base,
    read_override,
    read_recipe,
    settings,
)
from beamline.config.schema import ABSENT, RunConfig
from beamline.config.vllm import SECTION, instead_of

DEFAULTS, BASE, RECIPE, OVERRIDES = range(4)
UNRESOLVED = object()


def load_config(recipe: Path | None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe, apply overrides such as ``learner.optimizer.lr=1e-5``, resolve interpolations, check everything.

    The layers are the defaults, ``base`` (plain data, as a YAML file would give), the recipe and the overrides. A
    section takes over key by key; a mapping of free names (``data.evaluation``) is replaced whole unless an override
    names what is inside it. Choosing another variant (``data.train.source``) drops the old variant's keys of the
    layers below. Interpolations see the defaults too. Nothing is converted: ``steps="50"`` is an error.

    Raises:
        ConfigError: anything is wrong; it lists every problem with its key, value, reason and origin.
    """
    tree = settings(RunConfig().model_dump(mode="json"), DEFAULTS, lambda _: "default")
    if base is not None:
        tree = merge(tree, read_base(base, BASE), root())
    if recipe is not None:
        tree = merge(tree, read_recipe(recipe, RECIPE), root())
    problems: list[Problem] = []
    for text in overrides:
        try:
            path, value = read_override(text, OVERRIDES)
            tree = assign(tree, path, value, root())
        except ConfigError as error:
            problems += error.problems
    tree = drop_stale(tree, root(), _Resolver(tree).look_up)
    values = _Resolver(tree).resolve(tree, problems)
    config = _validate(values, tree, problems)
    if problems or config is None:
        raise ConfigError(problems)
    return config


def to_yaml(config: RunConfig) -> str:
    """The complete configuration as YAML, in the order of the schema; it loads to an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(config.model_dump(mode="json"))))


def differences(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """Dotted keys whose values differ, with both values as plain data; None where a side has no such key."""
    flat_a, flat_b = (dict(_flatten(config.model_dump(mode="json"))) for config in (a, b))
    return [(k, flat_a.get(k), flat_b.get(k)) for k in {**flat_a, **flat_b} if flat_a.get(k) != flat_b.get(k)]


def escaped(value: Any) -> Any:
    """Plain data with ``${`` escaped, so that it is text and not an interpolation when it is loaded again."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escaped(below) for key, below in value.items()}
    return [escaped(below) for below in value] if isinstance(value, list) else value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class _Resolver:
    """Resolves the interpolations of a tree, one setting at a time."""

    def __init__(self, tree: Tree) -> None:
        self._values: DictConfig = OmegaConf.create(plain(tree))

    def look_up(self, path: KeyPath) -> Any:
        """The value of a key, or None where its interpolation fails."""
        try:
            return self._value(path)
        except (OmegaConfBaseException, RecursionError):
            return None

    def resolve(self, tree: Tree, problems: list[Problem], path: KeyPath = ()) -> Any:
        """The values of a tree; what cannot be resolved is left out and added to ``problems``."""
        if isinstance(tree, dict):
            values = {key: self.resolve(below, problems, (*path, key)) for key, below in tree.items()}
            return {key: value for key, value in values.items() if value is not UNRESOLVED}
        try:
            return self._value(path)
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(_unresolved(error), ".".join(path), shown(tree.value), tree.where))
            return UNRESOLVED

    def _value(self, path: KeyPath) -> Any:
        value: Any = self._values
        for part in path:
            value = value[part]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value


def _unresolved(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the interpolation leads back to itself"
    if isinstance(error, MissingMandatoryValue):
        return "must be given a value"
    if missing := re.search(r"Environment variable '(.*)' not found", str(error)):
        name = missing[1]
        return f"environment variable {name} is not set; export it, or write ${{oc.env:{name},default}}"
    return str(error).splitlines()[0]


def _validate(values: Any, tree: Tree, problems: list[Problem]) -> RunConfig | None:
    """Check resolved values; mistakes that do not merely follow from earlier ones are added to ``problems``.

    Strict validation of JSON takes paths and tuples as YAML writes them, and converts nothing else.
    """
    try:
        return RunConfig.model_validate_json(to_json(values, inf_nan_mode="constants"), strict=True)
    except ValidationError as error:
        earlier = {problem.key for problem in problems}
        # Of a value that is none of several types, pydantic says so for each.
        found = dict.fromkeys(_explain(details, tree) for details in error.errors(include_url=False))
        problems += [p for p in found if not problems or (p.key and p.key not in earlier)]
        return None


def _explain(error: ErrorDetails, tree: Tree) -> Problem:
    """Put a finding of pydantic in the words of the schema."""
    path, shape = _place(error["loc"])
    setting, context = find(tree, path), error.get("ctx", {})
    key, value, where = (
        ".".join(path).replace(".[", "["),
        shown(error["input"]),
        setting.where if setting is not None else "",
    )
    if error["loc"][-1:] == ("[key]",):
        kind = _place(error["loc"][:-2])[1].kind
        return Problem(f"{path[-1]!r} is no name that can stand here: expected {kind}", key, where=where)
    match error["type"]:
        case "extra_forbidden":
            return _unknown_key(path, error["input"], where)
        case "value_error":
            reason = str(context["error"])
            return Problem(reason, "" if reason.startswith(f"{key}.") else key)
        case "missing":
            return Problem(f"is required ({shape.kind})", key, where=where)
        case "union_tag_not_found" | "union_tag_invalid":
            chooser = find(tree, (*path, shape.discriminator or ""))
            where = chooser.where if chooser is not None else where
            chosen = shown(context["tag"]) if "tag" in context else None
            choices = " or ".join(f"`{variant}`" for variant in shape.variants)
            return Problem(f"expected {choices}", f"{key}.{shape.discriminator}", chosen, where)
        case "finite_number":
            return Problem("expected a finite number", key, value, where)
    hint, is_text = "", isinstance(error["input"], str) and error["type"].endswith("_type")
    if is_text and setting is not None and "${oc.env:" in str(setting.value):
        hint = "; an environment variable is text, and ${oc.decode:${oc.env:NAME}} reads it as a value"
    return Problem(f"expected {shape.kind}{hint}", key, value, where)


def _unknown_key(path: KeyPath, given: Any, where: str) -> Problem:
    """Say which key was meant; when the unknown key holds one other key, the two are taken together."""
    section, key, parent = ".".join(path[:-1]), path[-1], _place(path[:-1])[1]
    if owners := [name for name, variant in parent.variants.items() if path[-1] in variant.fields]:
        reason = f"exists only with {section}.{parent.discriminator}={' or '.join(owners)}"
        return Problem(reason, ".".join(path), shown(given), where)
    while isinstance(given, dict) and len(given) == 1:
        ((part, given),) = given.items()
        path = (*path, part)
    if section == SECTION:
        reason = f"unknown key; {instead_of(key)}"
    elif instead := ABSENT.get(".".join(path)):
        reason = f"unknown key; {instead}"
    elif meant := nearest(".".join(path), section=isinstance(given, dict)):
        reason = f"unknown key; did you mean {' or '.join(meant)}?"
    else:
        reason = f"unknown key; {section or 'a run'} has the keys {', '.join(parent.fields)}"
    return Problem(reason, ".".join(path), shown(given), where)


def _place(location: tuple[str | int, ...]) -> tuple[KeyPath, Shape]:
    """The dotted path of a validation error, and what may stand there.

    Pydantic names variants in between, and after a value with several types the one that it is not.
    """
    path: KeyPath = ()
    shape = root()
    for part in location:
        if "anyOf" in shape.spec:
            break
        if part in shape.variants:
            shape = shape.variants[str(part)]
        elif part != "[key]":
            step = f"[{part}]" if isinstance(part, int) else part
            path, shape = (*path, step), shape.child(part) or Shape({})
    return path, shape
