"""The grader that published DAPO results use, for comparison with them: text against text, no arithmetic.

Its known faults are kept on purpose: ``**Answer:** 34``, ``Answer: 34.`` and ``Answer: 034`` are wrong for 34. Every
other use is better served by ``math`` or ``integer``. Source of the word lists: Minerva, arXiv 2206.14858, appendix D.
"""

import re

from beamline.tasks.graders.verdict import Verdict

_TAIL = 300  # characters of the response that are looked at
_MARK = re.compile(r"(?i)Answer\s*:\s*([^\n<]+)")

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm "
    "pounds meters meals edges students childrentickets multiples"
)
_COMMANDS = (
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
)
_SIGNS = ("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots")
_DELETED = (*_UNITS.split(), *_COMMANDS, *_SIGNS)

_REWRITTEN = (
    (re.compile(r".*?\$(.*?)\$.*"), r"\1"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def grade_dapo(response: str, answer: str) -> Verdict:
    """Compare what follows the last ``Answer:`` of the last 300 characters with the expected answer, as texts."""
    found = _MARK.findall(response[-_TAIL:])
    if not found:
        return Verdict(False, None)
    said = normalize(found[-1])
    return Verdict(said == normalize(answer), said)


def normalize(text: str) -> str:
    """The text that is compared: what stands behind the last ``=``, without units, wrappers and blanks."""
    text = text.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for word in _DELETED:
        text = text.replace(word, "")
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
