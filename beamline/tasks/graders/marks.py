"""Where a response says that its answer comes: ``Answer:``, ``the answer is``, a heading, a box."""

import re
from dataclasses import dataclass
from typing import Literal

from beamline.tasks.graders.plain import closing

_WORD = re.compile(r"[Aa](?:nswer|NSWER)[Ss]?|(?:[Ff]inal|[Ee]nd) (?:result|value)")
_BEHIND = re.compile(
    r"(?P<rest>[ \t*_]*(?::[ \t*_]*)?(?=\n|$))|"
    r"[ \t*_]*(?P<colon>(?:\([^()\n]{1,30}\)[ \t]*)?(?:[:：]|=(?!=)))|"
    r"[ \t*_]*(?P<prose>,?(?:[ \t]+(?:to|for|of|in)[ \t][^.:?\n]{1,80}?)?\s+(?:is|are|equals|must be)(?![a-z])"
    r"(?:\s+(?:then|therefore|thus|hence|simply|just|exactly|indeed|given by|equal to))?[ \t]*[:：]?)",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[ \t>#*_]*(?:the\s+|my\s+)?(?:final\s+)?$", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_OTHER_ANSWER = re.compile(
    r"\b(?:another|wrong|incorrect|possible|alternative|other|naive|tempting|first|initial|previous|students?'?s?|one|"
    r"second|an?|expected|claimed|common|not the|his|her|their|your)[ \t*_]+(?:final[ \t]+)?$",
    re.IGNORECASE,
)
_MOST_BOXES = 50  # that are read as one list
_JOINED = 15  # characters without blanks between boxes that belong together
_SENTENCE_END = re.compile(r"[.!?][\s$*\\)]|\n")
_OR = re.compile(r"\b(?:or|alternatively|also|either)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place that announces an answer: it begins at ``start``, and the answer stands from ``end`` on.

    For boxes ``contents`` are those that stand together, and ``end`` is behind the last of them.
    """

    kind: Literal["colon", "prose", "box"]
    start: int
    end: int
    contents: tuple[str, ...] = ()


def find_marks(text: str) -> list[Mark]:
    """All marks of a text in order; those of wrong, other or possible answers are none."""
    marks = _boxes(text) if "box" in text else []
    marks += filter(None, (_spoken(text, word) for word in _WORD.finditer(text)))
    return sorted(marks, key=lambda mark: mark.start)


def _spoken(text: str, word: re.Match[str]) -> Mark | None:
    """The mark that a word such as ``answer`` makes together with what follows it."""
    start = word.start()
    if start and (text[start - 1].isalpha() or text[start - 1] == "\\"):
        return None
    behind = _BEHIND.match(text, word.end())
    before = text[max(0, start - 40) : start]
    if not behind or _OTHER_ANSWER.search(before):
        return None
    if behind["rest"] is not None and ":" not in behind["rest"] and not _HEADING.fullmatch(before.rpartition("\n")[2]):
        return None
    return Mark("prose" if behind["prose"] else "colon", start, behind.end())


def _boxes(text: str) -> list[Mark]:
    marks: list[Mark] = []
    end = 0
    for found in _BOX.finditer(text):
        if found.start() < end:
            continue  # inside the box before
        closed = closing(text, found.end())
        if closed < 0:
            break
        content = text[found.end() + 1 : closed].strip()
        if marks and _belong_together(text[end : found.start()]):
            first = marks.pop()
            new = content not in first.contents and len(first.contents) <= _MOST_BOXES
            contents = (*first.contents, content) if new else first.contents
            marks.append(Mark("box", first.start, closed + 1, contents))
        else:
            marks.append(Mark("box", found.start(), closed + 1, (content,)))
        end = closed + 1
    return marks


def _belong_together(between: str) -> bool:
    """Whether two boxes are one statement, such as ``\\boxed{3} or \\boxed{4}``."""
    if len(between) > 200:
        return False
    squeezed = "".join(between.split())
    return len(squeezed) <= _JOINED or _OR.search(between) is not None or _SENTENCE_END.search(between) is None
