"""POST /v1/responses: the row of the protocol table."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from batchengine.core import FORM_RESPONSES
from service.protocols import conversation
from service.protocols.conversation import Conversation
from service.protocols.openai.envelope import error_object
from service.protocols.protocol import PastAnswer, PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import Prompt
from service.protocols.responses import items, past_items, schema, tools
from service.protocols.responses.formatter import Echo, ResponsesFormatter, turn_id_of
from service.protocols.responses.schema import ResponsesRequest

_encode = msgspec.json.Encoder().encode


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
    fields = {name: msgspec.Raw(_encode(one)) for name, one in schema.repeated(body).items()}
    previous, warms = body.previous_response_id, schema.warms(body)
    is_stored = body.store is not False and not warms
    echo = Echo(
        fields,
        names,
        schema.wants_encrypted(body),
        int(time.time()),
        warms,
        schema.wants_summary(body),
        past_items.kept_input(body.input) if is_stored else "",
    )
    template: dict[str, object] = {}
    if (effort := schema.effort(body)) is not None:
        template = {"reasoning_effort": effort}
        if effort == "none":
            template["enable_thinking"] = False
    return Conversation(
        messages=messages,
        tools=functions,
        tool_choice=tools.tool_choice(body.tool_choice, functions, body.parallel_tool_calls),
        response=schema.response_format(body),
        template=template,
        tokens_max=0 if warms else body.max_output_tokens,
        logprobs=schema.logprobs(body),
        param="input",
        response_param="text.format",
        echo=_encode(echo),
        append=previous is not None or (body.conversation is not None and not warms),
        append_to="" if previous is None else turn_id_of(previous),
        heading=len(items.messages(None, body.instructions)[0]),
        stored=is_stored,
        unread=(*schema.unread(body), *items_unread, *tools_unread),
    )


RESPONSES = Protocol(
    name=FORM_RESPONSES,
    routes=("/v1/responses",),
    body=ResponsesRequest,
    check=schema.check,
    read_prompt=read_prompt,
    formatter=ResponsesFormatter,
    error=error_object,
    common=schema.common,
    count_route="/v1/responses/input_tokens",
    turns=_turns,
    resolved=_resolved,
)
