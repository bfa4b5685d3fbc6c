"""Layers of settings (defaults, base, recipe, overrides) laid one over another, each setting with its origin."""

import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from beamline.config.errors import ConfigError, Problem, shown
from beamline.config.keys import Shape

DOTTED_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
NULL = {"null", "Null", "NULL", "~"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that is no mapping, the number of the layer that set it, and where: a file and line, or ``override``."""

    value: Any
    layer: int
    where: str


Tree: TypeAlias = dict[str, "Tree"] | Setting
KeyPath: TypeAlias = tuple[str, ...]


def settings(values: Any, layer: int, where: Callable[[KeyPath], str], path: KeyPath = ()) -> Tree:
    """Turn plain data into a tree of settings.

    Raises:
        ConfigError: a key is no text.
    """
    if not isinstance(values, Mapping):
        return Setting(values, layer, where(path))
    for key in values:
        if not isinstance(key, str):
            here = (*path, str(key))
            raise ConfigError([Problem("keys are text: quote it", ".".join(here), where=where(here))])
    return {key: settings(value, layer, where, (*path, key)) for key, value in values.items()}


def read_base(base: Mapping[str, Any], layer: int) -> Tree:
    """Take plain data, such as a YAML file would give.

    Raises:
        ConfigError: it holds something else, or an interpolation that cannot be read.
    """
    try:
        values = OmegaConf.to_container(OmegaConf.create(dict(base)))
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(_reason(error), str(error.full_key or ""), where="base")]) from error
    return settings(values, layer, lambda _: "base")


def read_recipe(recipe: Path, layer: int) -> Tree:
    """Read a YAML file; interpolations stay as they are written.

    Raises:
        ConfigError: the file cannot be read, is no YAML, has a key twice, is empty or is no mapping.
    """
    try:
        text = recipe.read_text(encoding="utf-8")
        document = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(document, yaml.MappingNode):
            reason = "the recipe is empty" if document is None else "a recipe is a mapping of keys to values"
            raise ConfigError([Problem(reason, where=str(recipe))])
        values = _load(text)
    except OSError as error:
        raise ConfigError([Problem(f"cannot read the recipe: {error.strerror}", where=str(recipe))]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(f"the recipe is not UTF-8 text: {error}", where=str(recipe))]) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{recipe}:{mark.line + 1}" if mark is not None else str(recipe)
        raise ConfigError([Problem(_reason(error), where=where)]) from error
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        where = _origins(recipe, text)(tuple(re.split(r"[.\[]", key)))
        raise ConfigError([Problem(_reason(error), key, where=where)]) from error
    return settings(values, layer, _origins(recipe, text))


def read_override(text: str, layer: int) -> tuple[KeyPath, Tree]:
    """Read ``dotted.key=value``, the value being YAML.

    Raises:
        ConfigError: it has no such form.
    """
    key, equals, value = text.partition("=")
    where = f"override {text!r}"
    if not equals or not DOTTED_KEY.fullmatch(key):
        raise ConfigError([Problem("an override has the form dotted.key=value", where=where)])
    try:
        parsed = _load("value:\n" + textwrap.indent(value, "  "))["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([Problem(_reason(error), where=where)]) from error
    if parsed is None and value.strip() not in NULL:
        raise ConfigError([Problem(f"no value; write {key}=null, or {key}='\"\"' for empty text", where=where)])
    path = tuple(key.split("."))
    return path, settings(parsed, layer, lambda _: "override", path)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every key of a YAML mapping, counted from 1."""
    return dict(_walk(yaml.compose(text, Loader=yaml.SafeLoader)))


def merge(lower: Tree | None, upper: Tree, shape: Shape | None) -> Tree:
    """Lay ``upper`` over ``lower``: the keys of a section are merged, a mapping of free names is replaced whole.

    A bare text for a section with variants, or with an ``engine``, names one: ``algorithm.loss=gspo``.
    """
    if isinstance(upper, Setting):
        chooser = (shape.discriminator or ("engine" if "engine" in shape.fields else None)) if shape else None
        if isinstance(upper.value, str) and chooser is not None and "${" not in upper.value:
            return merge(lower, {chooser: upper}, shape)
        return upper
    if not isinstance(lower, dict) or shape is None or shape.entry is not None:
        return upper
    merged = {key: merge(lower.get(key), value, shape.child(key)) for key, value in upper.items()}
    return {**lower, **{key: _chosen(shape, key, lower.get(key), value) for key, value in merged.items()}}


def _chosen(shape: Shape | None, key: str, lower: Tree | None, upper: Tree) -> Tree:
    """What a key is set to; a variant that is chosen again keeps the layer that first chose it, and all its keys."""
    names_variant = shape is not None and key == shape.discriminator
    again = isinstance(lower, Setting) and isinstance(upper, Setting) and upper.value == lower.value
    return lower if names_variant and again and lower is not None else upper


def assign(tree: Tree, path: KeyPath, value: Tree, shape: Shape | None, done: KeyPath = ()) -> Tree:
    """Lay a value over one place of the tree; ``done`` is the part of the path that led to ``tree``.

    Raises:
        ConfigError: the path leads through a value.
    """
    if not path:
        return merge(tree, value, shape)
    if isinstance(tree, Setting):
        reason = f"{'.'.join(done)} is {shown(tree.value)}, which has no keys"
        raise ConfigError([Problem(reason, ".".join(done + path), shown(plain(value)), "override")])
    key, child = path[0], shape.child(path[0]) if shape is not None else None
    assigned = assign(tree.get(key, {}), path[1:], value, child, (*done, key))
    return {**tree, key: _chosen(shape, key, tree.get(key), assigned)}


def drop_stale(tree: Tree, shape: Shape | None, look_up: Callable[[KeyPath], Any], path: KeyPath = ()) -> Tree:
    """Leave out what lower layers say of a section, where a higher one chose another variant of it.

    ``look_up`` gives the resolved value of a key. Keys that no variant knows stay, to be reported.
    """
    if isinstance(tree, Setting) or shape is None:
        return tree
    chooser = tree.get(shape.discriminator or "")
    if isinstance(chooser, Setting) and str(look_up((*path, shape.discriminator or ""))) in shape.variants:
        tree = {key: below for key, below in tree.items() if key not in shape.fields or _layer(below) >= chooser.layer}
    return {key: drop_stale(below, shape.child(key), look_up, (*path, key)) for key, below in tree.items()}


def find(tree: Tree, path: KeyPath) -> Setting | None:
    """The setting that a path leads to or runs into, else the first one below the path; None in an empty mapping."""
    for part in path:
        if isinstance(tree, Setting) or part not in tree:
            break
        tree = tree[part]
    while isinstance(tree, dict) and tree:
        tree = next(iter(tree.values()))
    return tree if isinstance(tree, Setting) else None


def plain(tree: Tree) -> Any:
    """The values alone."""
    if isinstance(tree, Setting):
        return tree.value
    return {key: plain(below) for key, below in tree.items()}


def _layer(tree: Tree) -> int:
    """The highest layer that set something here. An empty mapping is no layer's leavings: somebody wrote it."""
    return tree.layer if isinstance(tree, Setting) else max(map(_layer, tree.values()), default=sys.maxsize)


def _load(text: str) -> dict[Any, Any]:
    """Read a mapping with OmegaConf, whose YAML knows 1e-5 as a number and refuses a key given twice."""
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    assert isinstance(values, dict)
    return values


def _reason(error: yaml.YAMLError | OmegaConfBaseException) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return "invalid YAML: " + ", ".join(part for part in (error.context, error.problem) if part)
    if isinstance(error, GrammarParseError):
        return f"invalid interpolation: {str(error).splitlines()[0]}"
    return str(error).splitlines()[0]


def _origins(recipe: Path, text: str) -> Callable[[KeyPath], str]:
    """Gives the file and line of a path, or of the key that it is inside of."""
    lines = key_lines(text)

    def where(path: KeyPath) -> str:
        known = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        return str(recipe) if known is None else f"{recipe}:{lines[known]}"

    return where


def _walk(node: yaml.Node | None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            yield here, key.start_mark.line + 1
            yield from _walk(value, here)
