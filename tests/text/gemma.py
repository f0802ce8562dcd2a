"""A small template of Gemma 4 and vocabularies for it, built like those of its files."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from tests.text.test_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER, write_vocab

# As files have them: those that an answer shows are tokens of users there.
NAMES = [
    *(("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)),
    *(("<|turn>", CONTROL), ("<turn|>", CONTROL), ("<|think|>", CONTROL)),
    *(("<|tool>", CONTROL), ("<tool|>", CONTROL)),
    *((name, USER) for name in ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>")),
    *((name, USER) for name in ("<|tool_response>", "<tool_response|>", '<|"|>')),
]
IDS = {name: number for number, (name, _) in enumerate(NAMES)}

# Earlier reasoning is shown in front of calls that no message of a user follows; results stand in
# the turn of the call, and text of a message with calls behind them.
TEMPLATE = """
{%- macro value(one) -%}
    {%- if one is none -%}null
    {%- elif one is string -%}<|"|>{{ one }}<|"|>
    {%- elif one is boolean -%}{{ "true" if one else "false" }}
    {%- elif one is mapping -%}{{ "{" }}{{ fields(one) }}{{ "}" }}
    {%- elif one is sequence -%}
        [{% for inner in one %}{{ value(inner) }}{{ "," if not loop.last }}{% endfor %}]
    {%- else -%}{{ one }}
    {%- endif -%}
{%- endmacro -%}
{%- macro fields(of) -%}
    {%- for key, one in of | dictsort -%}
        {{- key }}:{{ value(one) }}{{ "," if not loop.last -}}
    {%- endfor -%}
{%- endmacro -%}
{%- set thinks = enable_thinking | default(false) -%}
{%- set own = messages[0].content if messages[0].role in ("developer", "system") else "" -%}
{%- set rest = messages[1:] if own else messages -%}
{{- bos_token }}
{%- if own or tools or thinks %}
    {{- "<|turn>system\\n" + ("<|think|>\\n" if thinks else "") + own | trim }}
    {%- for tool in tools or [] -%}
        <|tool>declaration:{{ tool.function.name }}{{ "{" }}
        {{- fields({"description": tool.function.description, "parameters":
            tool.function.parameters}) }}{{ "}" }}<tool|>
    {%- endfor %}
    {{- "<turn|>\\n" }}
{%- endif %}
{%- set last = namespace(user=-1, kind="", role="") %}
{%- for message in rest if message.role == "user" %}{% set last.user = message %}{% endfor %}
{%- set behind = namespace(user=last.user == -1) %}
{%- for message in rest %}
    {%- if message is sameas last.user %}{% set behind.user = true %}{% endif %}
    {%- if message.role != "tool" %}
        {%- set last.kind = "" %}
        {%- if message.role != "assistant" or last.role != "assistant" %}
            {{- "<|turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" }}
        {%- endif %}
        {%- set last.role = message.role %}
        {%- if message.tool_calls and message.reasoning_content and behind.user %}
            {{- "<|channel>thought\\n" + message.reasoning_content + "\\n<channel|>" }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set last.kind = "call" %}
            {{- "<|tool_call>call:" + call.function.name + "{" }}
            {%- if call.function.arguments is mapping %}{{ fields(call.function.arguments) }}
            {%- else %}{{ call.function.arguments }}{% endif %}
            {{- "}<tool_call|>" }}
        {%- endfor %}
        {%- if message.tool_calls %}
            {%- set results = namespace(over=false) %}
            {%- for result in rest[loop.index:] if not results.over %}
                {%- if result.role != "tool" %}
                    {%- set results.over = true %}
                {%- else %}
                    {%- set last.kind = "result" %}
                    {%- set named = namespace(name=result.name or "unknown") %}
                    {%- for call in message.tool_calls if call.id == result.tool_call_id %}
                        {%- set named.name = call.function.name %}
                    {%- endfor %}
                    {{- "<|tool_response>response:" + named.name + "{" }}
                    {{- fields(result.content if result.content is mapping else
                        {"value": result.content}) + "}<tool_response|>" }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- message.content | trim }}
        {%- if last.kind == "call" %}{{ "<|tool_response>" }}
        {%- elif last.kind != "result" or message.content %}{{ "<turn|>\\n" }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not last.kind %}
    {{- "<|turn>model\\n" + ("" if thinks else "<|channel>thought\\n<channel|>") }}
{%- endif %}"""


def write_gemma(
    path: Path,
    tokens: Iterable[str] = ("a", "b", "\n", "\n\n", "▁", "▁a", "ab"),
    merges: Iterable[str] = ("▁ a", "a b"),
    **more: Any,
) -> Path:
    """A vocabulary of some tokens, bytes and NAMES, with TEMPLATE."""
    listed = [*NAMES, *((f"<0x{byte:02X}>", BYTE) for byte in range(256))]
    known = {text for text, _ in listed}
    listed += [(one, NORMAL) for one in dict.fromkeys(tokens) if one not in known]
    keys: dict[str, Any] = {
        "token_merges": list(merges),
        "bos_token_id": IDS["<bos>"],
        "eos_token_id": IDS["<turn|>"],
        "unk_token_id": IDS["<unk>"],
        "chat_template": TEMPLATE,
    }
    return write_vocab(path, "gemma4", listed, **keys | more)


def merged(text: str, random: Random, *, has_words: bool) -> tuple[list[str], list[str]]:
    """Tokens of parts of a text, and merges that make them, in a random order. `has_words`: none
    goes over the end of a word."""
    escaped = text.replace(" ", "▁").replace("\0", "")
    parts = {escaped[at : at + n] for n in (1, 2, 3, 4) for at in range(len(escaped) - n)}
    kept = sorted(part for part in parts if not has_words or "▁" not in part.lstrip("▁"))
    tokens = [part for part in kept if part in "▁theab" or random.random() < 0.8]
    known = set(tokens)
    pairs = [(one[:at], one[at:]) for one in tokens for at in range(1, len(one))]
    merges = [" ".join(pair) for pair in pairs if known.issuperset(pair)]
    random.shuffle(merges)
    return tokens, merges


def open_gemma(path: Path, template: str = TEMPLATE) -> TextEncoder:
    """The encoder of chats with the vocabulary at `path`."""
    return TextEncoder(Tokenizer(path), Renderer(template, datetime.date(2026, 2, 3), 1 << 20))
