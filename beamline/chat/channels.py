"""Reading a response: token ids to channels and tool calls. Nothing is tokenized again, and nothing can fail.

A response follows the ``<|start|>assistant`` that ends its prompt. It is a row of sections, each later one after a
``<|start|>assistant`` of its own::

    reasoning   <|channel|>analysis<|message|>TEXT<|end|>
    answer      <|channel|>final<|message|>TEXT<|return|>
    tool call   " to=NAME"<|channel|>"analysis "<|constrain|>xml<|message|>PARAMETERS<|call|>

Reasoning comes once, and a call that another one follows ends in ``<|end|>``. Control tokens count by their id alone:
their characters, spelled in other tokens, are text.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

_OPENING = re.compile(r'<rfl:parameter name="([^"]+)">\n')
# The closing tag is one token with its newline. A model that wrote the newline by itself can no longer use it, and may
# go on with the next parameter instead.
_CLOSING = re.compile(r'\n(?:</rfl:parameter>|(?=<rfl:parameter name="))')
_AUTHOR = re.compile(r"assistant(?: to=(?P<tool>[^\s<]+))?")
# A section by the letters of its control tokens.
_SECTION = re.compile("(?P<start>S?)C(?P<constrain>K?)M(?P<closer>[ERL])")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name, and each argument as the text that the policy wrote (spaces and lines kept)."""

    name: str
    arguments: dict[str, str]


@dataclass(frozen=True, slots=True)
class Channels:
    """What a response said, by channel.

    ``final`` is the text of the final channel, and None unless that channel was closed by ``<|return|>``: an answer
    that was cut may be the beginning of another one. ``calls`` are the tool calls that the response ends in; there are
    none unless ``<|call|>`` closes the last of them. ``truncated`` is true when no stop token came. ``well_formed`` is
    true for one analysis channel, then one final channel, each closed by its own token, and nothing else.
    """

    analysis: str | None
    final: str | None
    calls: tuple[ToolCall, ...] = ()
    truncated: bool = False
    well_formed: bool = False


@dataclass(frozen=True, slots=True)
class Symbols:
    """What token ids stand for: the control tokens, which ids are ``text``, and how a run of those reads.

    An id that is neither (another special token, or one beyond the tokenizer's vocabulary) spoils its section.
    """

    start: int
    channel: int
    message: int
    end: int
    call: int
    returned: int
    constrain: int
    text: Collection[int]
    decode: Callable[[Sequence[int]], str]

    @property
    def letters(self) -> dict[int, str]:
        """A letter for each control token, for matching the order in which they come."""
        ids = (self.start, self.channel, self.constrain, self.message, self.end, self.returned, self.call)
        return dict(zip(ids, "SCKMERL", strict=True))


@dataclass(frozen=True, slots=True)
class _Section:
    """A closed section: a channel, or a call of ``tool``. ``closer`` is a letter."""

    channel: str
    tool: str | None
    body: str
    closer: str


def read(ids: Iterable[int], symbols: Symbols) -> Channels:
    """Read the channels and tool calls of a response; any ids will do."""
    tokens = [int(i) for i in ids]
    sections, complete = _sections(tokens, symbols)
    said = [section for section in sections if section.tool is None]
    bodies = {s.channel: s.body for s in said if s.channel != "final" or s.closer == "R"}
    shape = [(section.channel, section.closer) for section in said]
    return Channels(
        analysis=bodies.get("analysis"),
        final=bodies.get("final"),
        calls=_calls(sections) if complete else (),
        truncated=symbols.returned not in tokens and symbols.call not in tokens,
        well_formed=complete and said == sections and shape == [("analysis", "E"), ("final", "R")],
    )


def _sections(tokens: list[int], symbols: Symbols) -> tuple[list[_Section], bool]:
    """The sections up to the first thing that is none, and whether they are the whole response."""
    marks = [at for at, token in enumerate(tokens) if token not in symbols.text]
    letters = symbols.letters
    order = "".join(letters.get(tokens[at], "?") for at in marks)
    begins = [0, *(at + 1 for at in marks)]
    sections: list[_Section] = []
    done = 0
    while match := _SECTION.match(order, done):
        spans = zip(begins[done : match.end()], marks[done : match.end()], strict=True)
        section = _section([symbols.decode(tokens[begin:end]) for begin, end in spans], match, first=done == 0)
        if section is None:
            break
        sections.append(section)
        done = match.end()
    return sections, bool(sections) and begins[done] == len(tokens)


def _section(texts: list[str], match: re.Match[str], first: bool) -> _Section | None:
    """Make a section of the texts before each of its control tokens; None if they do not spell one."""
    if first == bool(match["start"]) or (not first and texts.pop(0)):
        return None
    author = _AUTHOR.fullmatch("assistant" + texts[0] if first else texts[0])
    if author is None:
        return None
    tool, header = author["tool"], texts[1:-1]
    if header != ["analysis ", "xml"] if tool else len(header) > 1:
        return None
    return _Section(header[0], tool, texts[-1], match["closer"])


def _calls(sections: Sequence[_Section]) -> tuple[ToolCall, ...]:
    """The calls at the end of a whole response, the last closed by ``<|call|>`` and all before by ``<|end|>``."""
    first = next((at for at, section in enumerate(sections) if section.tool is not None), len(sections))
    calls = [ToolCall(s.tool, _arguments(s.body)) for s in sections[first:] if s.tool is not None]
    closers = "".join(section.closer for section in sections)
    ends_well = closers == "E" * (len(sections) - 1) + "L" and len(calls) == len(sections) - first
    return tuple(calls) if ends_well else ()


def _arguments(body: str) -> dict[str, str]:
    """The parameters of a call. What stands between them is passed over, and of one given twice the last counts."""
    arguments: dict[str, str] = {}
    at = 0
    while (opening := _OPENING.search(body, at)) and (closing := _CLOSING.search(body, opening.end())):
        arguments[opening[1]] = body[opening.end() : closing.start()]
        at = closing.end()
    return arguments
