"""The request bodies of the OpenAI routes as structs, with a bound on every number and list.

Owns field names, types and limits; `read_request` turns a body into a struct or into an
error that names the field. `binary32` rounds floats once, to the numbers that the sampler uses.
Unknown fields are reported, and change nothing.
"""

from __future__ import annotations

import re
import struct
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from batchengine import errors
from batchengine.core import BatchEngineError
from service.session_ids import printable

MESSAGES_MAX = 8192
PROMPTS_MAX = 32
CHOICES_MAX = 8
GENERATIONS_MAX = 32  # prompts x choices of one request
STOP_MAX = 64
TOKENS_MAX = 1 << 24

Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Name = Annotated[str, Meta(max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=256)]
# The lower bound is far above what binary32 rounds to zero.
Millis = Annotated[float, Meta(ge=0.001, le=86_400_000)]
TokenCount = Annotated[int, Meta(ge=1, le=TOKENS_MAX)]
TokensMax = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]  # -1 = no limit, as llama.cpp says
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(Struct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Extension(Struct, forbid_unknown_fields=True):
    """The `batchengine` object: fields that only this daemon has."""

    sla_class: Annotated[
        str | None,
        Meta(description="How urgent it is: `interactive`, `standard`, `background` or `batch`"),
    ] = msgspec.field(default=None, name="class")
    ttft_ms: Annotated[
        Millis | None, Meta(description="Target: time to the first token, instead of the class's")
    ] = None
    tpot_ms: Annotated[
        Millis | None,
        Meta(description="Target: time of each further token, instead of the class's"),
    ] = None
    ttlt_ms: Annotated[Millis | None, Meta(description="Target: time to the last token")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)] | None,
        Meta(description="Order among requests of one class; higher is sooner"),
    ] = None
    expected_output_tokens: Annotated[
        TokenCount | None, Meta(description="How long the answer may get, for the choice of a lane")
    ] = None
    max_context_tokens: Annotated[
        TokenCount | None, Meta(description="Accepted, and changes nothing")
    ] = None
    session_id: Annotated[str | None, Meta(description="The session's name")] = None
    parent_session_id: Annotated[
        str | None, Meta(description="Name of the session that started this one")
    ] = None
    final: Annotated[bool | None, Meta(description="The session's last turn")] = None
    park: Annotated[
        bool | None,
        Meta(description="The session waits for a tool after this turn, and leaves its place"),
    ] = None
    promote: Annotated[
        bool | None, Meta(description="true = the session moves to a fast lane first")
    ] = None
    append: Annotated[
        bool | None,
        Meta(description="true = the messages are new ones, behind those of the session"),
    ] = None


class AgentHints(Struct):
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    strict_priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    osl: TokenCount | None = None


class DynamoHints(Struct):
    agent_hints: AgentHints | None = None


