"""Tokenizer folders with chat templates of their own: the starter's tokenizer, and a template that knows efforts."""

import json
import shutil
from pathlib import Path
from typing import Any

from beamline.starter import STARTER

# Takes no arguments, and refuses nothing.
PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.reasoning }}<|end|>
{{- '' -}}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else -%}
<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

# As Beam's: an effort that is the highest by default, reasoning in past turns, turns of tools.
EFFORT = """\
{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'max' %}{% endif -%}
{%- if reasoning_effort not in ('none', 'minimal', 'low', 'max') %}
  {{- raise_exception('no effort is called ' ~ reasoning_effort) }}
{%- endif -%}
<|start|>system<|message|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }} {% endif -%}
effort {{ reasoning_effort }}<|end|>
{%- for message in messages %}
  {%- if message.role == 'assistant' %}
    {%- if message.get('reasoning_content') is none %}{{ raise_exception('reasoning is missing') }}{% endif %}
    {%- generation -%}
    <|start|>assistant<|channel|>analysis<|message|>{{ message['reasoning_content'] }}<|end|>
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}<|end|>
    {%- endgeneration -%}
  {%- elif message.role == 'tool' and loop.first %}
    {{- raise_exception('a tool does not begin') }}
  {%- elif message.role == 'system' %}
    {%- if loop.first %}{% continue %}{% endif %}
    {{- raise_exception('the system speaks once') }}
  {%- else -%}
    <|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""


def chat_folder(folder: Path, template: str = EFFORT, **named: str) -> Path:
    """Write the starter's tokenizer and a chat template; ``named`` ones go beside it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STARTER / name, folder)
    (folder / "chat_template.jinja").write_text(template)
    for name, text in named.items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)
    return folder


def change_tokenizer(folder: Path, change: Any) -> None:
    """Apply ``change`` to each added token of the folder's tokenizer, a dict."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [change(token) for token in tokenizer["added_tokens"]]
    path.write_text(json.dumps(tokenizer))
