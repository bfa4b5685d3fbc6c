"""A tokenizer of bytes, some words and Beam's control tokens: any text can be encoded, digits are single tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from beamline.chat.beam import CONTROL

PAD = "<|endoftext|>"
_WORDS = ("analysis", "final", "assistant", "user", "system", "tool", "\n</rfl:parameter>")

CHAT_TEMPLATE = (
    "{%- if reasoning_effort is defined -%}"
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.reasoning }}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|return|>"
    "{%- else -%}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
)


def vocab_size(words: Sequence[str] = ()) -> int:
    """Rows of the embedding: bytes, control tokens and words, filled up to a multiple of 32."""
    tokens = 256 + len(CONTROL) + 1 + len(_WORDS) + len(words)
    return -(-tokens // 32) * 32


def write_tokenizer(folder: Path, words: Sequence[str] = ()) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and ``generation_config.json``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*CONTROL, PAD)])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*_WORDS, *words)])
    assert tokenizer.get_vocab_size() <= vocab_size(words)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "TokenizersBackend",
        "eos_token": "<|return|>",
        "pad_token": PAD,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    generation = {
        "eos_token_id": [tokenizer.token_to_id(token) for token in ("<|return|>", "<|call|>")],
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
