"""POST /v1/responses: its body, checks and conversation, and the fields that its answer repeats.

Owns the names and limits of the protocol's own fields; those of all protocols are in
`service.protocols.schema`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from batchengine import errors
from batchengine.core import FORM_RESPONSES, Constraint, SlaClass
from service.protocols import conversation
from service.protocols.conversation import Conversation
from service.protocols.openai import formats
from service.protocols.openai.envelope import error_object
from service.protocols.protocol import PastAnswer, PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import Prompt
from service.protocols.responses import items, past_items, tools
from service.protocols.responses.formatter import ID_PREFIX, Echo, ResponsesFormatter, turn_id_of
from service.protocols.schema import EFFORTS, Common, Extension, Name, TokenCount, common_fields
from service.protocols.strict_json import object_of

ITEMS_MAX = 8192
TOOLS_MAX = 512
ID_CHARS_MAX = 256
ECHO_BYTES_MAX = 16 << 10  # of instructions and tools; larger ones are not repeated
SUMMARIES = ("auto", "concise", "detailed", "none")
TOP_LOGPROBS_MAX = 20
INCLUDE_LOGPROBS = "message.output_text.logprobs"
INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs", INCLUDE_ENCRYPTED, INCLUDE_LOGPROBS,
)  # fmt: skip

WINDOWS = {"soonest": SlaClass.STANDARD, "2h": SlaClass.BATCH, "8h": SlaClass.BATCH}

_encode = msgspec.json.Encoder().encode
Fields = dict[str, Any]
Id = Annotated[str, Meta(max_length=ID_CHARS_MAX)]


class ResponsesRequest(Common, kw_only=True):
    input: str | Annotated[list[Any], Meta(max_length=ITEMS_MAX)] | None = None
    instructions: str | Annotated[list[Any], Meta(max_length=ITEMS_MAX)] | None = None
    max_output_tokens: TokenCount | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[Fields], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: str | Fields | None = None
    parallel_tool_calls: bool | None = None
    text: Fields | None = None
    structured_outputs: Fields | None = None  # vLLM's, for forms that are no JSON schema
    reasoning: Fields | None = None
    include: Annotated[list[Name], Meta(max_length=64)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    store: bool | None = None
    previous_response_id: Id | None = None
    conversation: Id | Fields | None = None
    background: bool | None = None
    background_options: Fields | None = None
    truncation: Name | None = None
    prompt: Fields | None = None
    safety_identifier: Name | None = None
    client_metadata: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    prompt_cache_options: Fields | None = None
    prompt_cache_retention: Name | None = None


def check(body: ResponsesRequest) -> None:
    """Raises 400 for fields that would change the answer and are not implemented."""
    if body.prompt is not None:
        raise errors.UNSUPPORTED_FIELD(
            param="prompt", what="stored prompts are not supported", fix="send input"
        )
    if body.n not in (None, 1):
        what, fix = "a response has one answer", "leave out n"
        raise errors.UNSUPPORTED_FIELD(param="n", what=what, fix=fix)
    if body.truncation not in (None, "auto", "disabled"):
        what = f"truncation {body.truncation[:40]!r} is unknown"
        raise errors.INVALID_FIELD(param="truncation", what=what, fix='use "disabled"')
    if body.background and warms(body):
        what, fix = "a prompt that is only computed is not fetched later", "leave out background"
        raise errors.INVALID_FIELD(param="background", what=what, fix=fix)
    if body.background and body.store is False:
        what = "a background response is stored until it is fetched"
        raise errors.INVALID_FIELD(param="store", what=what, fix="leave out store or background")
    if body.conversation is not None and body.previous_response_id is not None:
        what = "conversation and previous_response_id both name what the input follows"
        fix = "send one of them"
        raise errors.INVALID_FIELD(param="previous_response_id", what=what, fix=fix)
    previous = body.previous_response_id
    if previous is not None and not previous.startswith(ID_PREFIX):
        raise errors.INVALID_FIELD(
            param="previous_response_id",
            what=f"Invalid 'previous_response_id': '{previous[:64]}'",
            why="Expected an ID that begins with 'resp'",
            fix="send the id of a response, or leave it out",
        )
    for index, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            what = f"Invalid value: {name[:64]!r}"
            why = f"Supported values are: {', '.join(INCLUDABLE)}"
            raise errors.INVALID_FIELD(param=f"include[{index}]", what=what, why=why)
    if not body.input:
        raise errors.MISSING_FIELD(param="input")
    effort(body)
    wants_summary(body)
    response_format(body)


def unread(body: ResponsesRequest) -> list[str]:
    """Names of fields and tools that are accepted and change nothing."""
    found = [
        name
        for name in ("max_tool_calls", "prompt_cache_retention")
        if getattr(body, name) is not None
    ]
    if body.truncation == "auto":
        found.append("truncation")
    if (body.text or {}).get("verbosity") is not None:
        found.append("text.verbosity")
    known = (INCLUDE_LOGPROBS, INCLUDE_ENCRYPTED)
    return found + [f"include.{name}" for name in body.include or () if name not in known]


def warms(body: ResponsesRequest) -> bool:
    """Whether only the KV of the prompt is wanted. How long it stays is not for clients to say, and
    every answer names what it reused: the other options of the prompt's cache change nothing."""
    return (body.prompt_cache_options or {}).get("prewarm") is True


def effort(body: ResponsesRequest) -> str | None:
    """How much the model reasons before its answer; raises 400."""
    asked = (body.reasoning or {}).get("effort")
    if asked is not None and asked not in EFFORTS:
        what, fix = "reasoning.effort is unknown", "use one of " + ", ".join(EFFORTS)
        raise errors.INVALID_FIELD(param="reasoning.effort", what=what, fix=fix)
    return asked


