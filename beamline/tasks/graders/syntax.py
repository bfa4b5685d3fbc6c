"""Reading a mathematical expression, in LaTeX or plain, into a tree.

The reader is strict: a text that is not wholly one expression is refused, never read in part. Where mathematicians
disagree (``1/2x``, ``3 4``, ``2\\frac{3}{2}``) it refuses too.
"""

import re
from dataclasses import dataclass
from fractions import Fraction


class Unreadable(Exception):  # noqa: N818  (not a failure: most texts are no expression)
    """The text is no expression that can be judged."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of an expression.

    ``op`` is ``num`` (with ``number``), ``sym`` and ``call`` (with ``name``), ``inf``, ``pm``, ``mp``, or one of the
    operations ``add mul inv pow neg root fact abs floor ceil binom`` over ``args`` (``root`` has degree and radicand).
    Sums and products hold all of their terms, so a tree is no deeper than its brackets.
    """

    op: str
    args: tuple["Node", ...] = ()
    name: str = ""
    number: Fraction = Fraction(0)


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


OF_ANGLES = words("sin cos tan cot sec csc")
FUNCTIONS = OF_ANGLES | words("arcsin arccos arctan sinh cosh tanh ln log exp")

_DEPTH = 24
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?|\.[0-9]+")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_SCIENTIFIC = re.compile(r"[eE]([+-]?[0-9]{1,3})(?![0-9A-Za-z.])")
_MIXED = re.compile(r"\s*\\frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])([0-9]))|\s+([0-9]+)/([0-9]+)(?![0-9.])")
_LETTERS = re.compile(r"[A-Za-z]+")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_SUBSCRIPT = re.compile(r"_(?:\{([0-9A-Za-z+,-]{1,12})\}|([0-9A-Za-z]))")
_GREEK = words(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell"
)
_PROSE = words(
    "or and is to of no not the are for in on at by if so as it an be we he do up all any but can now off one two six "
    "ten out yes mod per via vs let min sum"
)
_TIMES = ("\\cdot", "\\times", "\\ast", "*")
_OVER = ("/", "\\div")
_PAIRS = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil", "\\lvert": "\\rvert"}
_PAIR_OPS = {"|": "abs", "\\lvert": "abs", "\\lfloor": "floor", "\\lceil": "ceil"}


def read_expression(text: str) -> Node:
    """The tree of a text.

    Raises:
        Unreadable: the text is not exactly one expression.
    """
    reader = _Reader(text)
    tree = reader.sum()
    if reader.peek():
        raise Unreadable(f"left over: {text[reader.at :]!r}")
    return tree


def contains(node: Node, *ops: str) -> bool:
    """Whether one of these operations is anywhere in a tree."""
    return node.op in ops or any(contains(part, *ops) for part in node.args)


def number(value: Fraction | int) -> Node:
    """The node of a rational number."""
    return Node("num", number=Fraction(value))


def negative(node: Node) -> Node:
    """The node of ``-node``."""
    return number(-node.number) if node.op == "num" else Node("neg", (node,))


