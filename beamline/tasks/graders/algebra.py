"""Whether two expressions are the same for every value of their variables, by computer algebra.

The only slow part of grading, and the only one that imports sympy, at its first use. It may run for long, or need much
memory, on expressions made to do so: callers run it where both are limited.
"""

from typing import Any

from beamline.tasks.graders.numbers import exact
from beamline.tasks.graders.numeric import differ
from beamline.tasks.graders.syntax import Node, contains

_DIGITS = 60
_AGREE = "1e-40"  # relative difference of two values computed with 60 digits
_POINTS = (("3/7", "-11/5"), ("-13/9", "17/6"), ("19/8", "5/13"))


def equal(a: Node, b: Node) -> bool:
    """Whether two expressions are equal; two rational numbers exactly so: ``0.333`` is not 1/3."""
    if a == b:
        return True
    left, right = exact(a), exact(b)
    if left is not None and right is not None:
        return left == right
    if contains(a, "inf") or contains(b, "inf") or differ(a, b):
        return False
    return _proved(a, b)


def _proved(a: Node, b: Node) -> bool:
    """Agreement to 40 digits at a few points, unless simplification shows a difference that is not zero."""
    import sympy
    from sympy.polys.polyerrors import BasePolynomialError

    # What sympy raises where it has no method, or a function no value; its documentation has no list of them.
    failures = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError, BasePolynomialError)
    try:
        difference = to_sympy(a) - to_sympy(b)
        if difference == 0:
            return True
        if difference.has(sympy.zoo, sympy.nan, sympy.oo) or not _vanishes(difference, to_sympy(a)):
            return False
    except failures:
        return False
    try:
        return sympy.simplify(difference).is_zero is not False
    except failures:
        return True  # the digits agree, and nothing speaks against it


def _vanishes(difference: Any, size: Any) -> bool:
    import sympy

    names = sorted(difference.free_symbols | size.free_symbols, key=str)
    for first, second in _POINTS if names else _POINTS[:1]:
        values = {
            name: sympy.Rational((first, second)[index % 2]) + sympy.Rational(index, 3)
            for index, name in enumerate(names)
        }
        gap, scale = (abs(part.subs(values).evalf(_DIGITS)).evalf(_DIGITS) for part in (difference, size))
        if not (gap.is_Float or gap.is_Rational) or gap > sympy.Float(_AGREE, _DIGITS) * sympy.Max(1, scale):
            return False
    return True


def to_sympy(node: Node) -> Any:
    """The sympy expression of a tree."""
    import sympy

    if node.op == "num":
        return sympy.Rational(node.number.numerator, node.number.denominator)
    if node.op == "sym":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I}.get(node.name) or sympy.Symbol(node.name)
    values = [to_sympy(part) for part in node.args]
    if node.op == "call":
        return _call(node.name, values)
    if node.op == "root":
        degree, radicand = values
        return sympy.real_root(radicand, degree) if radicand.is_real and degree.is_odd else radicand ** (1 / degree)
    return {
        "add": sympy.Add,
        "mul": sympy.Mul,
        "pow": sympy.Pow,
        "neg": lambda x: -x,
        "inv": lambda x: 1 / x,
        "abs": sympy.Abs,
        "floor": sympy.floor,
        "ceil": sympy.ceiling,
        "fact": sympy.factorial,
        "binom": sympy.binomial,
        "inf": lambda: sympy.oo,
    }[node.op](*values)


def _call(name: str, values: list[Any]) -> Any:
    import sympy

    if name == "log":
        base = sympy.log(values[1]) if len(values) > 1 else sympy.Symbol("base of log", positive=True)
        return sympy.log(values[0]) / base
    known = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
    return getattr(sympy, known.get(name, name))(values[0])
