"""The exact value of an expression that is a rational number, within bounds on its size."""

import math
from fractions import Fraction

from beamline.tasks.graders.syntax import Node, Unreadable

_BITS = 12_000  # of a numerator or denominator: under 4,000 digits, which Python turns into text
_SYMBOLIC_BITS = 200_000  # of a power that algebra may still compare
_FACTORIAL, _SYMBOLIC_FACTORIAL = 500, 10_000
_BINOMIAL = 2_000


def exact(node: Node) -> Fraction | None:
    """The rational value of a tree, or ``None`` when it has none that plain arithmetic finds.

    Raises:
        Unreadable: a division by zero, or a number too large for algebra as well.
    """
    if node.op == "num":
        return node.number
    if node.op in ("sym", "inf", "call", "pm", "mp"):
        return None
    values = [exact(part) for part in node.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    found = _apply(node.op, known)
    if found is not None and max(found.numerator.bit_length(), found.denominator.bit_length()) > _BITS:
        return None
    return found


def _apply(op: str, values: list[Fraction]) -> Fraction | None:
    first = values[0]
    match op:
        case "add":
            return sum(values, Fraction(0))
        case "mul":
            return _product(values)
        case "neg":
            return -first
        case "abs":
            return abs(first)
        case "floor":
            return Fraction(math.floor(first))
        case "ceil":
            return Fraction(math.ceil(first))
        case "inv":
            if not first:
                raise Unreadable("a division by zero")
            return 1 / first
        case "pow":
            return _power(first, values[1])
        case "root":
            return _root(values[1], first)
        case "fact":
            return _factorial(first)
        case "binom":
            return _binomial(first, values[1])
    raise AssertionError(op)


def _product(values: list[Fraction]) -> Fraction:
    found = Fraction(1)
    for value in values:
        found *= value
        if found.numerator.bit_length() > 2 * _BITS:
            raise Unreadable("a number of thousands of digits")
    return found


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        root = _root(base, Fraction(exponent.denominator)) if base >= 0 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if not base and exponent <= 0:
        raise Unreadable("zero to a power that is not positive")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and size * abs(exponent.numerator) > _BITS:
        _refuse_if(size * abs(exponent.numerator) > _SYMBOLIC_BITS)
        return None
    return base ** (exponent.numerator if abs(base) != 1 else exponent.numerator % 2)


def _root(radicand: Fraction, degree: Fraction) -> Fraction | None:
    """The real root, if it is rational."""
    if degree.denominator != 1 or not 1 < degree <= 100:
        return None
    n = degree.numerator
    if radicand < 0:
        positive = _root(-radicand, degree) if n % 2 else None
        return None if positive is None else -positive
    top, bottom = _integer_root(radicand.numerator, n), _integer_root(radicand.denominator, n)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, n: int) -> int | None:
    if n == 2:
        root = math.isqrt(value)
    else:
        low, high = 0, 1 << -(-value.bit_length() // n)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**n <= value else (low, middle - 1)
        root = low
    return root if root**n == value else None


def _factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0 or value > _FACTORIAL:
        _refuse_if(value.denominator != 1 or not 0 <= value <= _SYMBOLIC_FACTORIAL)
        return None
    return Fraction(math.factorial(value.numerator))


def _refuse_if(hopeless: bool) -> None:
    """Leaves a large number to algebra, but not one that is undefined, or that algebra could not hold."""
    if hopeless:
        raise Unreadable("not defined, or a number too large for anybody's answer")


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or not 0 <= n <= _BINOMIAL or k < 0:
        raise Unreadable("a binomial of no small natural numbers")
    return Fraction(math.comb(n.numerator, k.numerator))