class _Reader:
    """A recursive descent over characters; ``at`` is the next one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.angles = 0  # functions of an angle around what is read

    def peek(self) -> str:
        """The next character or command, blanks skipped; empty at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.text.startswith("\\", self.at):
            command = _COMMAND.match(self.text, self.at)
            return command[0] if command else "\\"
        return self.text[self.at : self.at + 1]

    def take(self, *wanted: str) -> str:
        """Step over the next character or command if it is one of those wanted; empty if it is not."""
        found = self.peek()
        if found and found in wanted:
            self.at += len(found)
            return found
        return ""

    def need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise Unreadable(f"no {wanted!r} at {self.text[self.at :]!r}")

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > _DEPTH:
            raise Unreadable("nested too deeply")
        terms = []
        sign = self.take("+", "-", "\\pm", "\\mp")
        while True:
            term = self.product()
            terms.append(_signed(sign, term))
            sign = self.take("+", "-", "\\pm", "\\mp")
            if not sign:
                break
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        factors = [self.power()]
        divided = False
        while True:
            if self.take(*_TIMES):
                factors.append(self.signed_power())
                divided = False
            elif self.take(*_OVER):
                factors.append(Node("inv", (self.signed_power(),)))
                divided = True
            elif self.starts_factor():
                if divided:
                    raise Unreadable("a product directly behind a division has two readings")
                factors.append(self.power())
            else:
                return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def starts_factor(self) -> bool:
        """Whether what comes next multiplies what stood before without a sign between them."""
        found = self.peek()
        if found.startswith("\\"):
            name = found[1:]
            return (
                name in _GREEK
                or name in FUNCTIONS
                or found in ("\\pi", "\\frac", "\\sqrt", "\\binom", "\\lfloor", "\\lceil")
            )
        return found == "(" or (found.isascii() and found.isalpha())

    def signed_power(self) -> Node:
        self.depth += 1
        if self.depth > _DEPTH:
            raise Unreadable("nested too deeply")
        sign = self.take("+", "-")
        node = self.power() if not sign else _signed(sign, self.signed_power())
        self.depth -= 1
        return node

    def power(self) -> Node:
        base = self.primary()
        if self.take("!"):
            base = Node("fact", (base,))
        if self.angles and self.take("\\degree"):
            base = Node("mul", (base, Node("sym", name="pi"), number(Fraction(1, 180))))
        if not self.take("^"):
            return base
        exponent = self.exponent()
        if self.peek() in ("^", "!"):
            raise Unreadable("two exponents")
        return Node("pow", (base, exponent))

    def exponent(self) -> Node:
        if self.peek() == "{":
            return self.bracketed("{")
        if self.peek() == "-":
            return self.signed_power()
        return self.primary()

    def primary(self) -> Node:
        found = self.peek()
        if found.isascii() and (found.isdigit() or found == "."):
            return self.numeral()
        if found.isascii() and found.isalpha():
            return self.letters()
        if found in _PAIRS:
            return self.bracketed(found)
        if found.startswith("\\"):
            return self.command(found)
        raise Unreadable(f"no expression at {self.text[self.at :]!r}")

    def bracketed(self, opening: str) -> Node:
        self.need(opening)
        inner = self.sum()
        self.need(_PAIRS[opening])
        op = _PAIR_OPS.get(opening)
        return Node(op, (inner,)) if op else inner

    def numeral(self) -> Node:
        repeating = _REPEATING.match(self.text, self.at)
        if repeating:
            self.at = repeating.end()
            return number(_repeating(*repeating.groups()))
        found = _NUMBER.match(self.text, self.at)
        if not found:
            raise Unreadable("a lone point")
        self.at = found.end()
        if self.text.startswith(".", self.at):
            raise Unreadable("two points in a number")
        value = Fraction(found[0])
        scientific = _SCIENTIFIC.match(self.text, self.at)
        if scientific:
            self.at = scientific.end()
            return number(value * Fraction(10) ** int(scientific[1]))
        based = _SUBSCRIPT.match(self.text, self.at)
        if based:
            self.at = based.end()
            return Node("sym", name=f"{found[0]}_{based[1] or based[2]}")
        return number(value if "." in found[0] else self.mixed(value))

    def mixed(self, whole: Fraction) -> Fraction:
        """``whole``, or the mixed number that it begins: ``1\\frac{1}{2}``, ``1 1/2``."""
        found = _MIXED.match(self.text, self.at)
        if not found:
            return whole
        top, bottom = (int(digits) for digits in found.groups() if digits)
        if top >= bottom:
            raise Unreadable("neither a mixed number nor clearly a product")
        self.at = found.end()
        return whole + Fraction(top, bottom)

    def letters(self) -> Node:
        run = _LETTERS.match(self.text, self.at)
        word = run[0] if run else ""
        if word in FUNCTIONS:
            self.at += len(word)
            return self.call(word)
        if word == "sqrt":
            self.at += len(word)
            return Node("root", (number(2), self.argument()))
        if word in ("inf", "infinity", "oo"):
            self.at += len(word)
            return Node("inf")
        if word == "pi":
            self.at += 2
            return Node("sym", name="pi")
        if len(word) > 3 or word.lower() in _PROSE:
            raise Unreadable(f"a word: {word!r}")
        self.at += 1
        return self.symbol(word[0])

    def symbol(self, name: str) -> Node:
        found = _SUBSCRIPT.match(self.text, self.at)
        if found:
            self.at = found.end()
            name = f"{name}_{found[1] or found[2]}"
        return Node("sym", name=name)

    def command(self, found: str) -> Node:
        self.at += len(found)
        name = found[1:]
        if name == "frac":
            return Node("mul", (self.argument(), Node("inv", (self.argument(),))))
        if name == "sqrt":
            degree = self.bracketed("[") if self.peek() == "[" else number(2)
            return Node("root", (degree, self.argument()))
        if name == "binom":
            return Node("binom", (self.argument(), self.argument()))
        if name == "infty":
            return Node("inf")
        if name in FUNCTIONS:
            return self.call(name)
        if name == "pi" or name in _GREEK:
            return self.symbol(name)
        raise Unreadable(f"the command {found!r}")

    def argument(self) -> Node:
        """One group, or one digit, letter or command, as LaTeX takes it."""
        found = self.peek()
        if found in ("{", "("):
            return self.bracketed(found)
        if found.isascii() and found.isdigit():
            self.at += 1
            return number(int(found))
        if found.isascii() and found.isalpha():
            self.at += 1
            return Node("sym", name=found)
        if found in ("\\pi", "\\infty") or found[1:] in _GREEK:
            return self.command(found)
        raise Unreadable(f"no argument at {self.text[self.at :]!r}")

    def call(self, name: str) -> Node:
        """A function: its power (``\\sin^2 x``), its base (``\\log_2 8``), its argument with or without brackets."""
        self.depth += 1
        if self.depth > _DEPTH:
            raise Unreadable("nested too deeply")
        base: tuple[Node, ...] = ()
        if self.take("_"):
            if name != "log":
                raise Unreadable("a subscript of a function")
            base = (self.argument(),)
        exponent = self.exponent() if self.take("^") else None
        if exponent == number(-1) and name in ("sin", "cos", "tan"):
            name, exponent = f"arc{name}", None
        if exponent is not None and (exponent.op != "num" or exponent.number <= 0):
            raise Unreadable("an inverse or a power: two readings")
        self.angles += name in OF_ANGLES
        node = Node("call", (self.arguments(), *base), name=name)
        self.angles -= name in OF_ANGLES
        self.depth -= 1
        return Node("pow", (node, exponent)) if exponent is not None else node

    def arguments(self) -> Node:
        if self.peek() in ("(", "{", "[", "|"):
            return self.bracketed(self.peek())
        factors = [self.power()]
        while self.starts_factor() and self.peek() != "(" and not self.starts_function():
            factors.append(self.power())
        return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def starts_function(self) -> bool:
        found = self.peek()
        run = _LETTERS.match(self.text, self.at + found.startswith("\\"))
        return run is not None and run[0] in FUNCTIONS


def _signed(sign: str, node: Node) -> Node:
    if sign == "-":
        return negative(node)
    return Node(sign[1:], (node,)) if sign in ("\\pm", "\\mp") else node


def _repeating(whole: str, fixed: str, period: str) -> Fraction:
    """The value of ``whole.fixed`` with ``period`` repeated for ever."""
    known = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
    return known + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