class Common(Struct, kw_only=True):
    """Fields that chat and plain completions share. None = not given."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=STOP_MAX)] | None = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]],
            Meta(max_length=1024),
        ]
        | None
    ) = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    user: Name | None = None
    metadata: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    service_tier: Name | None = None
    speed: Name | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    nvext: DynamoHints | None = None
    batchengine: Extension | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None


def common_fields(body: Common) -> Common:
    """The fields of `body` that all protocols share, without its others."""
    return Common(**{name: getattr(body, name) for name in Common.__struct_fields__})


class OpenAIBody(Common, kw_only=True):
    """Fields that chat and plain completions share, and their names in other servers."""

    max_tokens: TokensMax | None = None
    n_predict: TokensMax | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None


def openai_fields(body: OpenAIBody) -> Common:
    """The common fields of a body, also those that it has by another name."""
    found = common_fields(body)
    if found.repetition_penalty is None:
        found.repetition_penalty = body.repeat_penalty
    return found


def tokens_asked(*given: int | None, least: int = 1) -> int | None:
    """The first limit that is given; None, and -1, leave it to the daemon. Raises 400 for 0, unless
    that is the `least` one."""
    asked = next((one for one in given if one is not None), -1)
    if asked == 0 and least:
        what, why = "max_tokens is 0", "an answer has at least one token"
        fix = "send 1 or more, or leave it out"
        raise errors.INVALID_FIELD(param="max_tokens", what=what, why=why, fix=fix)
    return None if asked < 0 else asked


class ChatRequest(OpenAIBody, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: TokensMax | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Annotated[list[dict[str, Any]], Meta(max_length=512)] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=16)] | None = None
    store: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(OpenAIBody, kw_only=True):
    prompt: Any
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None  # vLLM's
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    suffix: str | None = None


Body = TypeVar("Body", bound=Common)
Kind = TypeVar("Kind", bound=Struct)

# Fields of the `batchengine` object that are accepted and have no effect.
EXTENSION_UNREAD = ("max_context_tokens",)

_PATH = re.compile(r" - at `(key in )?\$\.?(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`(?: (?P<bound>[^,]*))?(?:, got `(?P<got>.*)`)?")
_KINDS = {
    "array": "a list",
    "object": "an object",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_MISSING = re.compile(r"required field `(?P<name>[^`]*)`")
_NO_CHOICE = "Invalid enum value "
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")


def read_request(kind: type[Body], values: dict[str, object]) -> tuple[Body, list[str]]:
    """`values` as a `kind`, and the names of fields that change nothing: unknown or unread.

    Raises BatchEngineError 400 whose `param` is the path of the first wrong field.
    """
    known = set(kind.__struct_encode_fields__)
    body = convert(kind, values)
    unknown = [printable(name) for name in values if name not in known]
    for name in EXTENSION_UNREAD:
        if getattr(body.batchengine, name, None) is not None:
            unknown.append(f"batchengine.{name}")
    return body, unknown


def convert(kind: type[Kind], values: dict[str, object]) -> Kind:
    """`values` as a `kind`; raises BatchEngineError 400 as `read_request` does."""
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        needed = {one.encode_name for one in msgspec.structs.fields(kind) if one.required}
        raise _field_error(str(error), needed, _choices(kind)) from None


def _choices(kind: type[Struct]) -> dict[str, list[str]]:
    """The values of fields that have a few, by the fields' names."""
    return {
        one.encode_name: [value for part in get_args(one.type) for value in get_args(part)]
        for one in msgspec.structs.fields(kind)
    }


def _field_error(text: str, needed: set[str], choices: dict[str, list[str]]) -> BatchEngineError:
    """The error of a msgspec message such as "Expected `int` >= 1 - at `$.n`"; fields in `needed`
    cannot be left out, and some have one of a few values."""
    found = _PATH.search(text)
    path = found["path"] if found else ""
    what = text[: found.start()] if found else text
    for pattern, row in ((_MISSING, errors.MISSING_FIELD), (_UNKNOWN, errors.UNKNOWN_FIELD)):
        if named := pattern.search(what):
            param = f"{path}.{named['name']}" if path else named["name"]
            return row(param=printable(param))
    param = printable(path.replace("[...]", "")) or None
    fix = f"correct {param}" if param in needed else f"correct {param} or leave it out"
    if what.startswith(_NO_CHOICE) and (names := choices.get(path)):
        fix = f"use {', '.join(names)}"
    return errors.INVALID_FIELD(
        param=param,
        what=f"{param or 'body'} has a wrong value",
        why=_plain(what),
        fix=fix if param else "send a JSON object",
    )


def _plain(message: str) -> str:
    """A message of msgspec in words that do not need its types."""
    found = _EXPECTED.fullmatch(message)
    if found is None:
        message = message.replace(_NO_CHOICE, "There is no value ")
        return message[:1].lower() + message[1:].replace("`", "")
    kinds = [_KINDS.get(kind, kind) for kind in found["kinds"].split(" | ") if kind != "null"]
    bound = found["bound"] or ""
    for sign, words in ((">= ", "of at least "), ("<= ", "of at most "), (">", "above")):
        bound = bound.replace(sign, words)
    bound = bound.replace("of length of", "with a length of")
    text = f"it must be {' or '.join(kinds)} {bound}".rstrip()
    got = "a fraction" if found["got"] == "float" else _KINDS.get(found["got"], found["got"])
    return f"{text}, not {got}" if found["got"] else text


def binary32(value: float) -> float:
    """The nearest binary32 number, as a Python float."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings in order, without repeats."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop))
