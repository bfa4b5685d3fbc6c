"""From a text to the answer it states: numbers, expressions, sets, tuples, intervals, equations, choices, words."""

import re
from dataclasses import replace

from beamline.tasks.graders.brackets import enclosed, split
from beamline.tasks.graders.numbers import exact
from beamline.tasks.graders.numeric import symbols
from beamline.tasks.graders.plain import notation, squeezed, trimmed, unseparated
from beamline.tasks.graders.syntax import Node, Unreadable, contains, negative, number, read_expression
from beamline.tasks.graders.units import split_unit
from beamline.tasks.graders.values import Compound, Value, agree, is_close

_INTEGER = re.compile(r"[+-]?[0-9]+")
_LIST = re.compile(r"\s*(?:[,;]\s*(?:and|or)\b|[,;]|\b(?:and|or)\b)\s*")
_COMMA = re.compile(r"[,;]")
_RELATION = re.compile(r"\\(?:le|ge|ne|approx|in)(?![A-Za-z])|<=|>=|[=<>]")
_COLON = re.compile(r":")
_UNION = re.compile(r"\\cup(?![A-Za-z])")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}", re.DOTALL)
_CHOICE = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\(\s*([A-J])\s*\)|([A-J])(?=[).:]\s|[).:]?$))[).:]?(?:\s+(?!or\b|and\b)(\S.*))?",
    re.IGNORECASE | re.DOTALL,
)
_WORDS = re.compile(r"[A-Za-z]+(?:[ '-]+[A-Za-z]+){0,5}")
_NAMES = re.compile(r"\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)")
_SUBSCRIPT_OR_ARGUMENT = re.compile(r"_(?:\{[^{}]*\}|[0-9A-Za-z])|\([^()]*\)")
_NO_NAME = re.compile(
    r"[0-9,;:!^]|\\frac|sqrt|\\pi|^-|\b(?:for|if|when|not|no|with|where|let|since|because|as|at|only|than|until|is|are|or|and)\b"
)
_REALS = ("all real numbers", "all reals", "real numbers")
_INFINITY = Node("inf")
_SIGNS = {"<=": "\\le", ">=": "\\ge"}
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}


def read(text: str) -> Value:
    """The answer that a text states, all of it.

    Raises:
        Unreadable: the text is not wholly one answer.
    """
    bare = text.strip()
    if len(bare) <= 100 and _INTEGER.fullmatch(bare):
        return number(int(bare))
    plain = notation(text)
    if len(plain) <= 100 and _INTEGER.fullmatch(plain):
        return number(int(plain))
    if not plain:
        raise Unreadable("nothing")
    choice = _CHOICE.fullmatch(plain)
    if choice and (choice[1] or choice[2]).isupper():
        return Compound("choice", (read_plain(choice[3]),) if choice[3] else (), choice[1] or choice[2])
    return read_plain(plain)


def read_as_list(text: str) -> Value:
    """A text whose commas all separate: ``100,200,300`` are three numbers."""
    return _structure(notation(text), 0)


def read_plain(plain: str) -> Value:
    """The answer in a text that is in plain notation already."""
    try:
        value = _structure(unseparated(plain), 0)
    except Unreadable:
        if not _are_words(plain):
            raise
        return _words(plain)
    return (
        _words(plain) if plain.isalpha() and len(plain) > 2 and isinstance(value, Node) and value.op == "mul" else value
    )


def _are_words(plain: str) -> bool:
    return len(plain) <= 60 and _WORDS.fullmatch(plain) is not None


def _words(plain: str) -> Value:
    words = " ".join(plain.casefold().replace("-", " ").split())
    if words in _REALS:
        return Compound("interval", (negative(_INFINITY), _INFINITY), "()")
    return Compound("words", (), re.sub(r"^(?:the|an?) (?=.)", "", words))


def _structure(text: str, depth: int) -> Value:
    if depth > 6 or not text:
        raise Unreadable("nested too deeply" if text else "nothing where a value should be")
    text = trimmed(text)
    items, _ = split(text.removeprefix("either "), _LIST)
    if len(items) > 1:
        return _listed([_structure(unseparated(item), depth + 1) for item in items])
    parts, signs = split(text, _RELATION)
    if signs:
        return _related(parts, [_SIGNS.get(sign, sign) for sign in signs], depth)
    bare, unit = split_unit(text)
    value = _single(bare, depth)
    if unit == "%":
        return Compound("percent", (value,))
    return Compound("quantity", (value,), unit) if unit else value