def response_format(body: ResponsesRequest) -> Constraint | None:
    """The form that the answer's text must have, None = any; raises 400."""
    asked = (body.text or {}).get("format")
    if asked is None:
        return formats.structured_outputs(body.structured_outputs)
    fields = object_of(asked)
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint("json_schema", '{"type":"object"}')
        case "json_schema" if isinstance(fields.get("schema"), dict):
            return Constraint("json_schema", msgspec.json.encode(fields["schema"]).decode())
        case _:
            raise errors.INVALID_FIELD(
                param="text.format",
                what="text.format has a wrong value",
                why="it is text, json_object, or json_schema with a schema",
                fix='send {"type": "json_schema", "name": "…", "schema": {…}}',
            )


def logprobs(body: ResponsesRequest) -> int:
    """As in `core.Sampling`."""
    is_asked = bool(body.top_logprobs) or INCLUDE_LOGPROBS in (body.include or ())
    return (body.top_logprobs or 0) if is_asked else -1


def wants_summary(body: ResponsesRequest) -> bool:
    """Whether the client shows the summaries of reasoning items, not their content; raises 400.

    Nothing summarises: the reasoning itself stands there.
    """
    asked = (body.reasoning or {}).get("summary")
    if asked is not None and asked not in SUMMARIES:
        what, fix = "reasoning.summary is unknown", "use one of " + ", ".join(SUMMARIES)
        raise errors.INVALID_FIELD(param="reasoning.summary", what=what, fix=fix)
    return asked not in (None, "none")


def wants_encrypted(body: ResponsesRequest) -> bool:
    """Whether reasoning items have `encrypted_content`, for clients that return only that."""
    return INCLUDE_ENCRYPTED in (body.include or ())


def conversation_id(body: ResponsesRequest) -> str | None:
    """The client's name of the conversation that the input follows; raises 400."""
    given = body.conversation
    if isinstance(given, dict):
        given = given.get("id")
        if not isinstance(given, str) or len(given) > ID_CHARS_MAX:
            what, fix = "conversation names none", 'send its id, or {"id": "…"}'
            raise errors.INVALID_FIELD(param="conversation", what=what, fix=fix)
    return given


def common(body: ResponsesRequest) -> Common:
    """The fields that all protocols share. A conversation is a session; a response that no client
    waits for has a class that can wait."""
    fields = common_fields(body)
    given = fields.batchengine or Extension()
    if given.session_id is None and (named := conversation_id(body)) is not None:
        given = msgspec.structs.replace(given, session_id=named)
    if body.background and given.sla_class is None and body.service_tier is None:
        window = (body.background_options or {}).get("completion_window")
        sla_class = WINDOWS.get(window if isinstance(window, str) else "", SlaClass.BACKGROUND)
        given = msgspec.structs.replace(given, sla_class=sla_class.value)
    return msgspec.structs.replace(fields, batchengine=given)


def repeated(body: ResponsesRequest) -> Fields:
    """The fields of a request that its response repeats, with the defaults that were used."""
    reasoning, text = body.reasoning or {}, body.text or {}
    found: Fields = {} if body.model is None else {"model": body.model}
    found |= {
        "background": bool(body.background),
        "conversation": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.safety_identifier,
        "store": body.store is not False and not warms(body),
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    if (named := conversation_id(body)) is not None:
        found["conversation"] = {"id": named}
    large: Fields = {"instructions": None, "tools": [], "text": {"format": {"type": "text"}}}
    if len(msgspec.json.encode([found[name] for name in large])) > ECHO_BYTES_MAX:
        found |= large
    return found


def read_prompt(body: ResponsesRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of the input; raises 400."""
    return conversation.read(_conversation(body), text, limits)


def _turns(body: ResponsesRequest) -> list[str]:
    return past_items.turns_of(body.input)


def _resolved(body: ResponsesRequest, answers: Sequence[PastAnswer]) -> ResponsesRequest:
    return msgspec.structs.replace(body, input=past_items.resolved(body.input, answers))


def _conversation(body: ResponsesRequest) -> Conversation:
    messages, items_unread = items.messages(body.input, body.instructions)
    functions, names, tools_unread = tools.functions(body.tools)
    fields = {name: msgspec.Raw(_encode(one)) for name, one in repeated(body).items()}
    previous, is_warm = body.previous_response_id, warms(body)
    is_stored = body.store is not False and not is_warm
    echo = Echo(
        fields,
        names,
        wants_encrypted(body),
        int(time.time()),
        is_warm,
        wants_summary(body),
        past_items.kept_input(body.input) if is_stored else "",
    )
    template: dict[str, object] = {}
    if (asked := effort(body)) is not None:
        template = {"reasoning_effort": asked}
        if asked == "none":
            template["enable_thinking"] = False
    return Conversation(
        messages=messages,
        tools=functions,
        tool_choice=tools.tool_choice(body.tool_choice, functions, body.parallel_tool_calls),
        response=response_format(body),
        template=template,
        tokens_max=0 if is_warm else body.max_output_tokens,
        logprobs=logprobs(body),
        param="input",
        response_param="text.format",
        echo=_encode(echo),
        append=previous is not None or (body.conversation is not None and not is_warm),
        append_to="" if previous is None else turn_id_of(previous),
        heading=len(items.messages(None, body.instructions)[0]),
        stored=is_stored,
        unread=(*unread(body), *items_unread, *tools_unread),
    )


RESPONSES = Protocol(
    name=FORM_RESPONSES,
    routes=("/v1/responses",),
    body=ResponsesRequest,
    check=check,
    read_prompt=read_prompt,
    formatter=ResponsesFormatter,
    error=error_object,
    common=common,
    count_route="/v1/responses/input_tokens",
    turns=_turns,
    resolved=_resolved,
)
