"""What an answer can be besides one expression, when two answers are the same, and one text for equal ones."""

import re
from cmath import isfinite
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from beamline.tasks.graders import algebra
from beamline.tasks.graders.numbers import exact
from beamline.tasks.graders.numeric import differ, evaluate, symbols
from beamline.tasks.graders.syntax import Node, Unreadable, negative, number, read_expression


@dataclass(frozen=True, slots=True)
class Compound:
    """An answer made of others.

    ``kind`` is one of: ``list`` (without brackets, in any order), ``set``, ``union``, ``tuple`` (``mark`` names its
    parts, if they are named), ``ratio``, ``row`` and ``matrix``, ``interval`` (``mark`` has its two brackets),
    ``percent``, ``quantity`` (``mark`` is the unit), ``assign`` (``mark`` is the name that has the value), ``relation``
    (``mark`` is its sign), ``approx`` (exact and rounded), ``choice`` (``mark`` is the letter; an item where the choice
    was written out) and ``words`` (in ``mark``).
    """

    kind: str
    items: tuple["Value", ...] = ()
    mark: str = ""


Value: TypeAlias = Node | Compound

_UNORDERED = ("list", "set", "union")
_DOUBLES = 1e-12  # relative error of values in floating point
_MOST_PLACES = 300  # of decimals
_MOST_ITEMS = 40  # of collections in any order, which are compared pair by pair


def same(truth: Value, answer: Value) -> bool:
    """Whether an answer says the same as the expected one.

    Units need not be given, but must not contradict. ``50%`` is 0.5, and 50 too where the percentage is 1 or more.
    The order counts in tuples, intervals and ratios, not in sets and lists. An open interval and a pair look alike.
    """
    for kind, compare in _WRAPPERS:
        if _kind(truth) == kind or _kind(answer) == kind:
            return compare(truth, answer)
    if _kind(truth) in _UNORDERED or _kind(answer) in _UNORDERED:
        return _same_items(_members(truth), _members(answer))
    if isinstance(truth, Node) or isinstance(answer, Node):
        return isinstance(truth, Node) and isinstance(answer, Node) and algebra.equal(truth, answer)
    if truth.kind == answer.kind == "words":
        return truth.mark == answer.mark
    if truth.kind == answer.kind == "ratio":
        return _same_in_order(truth, answer) or _proportional(truth, answer)
    return _same_shape(truth, answer) and _same_in_order(truth, answer)


def _kind(value: Value) -> str:
    return value.kind if isinstance(value, Compound) else ""


def _same_shape(truth: Compound, answer: Compound) -> bool:
    kinds = [("tuple", "") if (v.kind, v.mark) == ("interval", "()") else (v.kind, v.mark) for v in (truth, answer)]
    if kinds[0][0] == kinds[1][0] == "tuple":
        return "" in (kinds[0][1], kinds[1][1]) or kinds[0][1] == kinds[1][1]
    return kinds[0] == kinds[1]


def _same_in_order(truth: Compound, answer: Compound) -> bool:
    return len(truth.items) == len(answer.items) and all(map(same, truth.items, answer.items))


def _members(value: Value) -> list[Value]:
    """The different members of a collection; of anything else, itself."""
    if not isinstance(value, Compound) or value.kind not in _UNORDERED:
        return [value]
    if len(value.items) > _MOST_ITEMS:
        return list(value.items)
    members: list[Value] = []
    for item in value.items:
        if not any(same(member, item) for member in members):
            members.append(item)
    return members


