"""Beam's channel format: the policy thinks in the analysis channel and answers in the final one.

A response is ``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>``.
Parsing works on token ids: what the policy produced is never turned to text and back.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from beamline.model.beam import ModelError
from beamline.records import Message

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROL = (START, CHANNEL, MESSAGE, END, CALL, RETURN, "<|constrain|>")


@dataclass(frozen=True, slots=True)
class Channels:
    """What a response said, by channel.

    ``final`` is the text of the final channel, and None unless that channel was closed by ``<|return|>``: an answer
    that was cut may be the beginning of another one. ``well_formed`` is true for one analysis channel, then one final
    channel, each closed by its own token, and nothing else.
    """

    analysis: str | None
    final: str | None
    well_formed: bool


class BeamChat:
    """A tokenizer with Beam's control tokens and chat template.

    Raises:
        ModelError: the folder has no usable tokenizer, or the tokenizer lacks a control token or a chat template.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer  # it takes a second; `beamline --help` does not need it

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} has no usable tokenizer: {error}") from error
        known = self._tokenizer.get_vocab()
        lacking = [token for token in CONTROL if token not in known]
        if lacking:
            raise ModelError(f"the tokenizer of {folder} lacks Beam's control tokens {', '.join(lacking)}")
        if not self._tokenizer.chat_template:
            raise ModelError(f"the tokenizer of {folder} has no chat template")
        self._id = {token: int(known[token]) for token in CONTROL}
        added = self._tokenizer.added_tokens_decoder
        self.special_tokens = tuple(str(token) for token in added.values() if token.special)
        self._text = frozenset(map(int, known.values())) - {int(i) for i, token in added.items() if token.special}
        self.stop_ids = (self._id[RETURN], self._id[CALL])
        self.vocab_size = len(self._tokenizer)

    def prompt_ids(self, messages: Iterable[Message]) -> NDArray[np.int32]:
        """Token ids ``[P]`` of a conversation, up to where the assistant speaks."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        return np.array(ids, dtype=np.int32)

    def encode(self, text: str) -> list[int]:
        """Token ids of text that may hold control tokens."""
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of token ids, control tokens included."""
        return cast(str, self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))

    def channels(self, ids: Sequence[int] | NDArray[np.int32]) -> Channels:
        """Read the channels of a response."""
        closed: list[tuple[str, str, str]] = []
        rest = [int(i) for i in ids]
        well_formed = True
        while rest:
            part = self._next_channel(rest, first=not closed)
            if part is None:
                well_formed = False
                break
            name, text, closer, rest = part
            closed.append((name, text, closer))
        bodies = {name: text for name, text, closer in closed if name != "final" or closer == RETURN}
        shape = [(name, closer) for name, _, closer in closed]
        complete = well_formed and shape == [("analysis", END), ("final", RETURN)]
        return Channels(bodies.get("analysis"), bodies.get("final"), complete)

    def _next_channel(self, ids: list[int], first: bool) -> tuple[str, str, str, list[int]] | None:
        """Split one closed channel off: its name, text, closing token and what follows; None when there is none."""
        at = 0
        if not first:
            if ids[0] != self._id[START]:
                return None
            at = 1
        # Neither special tokens are text, nor ids that the tokenizer does not know (a vocabulary may be padded).
        controls = [i for i, token in enumerate(ids) if token not in self._text and i >= at]
        if len(controls) < 3:
            return None
        channel, message, close = controls[:3]
        opened = (ids[channel], ids[message]) == (self._id[CHANNEL], self._id[MESSAGE])
        closer = next((token for token in (END, RETURN, CALL) if ids[close] == self._id[token]), None)
        author = self.decode(ids[at:channel])
        if not opened or closer is None or author != ("" if first else "assistant"):
            return None
        name = self.decode(ids[channel + 1 : message]).strip()
        return name, self.decode(ids[message + 1 : close]), closer, ids[close + 1 :]
