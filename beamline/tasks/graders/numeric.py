"""Floating-point values of expressions: a quick way to see that two of them differ. It never proves that they agree."""

import cmath
import math
from collections.abc import Callable, Iterator

from beamline.tasks.graders.syntax import Node

_POINTS = 3
_TOLERANCE = 1e-6
_CONSTANTS = {"pi": complex(math.pi), "e": complex(math.e), "i": 1j}
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "exp": cmath.exp,
    "ln": cmath.log,
}
UNSPECIFIED_BASE = 0.61803398875  # the logarithm of the base of a ``log`` that names none: no base anybody means


def differ(a: Node, b: Node) -> bool:
    """Whether two expressions are seen to differ at one of a few points."""
    names = sorted(symbols(a) | symbols(b))
    for point in _points(names):
        left, right = evaluate(a, point), evaluate(b, point)
        if left is None or right is None:
            continue
        if cmath.isinf(left) or cmath.isinf(right):
            return cmath.isinf(left) != cmath.isinf(right)
        if abs(left - right) > _TOLERANCE * max(1.0, abs(left), abs(right)):
            return True
    return False


def symbols(node: Node) -> frozenset[str]:
    """The variables of an expression, constants aside."""
    if node.op == "sym":
        return frozenset() if node.name in _CONSTANTS else frozenset((node.name,))
    return frozenset().union(*map(symbols, node.args))


def evaluate(node: Node, point: dict[str, complex]) -> complex | None:
    """The value at a point, principal branches throughout; infinite where it is too large, ``None`` where undefined."""
    try:
        value = _evaluate(node, point)
    except OverflowError:
        return complex(math.inf)
    except (ArithmeticError, ValueError):
        return None
    return None if cmath.isnan(value) else value


def _points(names: list[str]) -> Iterator[dict[str, complex]]:
    for turn in range(_POINTS if names else 1):
        yield {
            name: complex((-1) ** (index + turn) * (0.3 + 2.4 * ((0.618034 * (index + 1) + 0.414214 * turn) % 1)))
            for index, name in enumerate(names)
        }


def _evaluate(node: Node, point: dict[str, complex]) -> complex:
    if node.op == "num":
        return complex(float(node.number))
    if node.op == "sym":
        return _CONSTANTS[node.name] if node.name in _CONSTANTS else point[node.name]
    values = [_evaluate(part, point) for part in node.args]
    if node.op == "call":
        return _call(node.name, values)
    first = values[0] if values else complex(math.inf)
    match node.op:
        case "add":
            return sum(values)
        case "mul":
            return math.prod(values, start=complex(1))
        case "neg":
            return -first
        case "inv":
            return 1 / first
        case "pow":
            return complex(first ** values[1])
        case "root":
            return _root(values[1], first, real=not symbols(node))
        case "abs":
            return complex(abs(first))
        case _:
            return _whole(node.op, values)


def _whole(op: str, values: list[complex]) -> complex:
    """Operations on integers and real numbers; anything else raises."""
    if any(value.imag for value in values):
        raise ValueError(f"{op} of a complex number")
    first = values[0].real if values else math.inf
    match op:
        case "floor":
            return complex(math.floor(first))
        case "ceil":
            return complex(math.ceil(first))
        case "fact":
            return complex(math.gamma(first + 1))
        case "binom":
            k = values[1].real
            return complex(math.gamma(first + 1) / math.gamma(k + 1) / math.gamma(first - k + 1))
    raise ValueError(f"{op} has no number")


def _root(radicand: complex, degree: complex, real: bool) -> complex:
    odd = degree.imag == 0 and degree.real % 2 == 1
    if real and odd and radicand.imag == 0 and radicand.real < 0:
        return complex(-((-radicand.real) ** (1 / degree.real)))
    return complex(radicand ** (1 / degree))


def _call(name: str, values: list[complex]) -> complex:
    if name != "log":
        return _FUNCTIONS[name](values[0])
    base = cmath.log(values[1]) if len(values) > 1 else complex(UNSPECIFIED_BASE)
    return cmath.log(values[0]) / base
