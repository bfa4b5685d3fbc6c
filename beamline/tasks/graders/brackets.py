"""What stands at the top level of a text, and what in its brackets."""

import re

from beamline.tasks.graders.syntax import Unreadable

HIDDEN = "\x00"
_BRACKET = re.compile(r"\\begin\{|\\end\{[a-zA-Z]*\}|\\[{}]|\\.|[()\[\]{}]", re.DOTALL)
_OPENING = frozenset(("\\begin{", "\\{", "(", "[", "{"))


def masked(text: str) -> str:
    """The text with everything in brackets, and the brackets, hidden, so that it can be searched for separators.

    Intervals may be half open, so any closing bracket closes any opening one.

    Raises:
        Unreadable: brackets that do not match in number.
    """
    shown = list(text)
    depth = 0
    start = 0
    for found in _BRACKET.finditer(text):
        sign = found[0]
        if sign in _OPENING:
            depth += 1
            start = found.start() if depth == 1 else start
            # \begin{name}: its own brace is closed by a plain one
            depth += sign == "\\begin{"
        elif sign in ("\\}", ")", "]", "}") or sign.startswith("\\end{"):
            depth -= 1
            if depth < 0:
                raise Unreadable("a bracket that was not opened")
            if not depth:
                shown[start : found.end()] = HIDDEN * (found.end() - start)
    if depth:
        raise Unreadable("a bracket that is not closed")
    return "".join(shown)


def split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the separators at its top level, and those separators."""
    parts, signs, start = [], [], 0
    for found in separator.finditer(masked(text)):
        parts.append(text[start : found.start()].strip())
        signs.append(found[0].strip())
        start = found.end()
    parts.append(text[start:].strip())
    return parts, signs


def enclosed(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, content and closing bracket of a text that is one bracket as a whole; ``None`` if it is not."""
    opening = "\\{" if text.startswith("\\{") else text[:1]
    closing = "\\}" if text.endswith("\\}") else text[-1:]
    if opening not in ("(", "[", "\\{") or closing not in (")", "]", "\\}") or len(text) < len(opening) + len(closing):
        return None
    content = text[len(opening) : len(text) - len(closing)]
    try:
        masked(content)
    except Unreadable:
        return None
    return opening, content, closing
