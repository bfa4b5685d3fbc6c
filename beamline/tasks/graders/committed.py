"""The answer that a response commits to: the last one it announces, if nothing around casts doubt on it."""

import re
from dataclasses import dataclass

from beamline.tasks.graders import doubt
from beamline.tasks.graders.marks import Mark, find_marks
from beamline.tasks.graders.reading import read
from beamline.tasks.graders.syntax import Unreadable
from beamline.tasks.graders.values import Compound, Value, same

_SEEN = 40_000  # characters of a response, from its end
_LEADING = 600  # characters before an answer in its line, and behind it, in which doubts count
_FOLLOWING = 2_000
_SHORT = 400
_BLANKS = re.compile(r"[^\S\n]{4,}")
_EMPTY = re.compile(r"\n(?:[^\S\n]{0,3}\n){2,}")
_DISPLAY = re.compile(r"\\\[(.*?)\\\]|\$\$(.*?)\$\$", re.DOTALL)
_DISPLAY_LAST = re.compile(r"(?:\\\[([^$]{1,600})\\\]|\$\$([^$]{1,600})\$\$)[\s.*]*$")
_OPENED = re.compile(r"(?:\*+|_+|\\text(?:bf|it)?\s*\{)$")
_BULLET = re.compile(r"[-*•+][ \t]+|[0-9]+[.)][ \t]+(?=\S)")
_LINE_START = re.compile(r"[ \t]*(?:\n[>\s]*)?")
_CUT = re.compile(
    r"(?P<reason>,?\s+(?:\(\s*)?(?:because|since|due to|using|given|which|by(?= [a-z])|"
    r"as (?:required|desired|claimed|needed|wanted|stated|above|before|n\b|[a-z] =))\b|[.;!][*$)\\]{0,4}\s+(?=\S))|"
    r"(?P<aside>,?\s+(?:where|when|for|with|as)\b|,\s+(?=[a-z]{2,})|\s+\(|\s+[-—–]+\s+(?=[A-Za-z])|"
    r"\s+(?=(?:is|are) (?:the|our|what)\b)|[.,]\\[)\]])",
)
_MOST_CUTS = 8
_MOST_MARKS = 8  # from the end; those before them would have to be followed by as many that announce nothing
_PREFIX = re.compile(
    r"(?:\$?[A-Za-z]\$?|[A-Za-z][A-Za-z'-]+,?)"
    r"(?:[ \t]+(?:[A-Za-z'-]+|\$[A-Za-z]{1,3}\$|\\\([A-Za-z]{1,3}\\\)),?){0,14}?"
    r"[ \t]+(?:is|are|equals|be)(?:[ \t]+(?:equal to|exactly|therefore|then|thus|simply))?[ \t]*:?[ \t]+(?=\S)"
)
_LABEL = re.compile(r"[\W_]*[A-Za-z][A-Za-z ]{0,40}:\s*")
_CONCLUSION = re.compile(
    r"[-*>\s]*(?:so|thus|hence|therefore|consequently|finally|in conclusion|in total|altogether|it follows that|"
    r"(?:we )?conclude that|we conclude|this (?:gives|means|yields)|\\therefore|∴)\b[,:]?\s*(?:that\s+)?",
    re.IGNORECASE,
)
_VERB = re.compile(r"\b(?:is|are|equals|equal to|be|get|gets|obtain|gives?|yields?|have|has)[: \t]+(?=\S)")
_VAGUE = re.compile(
    r"\b(?:not|no|never|one of|each|every|some|first|second|another|neither|none|n't|at least|at most|false)\b",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"(?<=[.!?])[\"*)]*\s+(?=[A-Z$\\(*])|\n")
_BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*(?P<rest>(?:\s+[a-z]+){0,4})[\s.]*$")
_BOX_LEAD_IN = re.compile(
    r"(?:\\\(|\\\[|\$|\*|\s|\{|^>|\\(?:displaystyle|large|Large|LARGE|huge|Huge)|\\color\{[a-z]+\}|"
    r"\\(?:quad|qquad|,|;|:|!)|\\(?:text|mathbf)\{)+$"
)
_GOOD_LEAD = re.compile(
    r"(?:^|[=:.!;]|\\(?:therefore|implies|Rightarrow|Longrightarrow|to|so)|(?<![\\A-Za-z])[A-Za-z'-]{2,}[,}]?|"
    r"[^0-9)}\]],)$"
)
_NEW_SENTENCE = re.compile(r"[\s$*\\)\]}]*\.")
_EQUATION = re.compile(r"(?:\$|\\[(\[]|^)([^$]{1,200}=)[\s{]*$")
_BOX_UNIT = re.compile(
    r"(?:\s|\\[,; ])*(?:\\?%|\^\s*\{?\s*\\circ\s*\}?|°|\\(?:text|mathrm|mbox)\s*\{[^{}]{1,30}\}(?:\^\{?[23]\}?)?)"
)
_BOX_GOES_ON = re.compile(
    r"\s*(?:[-+/^_!>0-9](?!\s+[A-Za-z]{2,})|\.[0-9]|<(?![|/])|\*(?=[^*\s])|\\(?!\)|\]|,|;|quad|qquad|\s|text|end|\n)|&)|[A-Za-z]"
)
_NUMBER_FIRST = re.compile(r"[-+.$\\(*{]*[0-9]")
_CLOSERS = re.compile(r"(?:\\\)|\\\]|[\s$*}.])+")


