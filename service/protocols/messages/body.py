"""The request bodies of the Messages routes as structs.

Owns field names, types and limits. Fields that ask for nothing here, such as marks of a cache that
keeps every prefix anyway, are named so that they do not count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from service.protocols.schema import MESSAGES_MAX, STOP_MAX, TOKENS_MAX, Common, Name, StopText

BLOCKS_MAX = 1024  # of the system prompt
TOOLS_MAX = 512
EDITS_MAX = 8
THINKING = ("adaptive", "disabled", "enabled")
EFFORTS = ("low", "medium", "high", "xhigh", "max")

Object = dict[str, Any]


class Thinking(Struct):
    """`type` is one of THINKING; any but "disabled" asks for reasoning."""

    type: Name
    display: Name | None = None
    budget_tokens: int | None = None


class Choice(Struct):
    type: Name
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Format(Struct):
    type: Name
    schema: Object | None = None


class OutputConfig(Struct):
    effort: Name | None = None
    format: Format | None = None


class Amount(Struct):
    type: Name
    value: Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class Edit(Struct):
    type: Name
    trigger: Amount | None = None
    keep: Amount | Literal["all"] | None = None
    clear_at_least: Amount | None = None
    exclude_tools: Annotated[list[Name], Meta(max_length=TOOLS_MAX)] | None = None
    clear_tool_inputs: bool | Annotated[list[Name], Meta(max_length=TOOLS_MAX)] | None = None


class ContextManagement(Struct):
    edits: Annotated[list[Edit], Meta(max_length=EDITS_MAX)] = []


class Diagnostics(Struct):
    previous_message_id: Name | None = None


class MessagesRequest(Common, kw_only=True):
    """Fields of OpenAI's that `Common` has are extensions here."""

    messages: Annotated[list[Object], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=0, le=TOKENS_MAX)] | None = None
    system: str | Annotated[list[Object], Meta(max_length=BLOCKS_MAX)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=STOP_MAX)] | None = None
    tools: Annotated[list[Object], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # an older name of `output_config.format`
    structured_outputs: Object | None = None  # vLLM's, for forms that are no JSON schema
    context_management: ContextManagement | None = None
    diagnostics: Diagnostics | None = None
    thread: Any = None  # a conversation that the server keeps, so that a request has new messages
    compaction: Any = None  # asks for a summary instead of an answer
    cache_control: Object | None = None
    container: Any = None
    inference_geo: Name | None = None
    user_profile_id: Name | None = None
    mcp_servers: Annotated[list[Any], Meta(max_length=64)] | None = None


PromptCount = Callable[[MessagesRequest], int]  # tokens of a request's prompt


def common(body: MessagesRequest) -> Common:
    """The fields that all protocols share, under their names there."""
    fields = {name: getattr(body, name) for name in Common.__struct_fields__}
    fields["stop"] = body.stop_sequences or None
    return Common(**fields)