def _single(text: str, depth: int) -> Value:
    """One thing without a unit."""
    for pattern, kind in ((_UNION, "union"), (_COLON, "ratio")):
        parts, signs = split(text, pattern)
        if signs:
            found = [_structure(part, depth + 1) for part in parts]
            return Compound(kind, tuple(map(_as_interval, found) if kind == "union" else found))
    if text == "\\emptyset":
        return Compound("set")
    if text == "\\mathbb{R}":
        return Compound("interval", (negative(_INFINITY), _INFINITY), "()")
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix[2], depth)
    bracketed = enclosed(text)
    if bracketed:
        collection = _collection(*bracketed, depth)
        if collection:
            return collection
    return _expression(text)


def _expression(text: str) -> Value:
    node = _defined(text)
    if not contains(node, "pm", "mp"):
        return node
    return Compound("list", (_with_sign(node, 1), _with_sign(node, -1)))


def _defined(text: str) -> Node:
    node = read_expression(text)
    exact(node)  # refuses what is not defined, or too large
    return node


def _side(text: str) -> Node:
    """A side of a relation, which has one value."""
    node = _defined(text)
    if contains(node, "pm", "mp"):
        raise Unreadable("a relation with two signs")
    return node


def _collection(opening: str, content: str, closing: str, depth: int) -> Value | None:
    if opening == "\\{" and closing == "\\}":
        if not content.strip():
            return Compound("set")
        return Compound("set", _separated(content, depth))
    if "\\{" in (opening, closing) or "\\}" in (opening, closing):
        raise Unreadable("brackets that do not match")
    items, _ = split(content, _COMMA)
    if len(items) < 2:
        return None
    values = _separated(content, depth)
    if len(items) == 2 and (opening, closing) != ("(", ")"):
        return Compound("interval", values, opening + closing)
    if (opening, closing) in (("(", ")"), ("[", "]")):
        return Compound("tuple", values)
    raise Unreadable("an interval of more than two ends")


def _separated(content: str, depth: int) -> tuple[Value, ...]:
    return tuple(_structure(item, depth + 1) for item in split(content, _COMMA)[0])


def _matrix(content: str, depth: int) -> Value:
    rows = [row for row in content.split("\\\\") if row.strip()]
    cells = [tuple(_structure(cell.strip(), depth + 1) for cell in row.split("&")) for row in rows]
    return Compound("matrix", tuple(Compound("row", row) for row in cells))


def _as_interval(value: Value) -> Value:
    """In a union a pair is an open interval."""
    if isinstance(value, Compound) and value.kind == "tuple" and len(value.items) == 2:
        return Compound("interval", value.items, "()")
    return value


def _listed(items: list[Value]) -> Value:
    """Several answers side by side; ``x = 3, y = 4`` in the order of the names is the pair (3, 4)."""
    names = [item.mark for item in items if isinstance(item, Compound) and item.kind == "assign"]
    if names and len(set(names)) == 1:
        items = [item.items[0] if isinstance(item, Compound) and item.kind == "assign" else item for item in items]
    elif len(set(names)) == len(items) and all(name.isalpha() and len(name) == 1 for name in names):
        by_name = {item.mark: item.items[0] for item in items if isinstance(item, Compound)}
        return Compound("tuple", tuple(by_name[name] for name in sorted(names)), "".join(sorted(names)))
    flat: list[Value] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Compound) and item.kind == "list" else [item])
    return Compound("list", tuple(flat))


def _related(parts: list[str], signs: list[str], depth: int) -> Value:
    if not parts[0] and signs in (["="], ["\\in"]):
        return _structure(parts[1], depth + 1)
    if not parts[0] and signs == ["\\approx"]:
        return _decimal(_structure(parts[1], depth + 1))
    if not all(parts):
        raise Unreadable("a relation without one of its sides")
    if signs == ["\\in"]:
        if not _is_name(parts[0]):
            raise Unreadable("membership of something that has no name")
        return _as_interval(_structure(parts[1], depth + 1))
    if signs[-1] == "\\approx" and set(signs[:-1]) <= {"="}:
        return _rounded(parts, signs, depth)
    if set(signs) == {"="}:
        return _equal(parts, depth)
    if signs == ["\\ne"]:
        return Compound("relation", (_side(parts[0]), _side(parts[1])), "\\ne")
    return _bounded(parts, signs)


