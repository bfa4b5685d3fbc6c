"""Sums, products, integrals and limits as expected answers: read and compared by math-verify.

Only the expected answer decides that this path is taken, so no response can choose the more lenient reader.
"""

import logging
import re
from typing import Any

_OPERATORS = re.compile(r"\\(?:sum|prod|int|iint|lim|log|ln)(?![A-Za-z])")
_LONGEST = 300
_DIGITS = 40


def readable(answer: str) -> bool:
    """Whether an expected answer is one that math-verify reads."""
    return len(answer) <= _LONGEST and _OPERATORS.search(answer) is not None and _parse(answer) is not None


def equal(answer: str, response: str) -> bool:
    """Whether math-verify holds a response for the expected answer; false for answers that are not ``readable``."""
    if len(response) > _LONGEST or not readable(answer):
        return False
    from math_verify import verify

    truth, said = _parse(answer), _parse(response)
    return said is not None and bool(
        verify(truth, said, float_rounding=_DIGITS, numeric_precision=_DIGITS, timeout_seconds=None)
    )


def _parse(text: str) -> Any:
    """The sympy object of a formula, without guesses at units or words; ``None`` if it is not read."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
    from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped, unused-ignore]
    from math_verify import LatexExtractionConfig, parse

    bare = re.sub(r"\\[()\[\]]|\$", " ", text).strip().rstrip(".")
    if re.search(r"\\text|\b[A-Za-z]{4,}(?![A-Za-z{])(?<!\\)", re.sub(r"\\[A-Za-z]+", " ", bare)):
        return None  # prose
    exact = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    found = parse(
        f"$${bare}$$",
        [LatexExtractionConfig(normalization_config=exact)],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found[0] if len(found) == 1 else None
