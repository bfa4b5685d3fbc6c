"""The schema as a tree of keys: what may stand where, for merging, error messages and documentation."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from beamline.config.schema import RunConfig

REQUIRED = object()
"""Default of a key that has none."""

ANY_NAME = "<name>"
"""Stands in a dotted key for a name that the user chooses."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What may stand at one place, as JSON Schema: a section, a section with variants, a mapping or a value.

    A section has fixed keys. Its variants differ in a ``discriminator``: ``source`` chooses the keys of
    ``data.train``. A mapping has names of the user's choice, and the same shape (``entry``) behind each.
    """

    spec: Mapping[str, Any]

    @property
    def discriminator(self) -> str | None:
        """The key that chooses among the variants."""
        name: str | None = self.spec.get("discriminator", {}).get("propertyName")
        return name

    @property
    def variants(self) -> dict[str, "Shape"]:
        """The section of each value of the discriminator."""
        references = self.spec.get("discriminator", {}).get("mapping", {})
        return {value: Shape(_follow({"$ref": reference})) for value, reference in references.items()}

    @property
    def fields(self) -> dict[str, "Shape"]:
        """The keys of a section, over all its variants; the first variant that has a key describes it."""
        fields = {key: Shape(_follow(spec)) for key, spec in self.spec.get("properties", {}).items()}
        for variant in self.variants.values():
            fields = {**fields, **{key: shape for key, shape in variant.fields.items() if key not in fields}}
        return fields

    @property
    def entry(self) -> "Shape | None":
        """What stands behind each name of a mapping."""
        patterns = self.spec.get("patternProperties", {})
        spec = next(iter(patterns.values()), None) or self.spec.get("additionalProperties")
        return Shape(_follow(spec)) if spec else None

    @property
    def meaning(self) -> str:
        """The docstring of the key, or of its section."""
        return " ".join(str(self.spec.get("description", "")).split())

    @property
    def default(self) -> Any:
        """The default as plain data, or :data:`REQUIRED`."""
        return self.spec.get("default", REQUIRED)

    @property
    def kind(self) -> str:
        """Type, choices and bounds in words, such as ``integer >= 1``."""
        return _kind(self)

    def child(self, part: str | int) -> "Shape | None":
        """What may stand behind a key, a name or a list index; None if nothing may."""
        if isinstance(part, int):
            items = self.spec.get("prefixItems", [])
            spec = items[part] if part < len(items) else self.spec.get("items")
            return Shape(_follow(spec)) if spec else None
        return self.entry or self.fields.get(part)


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its documentation; ``condition`` such as ``source=file`` names the variant that it belongs to."""

    name: str
    shape: Shape
    default: Any
    meaning: str
    condition: str = ""


@cache
def root() -> Shape:
    """The shape of a whole run."""
    return Shape(RunConfig.model_json_schema())


def keys() -> Iterator[Key]:
    """Every key, sections included, in the order of the schema; a section comes before the keys inside it."""
    return _section_keys(root(), "", RunConfig().model_dump(mode="json"))


def nearest(name: str, section: bool = False) -> list[str]:
    """The valid keys that a wrong dotted key may have meant: those that end in it, else the most similar one.

    ``temperature`` gives two, since it exists twice; what resembles nothing gives none. With ``section`` the wrong
    key held a mapping, so that sections are proposed.
    """
    given = name.split(".")
    candidates = [
        _named_like(key.name, given)
        for key in keys()
        if section == bool(key.shape.fields or key.shape.entry) or key.shape.variants  # which take a name alone, too
    ]
    if ends := [candidate for candidate in candidates if candidate.endswith("." + name)]:
        return ends
    last = {candidate.rsplit(".", 1)[-1]: candidate for candidate in reversed(candidates)}
    return difflib.get_close_matches(name, candidates, n=1) or [
        last[word] for word in difflib.get_close_matches(given[-1], last, n=1, cutoff=0.75)
    ]


def _named_like(candidate: str, given: list[str]) -> str:
    parts = candidate.split(".")
    if ANY_NAME in parts and len(given) > (place := parts.index(ANY_NAME)):
        parts[place] = given[place]
    return ".".join(parts)


def _section_keys(shape: Shape, prefix: str, defaults: Mapping[str, Any], condition: str = "") -> Iterator[Key]:
    """Keys below ``prefix``; ``defaults`` are those of the enclosing section and win over the key's own."""
    if shape.variants:
        yield from _variant_keys(shape, prefix, defaults)
        return
    for name, child in shape.fields.items():
        default = defaults.get(name, child.default)
        inherited = default if isinstance(default, Mapping) else {}
        yield Key(prefix + name, child, default, child.meaning, condition)
        if child.fields:
            yield from _section_keys(child, f"{prefix}{name}.", inherited, condition)
        elif child.entry:
            yield from _section_keys(child.entry, f"{prefix}{name}.{ANY_NAME}.", {}, condition)


def _variant_keys(shape: Shape, prefix: str, defaults: Mapping[str, Any]) -> Iterator[Key]:
    chooser = shape.discriminator or ""
    meaning = " ".join(f"`{value}`: {variant.meaning}" for value, variant in shape.variants.items())
    choices = Shape({"enum": list(shape.variants)})
    yield Key(prefix + chooser, choices, defaults.get(chooser, REQUIRED), meaning)
    for value, variant in shape.variants.items():
        chosen = defaults if defaults.get(chooser) == value else {}
        for key in _section_keys(variant, prefix, chosen, f"{chooser}={value}"):
            if key.name != prefix + chooser:
                yield key


def _follow(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace a reference by its definition; what stands beside the reference wins."""
    if "$ref" not in spec:
        return spec
    definition = root().spec["$defs"][spec["$ref"].rsplit("/", 1)[-1]]
    return {**definition, **{key: value for key, value in spec.items() if key != "$ref"}}


def _kind(shape: Shape) -> str:
    spec = shape.spec
    if shape.variants:
        return " or ".join(f"`{name}`" for name in shape.variants) + ", alone or with settings"
    if shape.fields:
        return "a section with the keys " + ", ".join(shape.fields)
    if shape.entry:
        names = " and ".join(f" matching `{pattern}`" for pattern in spec.get("patternProperties", {}))
        entries = "sections" if shape.entry.fields else f"({_kind(shape.entry)})"
        return f"a mapping of names{names} to {entries}"
    choices = spec.get("enum", [spec["const"]] if "const" in spec else [])
    if choices:
        return " or ".join(f"`{choice}`" for choice in choices)
    if "anyOf" in spec:
        return " or ".join(_kind(Shape(_follow(option))) for option in spec["anyOf"])
    if spec["type"] == "array":
        return _list_kind(spec)
    words = {"boolean": "true or false", "null": "null", "string": "path" if spec.get("format") == "path" else "text"}
    return words.get(spec["type"], str(spec["type"])) + _bounds(spec)


def _list_kind(spec: Mapping[str, Any]) -> str:
    if "prefixItems" in spec:
        return "list of " + ", ".join(f"({_kind(Shape(_follow(item)))})" for item in spec["prefixItems"])
    least = f", at least {spec['minItems']} long" if spec.get("minItems") else ""
    return f"list of ({_kind(Shape(_follow(spec['items'])))}){least}"


def _bounds(spec: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {spec[name]}" for name, sign in signs.items() if name in spec]
    if "multipleOf" in spec:
        bounds.append(f"a multiple of {spec['multipleOf']}")
    if "pattern" in spec:
        bounds.append(f"matching `{spec['pattern']}`")
    return " " + " and ".join(bounds) if bounds else ""