def _same_items(truth: list[Value], answer: list[Value]) -> bool:
    if len(truth) != len(answer) or len(truth) > _MOST_ITEMS:
        return False
    left = list(answer)
    for wanted in truth:
        nested = _kind(wanted) in _UNORDERED
        found = next((item for item in left if (_kind(item) in _UNORDERED) == nested and same(wanted, item)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_choice(truth: Value, answer: Value) -> bool:
    if isinstance(truth, Compound) and isinstance(answer, Compound) and truth.kind == answer.kind:
        return truth.mark == answer.mark
    choice, other = (truth, answer) if _kind(truth) == "choice" else (answer, truth)
    return isinstance(choice, Compound) and bool(choice.items) and same(choice.items[0], other)


def _same_quantity(truth: Value, answer: Value) -> bool:
    units = [value.mark for value in (truth, answer) if isinstance(value, Compound) and value.kind == "quantity"]
    bare = [
        value.items[0] if isinstance(value, Compound) and value.kind == "quantity" else value
        for value in (truth, answer)
    ]
    return len(set(units)) == 1 and same(*bare)


def _same_percent(truth: Value, answer: Value) -> bool:
    if isinstance(truth, Compound) and isinstance(answer, Compound) and truth.kind == answer.kind:
        return same(truth.items[0], answer.items[0])
    percent, other = (truth, answer) if _kind(truth) == "percent" else (answer, truth)
    if not isinstance(percent, Compound) or not isinstance(other, Node) or not isinstance(percent.items[0], Node):
        return False
    shown = percent.items[0]
    rate = exact(shown)
    if same(Node("mul", (shown, number(Fraction(1, 100)))), other):
        return True
    return rate is not None and abs(rate) >= 1 and same(shown, other)


def _same_approx(truth: Value, answer: Value) -> bool:
    if isinstance(truth, Compound) and truth.kind == "approx":
        return any(same(item, answer) for item in truth.items)
    if not isinstance(answer, Compound):
        return False
    rounded = isinstance(truth, Node) and truth.op == "num" and truth.number.denominator > 1
    return same(truth, answer.items[0]) or (rounded and same(truth, answer.items[1]))


def _same_assigned(truth: Value, answer: Value) -> bool:
    named = [value for value in (truth, answer) if isinstance(value, Compound) and value.kind == "assign"]
    if len(named) == 2:
        if named[0].mark == named[1].mark:
            return same(named[0].items[0], named[1].items[0])
        relations = [_as_relation(value) for value in named]
        return relations[0] is not None and relations[1] is not None and _same_relation(relations[0], relations[1])
    other = answer if named[0] is truth else truth
    if isinstance(other, Compound) and other.kind == "relation":
        relation = _as_relation(named[0])
        return relation is not None and _same_relation(other, relation)
    if named[0] is truth:
        return not re.search(r"[-+*/|]", named[0].mark) and same(named[0].items[0], other)
    return same(other, named[0].items[0])


def _as_relation(assigned: Compound) -> Compound | None:
    try:
        name = read_expression(assigned.mark)
    except Unreadable:
        return None
    return Compound("relation", (name, assigned.items[0]), "=")


def _same_relation(truth: Value, answer: Value) -> bool:
    """Equations are the same when the differences of their sides are, up to a factor.

    ``10m + n = 34`` also states the number 34; ``2x = 34`` does not, for it states that x is 17.
    """
    if not isinstance(answer, Compound) or answer.kind != "relation":
        return False
    if not isinstance(truth, Compound) or truth.kind != "relation":
        lhs, rhs = answer.items
        states = isinstance(lhs, Node) and len(symbols(lhs)) > 1 and isinstance(rhs, Node) and not symbols(rhs)
        return states and rhs != number(0) and answer.mark == "=" and same(truth, rhs)
    if truth.mark != answer.mark:
        return False
    left, right = _difference(truth), _difference(answer)
    if left is None or right is None or symbols(left) != symbols(right):
        return False
    factor = _factor(left, right)
    return factor is not None and algebra.equal(left, Node("mul", (number(factor), right)))


def _difference(relation: Compound) -> Node | None:
    a, b = relation.items
    return Node("add", (a, negative(b))) if isinstance(a, Node) and isinstance(b, Node) else None


def _factor(left: Node, right: Node) -> Fraction | None:
    """The rational number by which ``right`` must be multiplied to be ``left``, judged at one point."""
    point = {name: complex(0.7310 + 0.2917 * index) for index, name in enumerate(sorted(symbols(left)))}
    a, b = evaluate(left, point), evaluate(right, point)
    ratio = a / b if a and b else complex("nan")
    return Fraction(ratio.real).limit_denominator(1_000) if isfinite(ratio) and abs(ratio.imag) < 1e-9 else None


_WRAPPERS = (
    ("choice", _same_choice),
    ("assign", _same_assigned),
    ("relation", _same_relation),
    ("approx", _same_approx),
    ("quantity", _same_quantity),
    ("percent", _same_percent),
)


def _proportional(truth: Compound, answer: Compound) -> bool:
    """Whether the terms of two ratios are the same up to a factor: ``2:4`` is ``1:2``."""
    terms = [item for item in truth.items if isinstance(item, Node)]
    others = [item for item in answer.items if isinstance(item, Node)]
    if not len(truth.items) == len(terms) == len(others) == len(answer.items):
        return False
    first, other = terms[0], others[0]
    if algebra.equal(first, number(0)) or algebra.equal(other, number(0)):
        return False
    return all(
        algebra.equal(Node("mul", (term, other)), Node("mul", (said, first)))
        for term, said in zip(terms, others, strict=True)
    )


def is_close(a: Node, b: Node) -> bool:
    """Whether one of two numbers is a rounding of the other.

    The decimal among them, ``b`` first, is at most half a unit of its last digit away, or what is left when the other's
    digits are cut off. A fraction p/q approximates a number that is no decimal to within 1/(2 q^2).
    """
    left, right = evaluate(a, {}) if not symbols(a) else None, evaluate(b, {}) if not symbols(b) else None
    if left is None or right is None:
        return False
    error = abs(left - right)
    for rounded, value, shown in ((b, left, right), (a, right, left)):
        unit = _last_place(exact(rounded))
        if unit is not None:
            slack = _DOUBLES * abs(value)
            return error <= unit / 2 + slack or (abs(shown) < abs(value) and error < unit - slack)
    fraction = exact(b)
    return fraction is not None and error <= 1 / (2 * fraction.denominator**2)


def _last_place(value: Fraction | None) -> float | None:
    """The place value of the last digit of a decimal that is not 0; ``None`` for anything else."""
    if value is None:
        return None
    places = 0
    while value.denominator > 1 and places < _MOST_PLACES:
        value, places = value * 10, places + 1
    if value.denominator > 1:
        return None
    while value and value.numerator % 10 == 0 and places > -_MOST_PLACES:
        value, places = value / 10, places - 1
    return 10.0**-places


def agree(a: Node, b: Node) -> bool:
    """Whether two expressions without variables are not seen to differ."""
    left, right = exact(a), exact(b)
    return left == right if left is not None and right is not None else not differ(a, b)


def text_of(value: Value) -> str:
    """A text that equal answers to one problem usually share."""
    if isinstance(value, Node):
        return _text_of_node(value)
    inner = [text_of(item) for item in value.items]
    match value.kind:
        case "list" | "set" | "union":
            return "{" + ", ".join(sorted(set(inner))) + "}" if len(set(inner)) != 1 else inner[0]
        case "choice":
            return value.mark
        case "words":
            return value.mark
        case "percent":
            return f"{inner[0]}%"
        case "ratio":
            return ":".join(inner)
        case "relation":
            return value.mark.join(inner)
        case "interval":
            return f"{value.mark[0]}{inner[0]}, {inner[1]}{value.mark[1]}"
        case "quantity" | "assign" | "approx":
            return inner[0]
        case _:
            return "(" + ", ".join(inner) + ")"


def _text_of_node(node: Node) -> str:
    known = exact(node)
    if known is not None:
        return str(known)
    if node.op in ("sym", "inf"):
        return node.name or "inf"
    inner = [_text_of_node(part) for part in node.args]
    if node.op in ("add", "mul"):
        return "(" + (" + " if node.op == "add" else "*").join(sorted(inner)) + ")"
    return f"{node.name or node.op}({', '.join(inner)})"