def _rounded(parts: list[str], signs: list[str], depth: int) -> Value:
    rounded = _structure(parts[-1], depth + 1)
    if len(parts) == 2 and _is_name(parts[0]):
        return Compound("assign", (_decimal(rounded),), squeezed(parts[0]))
    known = _related(parts[:-1], signs[:-1], depth) if len(parts) > 2 else _structure(parts[0], depth + 1)
    inner = known.items[0] if isinstance(known, Compound) and known.kind == "assign" else known
    if not isinstance(inner, Node) or not isinstance(rounded, Node) or not is_close(inner, rounded):
        raise Unreadable("an approximation of something else")
    return Compound("approx", (inner, rounded))


def _decimal(value: Value) -> Value:
    """A value that is said to be approximate: whole numbers are not, whoever rounds says so in decimals."""
    inner = value.items[0] if isinstance(value, Compound) and value.kind == "quantity" else value
    if not isinstance(inner, Node) or inner.op != "num" or inner.number.denominator == 1:
        raise Unreadable("about a whole number")
    return value


def _equal(parts: list[str], depth: int) -> Value:
    """The value at the end of a chain of equalities; what stands before must be its name, or the same number."""
    last = _structure(parts[-1], depth + 1)
    if _NAMES.fullmatch(parts[0]) and len(parts) == 2 and isinstance(last, Compound):
        return last
    before, name = parts[:-1], ""
    if _is_name(before[0]):
        name = squeezed(before.pop(0))
    elif len(parts) > 2 and len(symbols(_side(before[0]))) == 1:
        raise Unreadable("an equation to be solved")
    for part in before:
        node = _side(part)
        if not isinstance(last, Node):
            continue
        if not symbols(node) and not symbols(last):
            if not agree(node, last):
                raise Unreadable("two sides that are not equal")
        elif len(parts) == 2:
            return Compound("relation", (node, last) if symbols(node) else (last, node), "=")
    return Compound("assign", (last,), name) if name else last


def _is_name(text: str) -> bool:
    """Whether a text names a quantity (``x``, ``f(3)``, ``m+n``, ``\\cos A``, ``Area``) that can have a value.

    What must be solved for its only variable is no name: ``-x``, ``2x``, ``x^2``, ``|x|``.
    """
    bare = _SUBSCRIPT_OR_ARGUMENT.sub("", text).strip()
    if len(text) > 60 or not re.search("[A-Za-z]", bare) or _NO_NAME.search(bare):
        return False
    try:
        node = read_expression(text if bare.startswith("\\") else bare)
    except Unreadable:
        return True
    return node.op == "sym" or (node.op == "call" and node.name not in ("ln", "log", "exp")) or len(symbols(node)) > 1


def _bounded(parts: list[str], signs: list[str]) -> Value:
    """The interval that inequalities with one variable describe: ``x < 3``, ``1 < x \\le 3``."""
    sides = [_side(part) for part in parts]
    variable = [index for index, side in enumerate(sides) if side.op == "sym" and symbols(side)]
    if len(variable) != 1 or len(sides) > 3:
        raise Unreadable("inequalities that bound no single variable")
    at = variable[0]
    low: tuple[Node, str] = (negative(_INFINITY), "<")
    high: tuple[Node, str] = (_INFINITY, "<")
    for side, sign in ((at - 1, signs[at - 1] if at else ""), (at + 1, signs[at] if at < len(signs) else "")):
        if not sign:
            continue
        sign = _FLIPPED[sign] if side > at and sign in _FLIPPED else sign
        # now it reads: side, sign, variable
        if sign in ("<", "\\le"):
            low = (sides[side], sign)
        elif sign in (">", "\\ge"):
            high = (sides[side], _FLIPPED[sign])
        else:
            raise Unreadable("an equality among inequalities")
    if len(sides) == 3 and (at != 1 or _INFINITY in (high[0], negative(low[0]))):
        raise Unreadable("bounds that are not on both sides")
    return Compound("interval", (low[0], high[0]), ("(" if low[1] == "<" else "[") + (")" if high[1] == "<" else "]"))


def _with_sign(node: Node, sign: int) -> Node:
    if node.op in ("pm", "mp"):
        inner = _with_sign(node.args[0], sign)
        return inner if sign == (1 if node.op == "pm" else -1) else negative(inner)
    return replace(node, args=tuple(_with_sign(part, sign) for part in node.args))