@dataclass(frozen=True, slots=True)
class Committed:
    """The text of an answer, and what it says; ``None`` where it cannot be read."""

    text: str
    value: Value | None


def find_committed(response: str) -> Committed | None:
    """The last answer that a response commits to, or ``None``.

    That is the last box, ``Answer:`` line or ``the answer is``; without one the whole response, if it is nothing but a
    value; else its last line, formula or bold text, or a last sentence that concludes (``Therefore ... is 34.``).
    ``The answer is`` counts only before a value, unless nothing else does.
    Several different answers side by side are one answer that holds them all. Words of doubt before, in or behind the
    statement, or a later word that takes it back, leave no answer.
    """
    text = _EMPTY.sub("\n\n", _BLANKS.sub("   ", response.strip()[-_SEEN:]))
    marks = find_marks(text)
    weak: list[Committed] = []
    doubtful = False
    for mark in reversed(marks[:1] + marks[1:][-_MOST_MARKS:]):
        if mark.kind == "box":
            return _boxed(text, mark)
        found, following = _stated(text, mark)
        if found is not None and _refuted(found, following):
            found = None
        if mark.kind == "colon" or (found is not None and not _is_weak(found)):
            return found
        if found is None:
            doubtful = True
        else:
            weak.append(found)
    last = None if doubtful else _unmarked(text)
    return last if last is not None and not _is_weak(last) else next(iter(weak), last)


def _is_weak(found: Committed) -> bool:
    """Whether it may be prose that happens to follow ``the answer is``: a few words, or nothing that can be read."""
    return found.value is None or _is_words(found.value)


def _is_words(value: Value | None) -> bool:
    return isinstance(value, Compound) and value.kind == "words"


def _read(text: str) -> Value | None:
    try:
        return read(text)
    except Unreadable:
        return None


def _refuted(found: Committed, following: str) -> bool:
    """Whether what follows takes an answer back, begins with a line that is another value, or names one beside it."""
    if not following or following.isspace():
        return False
    following = following[:_FOLLOWING].strip()
    line = following.partition("\n")[0]
    others = [_LABEL.sub("", line, count=1), *doubt.set_beside(following)]
    return any(_is_another(found, text) for text in others) or doubt.taken_back(following)


def _is_another(found: Committed, text: str) -> bool:
    """Whether a text is a value other than the answer."""
    other = _read(text) if len(text) <= 100 else None
    return other is not None and not _is_words(other) and (found.value is None or not same(found.value, other))


def _stated(text: str, mark: Mark) -> tuple[Committed | None, str]:
    """The answer behind a mark, and the text that follows its statement."""
    statement, following = _statement(text[mark.end :])
    line = _line_before(text, mark)
    sentence = _SENTENCES.split(line)[-1]
    if doubt.confessed(text[: mark.start]) or doubt.doubted(sentence):
        return None, following
    if not statement:
        return None, following
    opened = _OPENED.search(line)
    closed = "" if not opened else "}" if opened[0].endswith("{") else opened[0]
    return _in_statement(statement.replace(closed, " ", 1).strip() if closed else statement), following


def _line_before(text: str, mark: Mark) -> str:
    """What stands before a mark in its line, or the end of that."""
    return text[max(text.rfind("\n", 0, mark.start) + 1, mark.start - _LEADING) : mark.start]


def _statement(body: str) -> tuple[str, str]:
    """The statement that a text begins with: the rest of its line, or the next line or formula; and what follows."""
    start = _LINE_START.match(body)
    at = start.end() if start else 0
    same_line = "\n" not in body[:at]
    display = _DISPLAY.match(body, at)
    if display:
        end = body.find("\n", display.end())
        end = len(body) if end < 0 else end
        return body[at:end].strip(), body[end:]
    line, _, following = body[at:].partition("\n")
    if not same_line and _BULLET.match(line):
        # One item is the answer; several are not said to be one.
        line = "" if _BULLET.match(following.strip()) else _BULLET.sub("", line, count=1)
    return line.strip(), following


