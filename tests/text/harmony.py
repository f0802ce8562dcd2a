"""A small template of Harmony and a vocabulary for it, built like those of gpt-oss."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from batchengine.text.encoder import TextEncoder
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from tests.text.test_tokenizer import CONTROL, NORMAL, byte_alphabet, write_vocab

NAMES = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
)
IDS = {name: 257 + number for number, name in enumerate(NAMES)}

# Earlier reasoning is shown in front of calls that no final text follows; one call is shown of each
# message; a result has the name of the last call; a tool needs a description; texts are joined.
TEMPLATE = """
{%- macro type_of(schema) -%}
    {%- if schema.type == "object" and schema.properties -%}
        {{- "{" }}
        {%- for name, inner in schema.properties.items() -%}
            {{- name + ("" if name in (schema.required or []) else "?") + ": " + type_of(inner) }}
            {%- if not loop.last %}{{ ", " }}{% endif %}
        {%- endfor -%}
        {{- "}" }}
    {%- elif schema.enum -%}
        {{- '"' + schema.enum | join('" | "') + '"' }}
    {%- elif schema.type is string -%}
        {{- schema.type }}
    {%- elif schema.type is defined and schema.type is iterable and schema.type is not mapping -%}
        {{- schema.type | join(" | ") }}
    {%- else -%}
        {{- "any" }}
    {%- endif -%}
    {%- if schema.default is defined -%}
        {{- ", // " + (schema.default if schema.enum else schema.default | tojson) }}
    {%- endif -%}
{%- endmacro -%}
{%- macro system() -%}
    {%- if model_identity is not defined %}{% set model_identity = "You are a test." %}{% endif %}
    {{- model_identity + "\\nDate: " + strftime_now("%Y-%m-%d") }}
    {%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}
    {{- "\\nReasoning: " + reasoning_effort }}
    {%- set has = namespace(browser=false) %}
    {%- for one in builtin_tools or [] %}{% if one == "browser" %}{% set has.browser = true %}
        {%- break %}{% endif %}{% endfor %}
    {{- "\\nbrowser" if has.browser else "" }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + system() + "<|end|>" }}
{%- set own = messages[0].content if messages[0].role in ("developer", "system") else "" %}
{%- set rest = messages[1:] if own else messages %}
{%- if own or tools %}
    {{- "<|start|>developer<|message|>" + own }}
    {%- for tool in tools or [] %}
        {{- "\\n// " + tool.function.description + "\\ntype " + tool.function.name + " = " }}
        {%- if tool.function.parameters and tool.function.parameters.properties %}
            {{- "(_: " + type_of(tool.function.parameters) + ") => any;" }}
        {%- else %}
            {{- "() => any;" }}
        {%- endif %}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == "assistant" %}
        {%- if "<|channel|>final<|message|>" in message.content %}
            {{- raise_exception("a message with <|channel|> in its content") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(final=false) %}
            {%- for one in rest[loop.index:] %}
                {%- if one.role == "assistant" and "tool_calls" not in one %}
                    {%- set later.final = true %}
                {%- endif %}
            {%- endfor %}
            {%- if message.content and message.thinking %}
                {{- raise_exception("content and thinking in a message with calls") }}
            {%- elif (message.content or message.thinking) and not later.final %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" }}
                {{- (message.content or message.thinking) + "<|end|>" }}
            {%- endif %}
            {%- set called.name = message.tool_calls[0].function.name %}
            {{- "<|start|>assistant to=functions." + called.name + "<|channel|>commentary json" }}
            {{- "<|message|>" + message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set called.name = none %}
        {%- endif %}
    {%- elif message.role == "tool" %}
        {%- if called.name is none %}{{ raise_exception("a result without a call") }}{% endif %}
        {{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
        {{- message.content | tojson + "<|end|>" }}
    {%- elif message.role == "user" %}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""


def write_harmony(path: Path, **more: Any) -> Path:
    """A vocabulary of bytes with the control tokens of gpt-oss, and TEMPLATE."""
    tokens = [*((text, NORMAL) for text in byte_alphabet()), ("th", NORMAL)]
    keys: dict[str, Any] = {
        "tokenizer_pre": "gpt-4o",
        "token_merges": ["t h"],
        "bos_token_id": IDS["<|startoftext|>"],
        "eos_token_id": IDS["<|return|>"],
        "chat_template": TEMPLATE,
    }
    return write_vocab(path, "gpt2", [*tokens, *((one, CONTROL) for one in NAMES)], **keys | more)


def open_harmony(path: Path) -> TextEncoder:
    """The encoder of chats with the vocabulary at `path`."""
    tokenizer = Tokenizer(path)
    return TextEncoder(tokenizer, Renderer(TEMPLATE, datetime.date(2026, 2, 3), 1 << 20))


def shown(text: TextEncoder, tokens: list[int]) -> str:
    """A prompt as text."""
    return b"".join(map(text.piece, tokens)).decode()
