"""Beam's tokenizer and chat template: messages to token ids, and the ids of a response to what it says.

Prompts are rendered by the tokenizer's own ``apply_chat_template``, with the same template arguments wherever a run
renders one. The policy thinks in the analysis channel and answers in the final one; see
:mod:`beamline.chat.channels`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import numpy as np
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from numpy.typing import NDArray

from beamline.chat.channels import Channels, Symbols, read
from beamline.config.schema import TemplateArgument, is_reserved_argument
from beamline.errors import BeamlineError
from beamline.model.beam import ModelError
from beamline.records import Message

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
CONTROL = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
PARAMETER_END = "\n</rfl:parameter>"
"""Closes an argument of a tool call. It is text, although a tokenizer may hold it as one special token."""

_REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")
_PROBE = (Message("user", "1+1"),)
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError)  # Jinja's own, and what an expression of a template raises


class PromptError(BeamlineError, ValueError):
    """A conversation that cannot become a prompt, with the message at fault and the reason."""


class BeamChat:
    """A tokenizer with Beam's control tokens and chat template.

    ``template_arguments`` go to the chat template, as ``chat.template_arguments`` of a run does. Each must be one that
    the template reads. Beam reasons at the effort ``max`` unless ``reasoning_effort`` says otherwise, so that another
    effort must make another prompt.

    Raises:
        ModelError: the folder has no usable tokenizer, the tokenizer lacks a control token or a chat template, the
            chat template does not use an argument, or its prompts do not end where the assistant speaks.
    """

    def __init__(self, folder: Path, template_arguments: Mapping[str, TemplateArgument] | None = None) -> None:
        from transformers import AutoTokenizer  # it takes a second; `beamline --help` does not need it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} has no usable tokenizer: {error}") from error
        known = self._tokenizer.get_vocab()
        lacking = [token for token in CONTROL if token not in known]
        if lacking:
            raise ModelError(f"the tokenizer of {folder} lacks Beam's control tokens {', '.join(lacking)}")
        added = self._tokenizer.added_tokens_decoder.values()
        self._special = tuple(str(t) for t in added if t.special and str(t) != PARAMETER_END)
        self._symbols = self._read_symbols({token: int(i) for token, i in known.items()})
        self.stop_ids = (self._symbols.returned, self._symbols.call)
        self.vocab_size = len(self._tokenizer)
        self._folder = folder
        self._arguments = dict(template_arguments or {})
        self._check_template(_parsed(self._tokenizer, folder))

    def prompt_ids(self, messages: Iterable[Message]) -> NDArray[np.int32]:
        """Token ids ``[P]`` of a conversation, up to where the assistant speaks.

        Raises:
            PromptError: there is no message, a text holds a control token, an assistant's turn has no reasoning, or
                the chat template refuses a message.
        """
        turns = [self._turn(index, message) for index, message in enumerate(messages)]
        try:
            return np.array(self._apply(turns, self._arguments), dtype=np.int32)
        except _REFUSALS as error:
            raise PromptError(self._refused(turns, str(error))) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of text that may hold control tokens."""
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of token ids, control tokens included."""
        tokens = [int(i) for i in ids]
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def channels(self, ids: Sequence[int] | NDArray[np.int32]) -> Channels:
        """Read the channels and tool calls of a response."""
        return read(ids, self._symbols)

    def _read_symbols(self, known: dict[str, int]) -> Symbols:
        special = {known[token] for token in self._special}
        return Symbols(
            start=known[START],
            channel=known[CHANNEL],
            message=known[MESSAGE],
            end=known[END],
            call=known[CALL],
            returned=known[RETURN],
            constrain=known[CONSTRAIN],
            text=frozenset(known.values()) - special,
            decode=self.decode,
        )

    def _turn(self, index: int, message: Message) -> dict[str, str]:
        """A message as the chat template takes it."""
        where, spoken = f"message {index} ({message.role})", message.reasoning
        for text in (message.content, spoken or ""):
            control = next((token for token in self._special if token in text), None)
            if control is not None:
                raise PromptError(f"{where}: the text holds the control token {control}")
        turn = {"role": message.role, "content": message.content}
        if message.role != "assistant":
            if spoken is not None:
                raise PromptError(f"{where} has reasoning, which only turns of the assistant have")
            return turn
        if spoken is None:
            raise PromptError(f"{where} has no reasoning; past turns of the assistant must carry theirs")
        if not self._reasoning_keys:
            raise PromptError(f"{where}: the chat template of {self._folder} does not read the reasoning of past turns")
        return turn | dict.fromkeys(self._reasoning_keys, spoken)

    def _apply(self, turns: list[dict[str, str]], arguments: Mapping[str, TemplateArgument]) -> list[int]:
        ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **arguments)
        return cast(list[int], ids)

    def _refused(self, turns: list[dict[str, str]], reason: str) -> str:
        """Name the message at which a template gives up: the last of the shortest beginning with the same failure."""
        for index, turn in enumerate(turns):
            try:
                self._apply(turns[: index + 1], self._arguments)
            except _REFUSALS as error:
                if str(error) == reason:
                    return f"message {index} ({turn['role']}) cannot be rendered: {reason}"
        return f"the conversation cannot be rendered: {reason}"

    def _check_template(self, template: nodes.Template) -> None:
        mentioned = {node.attr for node in template.find_all(nodes.Getattr)}
        mentioned |= {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}
        self._reasoning_keys = tuple(key for key in _REASONING_KEYS if key in mentioned)
        takes = sorted(name for name in meta.find_undeclared_variables(template) if not is_reserved_argument(name))
        for name, value in self._arguments.items():
            if name not in takes:
                raise ModelError(
                    f"chat.template_arguments.{name}={value}: the chat template of {self._folder} does not use {name}; "
                    f"it uses {', '.join(takes) or 'no arguments'}"
                )
        self._check_prompt()

    def _check_prompt(self) -> None:
        """Hold the prompt of a probe against what a run relies on."""
        given = ", ".join(f"{name}={value}" for name, value in self._arguments.items()) or "none"
        what = f"the chat template of {self._folder} (chat.template_arguments: {given})"
        try:
            prompt = self.decode(self.prompt_ids(_PROBE))
        except PromptError as error:
            raise ModelError(f"{what} cannot render a question: {error}") from error
        if not prompt.endswith(START + "assistant"):
            raise ModelError(f"{what} ends a prompt in {prompt[-40:]!r}; responses are read after {START}assistant")
        effort = self._arguments.get("reasoning_effort")
        other = "minimal" if effort == "max" else "max"
        if effort is not None and self._probed(effort) == self._probed(other):
            raise ModelError(
                f"chat.template_arguments.reasoning_effort={effort}: the chat template of {self._folder} does not use "
                f"reasoning_effort, or not this one: the prompt is the same as with {other}"
            )

    def _probed(self, effort: TemplateArgument) -> list[int] | str:
        """The prompt of a probe at a reasoning effort, or why there is none."""
        turns = [self._turn(index, message) for index, message in enumerate(_PROBE)]
        try:
            return self._apply(turns, {**self._arguments, "reasoning_effort": effort})
        except _REFUSALS as error:
            return str(error)


class _Generation(Extension):
    """Knows the tag by which templates mark the assistant's tokens, which Jinja does not."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _parsed(tokenizer: Any, folder: Path) -> nodes.Template:
    """The chat template that renders conversations without tools: the only one, or that called ``default``."""
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of {folder} has no chat template")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise ModelError(f"none of the chat templates of {folder} ({names}) is called default")
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _Generation], autoescape=False)
    environment.globals.update(raise_exception=None, strftime_now=None)  # functions of templates, no arguments
    try:
        return environment.parse(tokenizer.get_chat_template())
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template of {folder} is no template, line {error.lineno}: {error.message}"
        ) from error