def _in_statement(statement: str) -> Committed | None:
    """The answer at the beginning of a statement, or behind ``The sum is``; unread where there is no such answer."""
    found = _with_reason(statement)
    if found is None:
        return None
    if _is_weak(found):
        prefix = _PREFIX.match(statement)
        if prefix and not _VAGUE.search(prefix[0]) and not doubt.doubted(prefix[0]):
            behind = _with_reason(statement[prefix.end() :])
            if behind is None or not _is_weak(behind):
                return behind
    return found


def _with_reason(statement: str) -> Committed | None:
    """The answer that a statement is, or begins with; ``None`` if the rest of it casts doubt on it."""
    value = _read(statement)
    if value is not None:
        return Committed(statement, value)
    for count, cut in enumerate(_CUT.finditer(statement[:2_000])):
        head = statement[: cut.start()]
        value = _read(head) if count < _MOST_CUTS and _balanced(head) else None
        if value is not None:
            found = Committed(head, value)
            if cut["aside"] and _is_words(value):
                break  # ``even, odd``: it may be another answer
            return None if _doubted_by(found, statement[cut.start() : cut.start() + _FOLLOWING], cut) else found
    return Committed(statement, None)


def _doubted_by(found: Committed, rest: str, cut: re.Match[str]) -> bool:
    """Whether the rest of a statement, from ``cut`` on, casts doubt on the answer before it or gives another one."""
    if doubt.doubted_behind(rest, cut["reason"] is not None) or doubt.taken_back(rest):
        return True
    sentence = _SENTENCES.split(rest[cut.end() - cut.start() :])[0] if rest[0] in ".;!" else ""
    others = [*doubt.set_beside(rest), *([sentence] if _NUMBER_FIRST.match(sentence) else [])]
    return any(_is_another(found, text) for text in others)


def _balanced(head: str) -> bool:
    return head.count("$") % 2 == 0 and head.count(r"\(") == head.count(r"\)") and head.count("**") % 2 == 0


def _boxed(text: str, mark: Mark) -> Committed | None:
    """The answer in a box (or in several that stand together), unless mathematics goes on around it."""
    line = _line_before(text, mark)
    sentence = _SENTENCES.split(line)[-1]
    lead = _BOX_LEAD_IN.sub("", sentence)
    if doubt.confessed(text[: mark.start]) or doubt.guessed(sentence) or not _GOOD_LEAD.search(lead):
        return None
    unit = _BOX_UNIT.match(text, mark.end)
    end = unit.end() if unit else mark.end
    if _BOX_GOES_ON.match(text, end):
        return None
    rest, _, following = text[end:].partition("\n")
    rest = _CLOSERS.sub(" ", rest, count=1) if _CLOSERS.match(rest) else rest
    answer = ", ".join(mark.contents) + (unit[0] if unit else "")
    equation = _EQUATION.search(sentence)
    value = _read(f"{equation[1]} {answer}") if equation and len(mark.contents) == 1 else None
    found = Committed(answer, value or _read(answer))
    ended = _NEW_SENTENCE.match(text, end) is not None
    doubtful = doubt.doubted_behind(rest, reason=True) if ended else doubt.doubted_beside(rest)
    return None if doubtful or doubt.taken_back(rest) or _refuted(found, following) else found


def _unmarked(text: str) -> Committed | None:
    """The answer of a response that announces none."""
    if len(text) <= _SHORT:
        value = _read(text)
        if value is not None:
            return Committed(text, value)
    display = _DISPLAY_LAST.search(text[-1_000:])
    last = display[1] or display[2] if display else text[text.rfind("\n") + 1 :]
    if doubt.confessed(text[: len(text) - len(last)]) or len(last) > _SHORT:
        return None
    value = _read(last) if not _BULLET.match(last) else None
    if value is not None and not _is_words(value):
        line_before = text[: len(text) - len(last)].rstrip().rpartition("\n")[2]
        return None if not display and _refuted(Committed(last, value), line_before) else Committed(last, value)
    return None if display else _concluded(_SENTENCES.split(last)[-1])


def _concluded(sentence: str) -> Committed | None:
    """The value at the end of a last sentence that draws a conclusion, or that prints it bold."""
    if doubt.doubted(sentence) or _VAGUE.search(sentence):
        return None
    conclusion = _CONCLUSION.match(sentence)
    bold = _BOLD.search(sentence)
    if bold and sentence.count("**") == 2 and (conclusion or not bold["rest"]):
        value = _read(bold[1])
        doubtful = value is None or _is_words(value) or doubt.doubted_behind(bold["rest"], False)
        return None if doubtful else Committed(bold[1], value)
    if not conclusion:
        return None
    body = sentence[conclusion.end() :]
    for start in (0, *(verb.end() for verb in _VERB.finditer(body))):
        value = _read(body[start:])
        if value is not None and not _is_words(value):
            return Committed(body[start:], value)
    return None
