"""A conversation as every chat protocol means it, and its prompt.

Owns `Conversation`, which the protocols make of their bodies, and the order in which it becomes a
`Prompt`: bounds, template and tokenizer. Runs in a text process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from batchengine import errors
from batchengine.core import Constraint, OutputForm
from batchengine.markup import FINAL, START
from service.protocols import append, requests
from service.protocols.markup import grammars, history
from service.protocols.markup.rules import PATTERN
from service.protocols.protocol import PromptEncoder, PromptLimits
from service.protocols.requests import NOTHING, Prompt
from service.protocols.strict_json import list_of, object_of
from service.session_ids import CALL_CHARS_MAX

END_TOKENS = 16  # of a prompt that are looked at for the beginning of reasoning
TEXT_PARAMETERS_CHARS_MAX = 1 << 15
MEDIA_PARTS = (
    "image", "image_url", "input_image", "document", "file", "input_file", "audio", "input_audio",
)  # fmt: skip
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
TOOL_NAME = re.compile(r"[\w.:/-]{1,256}")  # that every parser of answers reads
CALLS_MAX = 64  # tool calls of one conversation that are looked up


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer may call, or must: `names` limits a required call; () = any tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True


AUTO = ToolChoice()


@dataclass(slots=True)
class Conversation:
    """One chat request, whatever its protocol.

    `messages` are in the form of OpenAI's chat, with roles system, user, assistant and tool, text
    content as one string, `reasoning_content`, `tool_calls` and `tool_call_id`; `tools` likewise
    are functions with JSON Schemas; `inline_tools` can be called too, but the template does not get
    them, since the text of a message has their definitions. `response` is the form that the
    answer's text must have. `continues` = the last message is the assistant's, and the answer goes
    on with its text. `tokens_max` None = not given. `append`: the messages are new ones behind
    those of the session, if it has some. `param` is the field that errors about the size name.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    inline_tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tool_choice: ToolChoice = AUTO
    response: Constraint | None = None
    continues: bool = False
    template: dict[str, Any] = field(default_factory=dict[str, Any])  # variables of the template
    tokens_max: int | None = None
    logprobs: int = -1
    param: str = "messages"
    response_param: str = "response_format"  # the field with `response`
    echo: bytes = NOTHING
    unread: tuple[str, ...] = ()  # as in `Prompt`
    append: bool = False
    append_to: str = ""  # the turn behind whose answer they go
    heading: int = 0  # first messages, of the system, which the turn before may have already
    stored: bool = False  # as in `Prompt`
    predicted: str = ""  # what the client expects of the answer's text


def check_names(tools: Iterable[tuple[str, str]]) -> None:
    """Raises 400 for names that the markup of a family cannot say, and for one of two tools; each
    comes with the field that has it. OpenAI's servers allow less: 64 letters, digits, - and _."""
    seen: set[str] = set()
    for param, name in tools:
        if not TOOL_NAME.fullmatch(name):
            raise errors.INVALID_FIELD(
                param=param,
                what=f"Invalid '{param}': string does not match pattern",
                why=f"Expected a string that matches the pattern '^{TOOL_NAME.pattern}$'",
                fix="name the tool with letters, digits and - _ . : /",
            )
        if name in seen:
            what, why = "tools: Tool names must be unique", f"two of them are named {name[:64]!r}"
            raise errors.INVALID_FIELD(param=param, what=what, why=why, fix="rename one of them")
        seen.add(name)


def omitted(kind: object) -> str | None:
    """What stands for a part of a tool's result that is no text; None if it must be refused.

    An agent sends an image that its tool has read with every later turn: if it were refused, as a
    user's is, the session could not go on.
    """
    return f"[{kind} omitted: this model reads text only]" if kind in MEDIA_PARTS else None


def text_of(content: object, where: str, media: dict[str, None] | None = None) -> str:
    """Text, or that of a list of text parts; raises 400. `media`: takes the kinds of parts that
    others stand for; None = each is refused."""
    if isinstance(content, str):
        return content
    parts = list_of(content)
    if not isinstance(content, list):
        raise errors.INVALID_FIELD(
            param=where,
            what=f"{where} is missing or neither text nor a list of text parts",
            fix="send a string",
        )
    texts: list[str] = []
    for index, part in enumerate(map(object_of, parts)):
        kind = part.get("type")
        text: object = part.get("refusal" if kind == "refusal" else "text")
        if media is not None and (instead := omitted(kind)) is not None:
            texts.append(instead)
            media[str(kind)] = None
        elif kind in TEXT_PARTS and isinstance(text, str):
            texts.append(text)
        else:
            raise errors.INVALID_FIELD(
                param=f"{where}[{index}].type",
                what=f"{where}[{index}] is not a text part",
                why="this daemon reads text only",
                fix='send {"type": "text", "text": "…"}',
            )
    return "\n".join(texts)


def read(conversation: Conversation, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The prompt of `conversation`; raises 400."""
    context, param = limits.context_tokens, conversation.param
    _check(conversation, limits)
    is_callable = conversation.tool_choice.mode != "none"
    # in the prompt of every turn, called or not
    tools = [_shown(tool) for tool in conversation.tools] or None
    called = [*conversation.tools, *conversation.inline_tools] if is_callable else []
    appends = conversation.append or limits.append
    found = _rendered(conversation, tools, text, limits.called, appends=appends)
    tokens = found.tokens
    requests.check_prompt(tokens, context, limits.context_bound, param)
    tokens_max = conversation.tokens_max
    if tokens_max is None:  # the default must never be the reason for refusing a prompt that fits
        tokens_max = min(limits.tokens_max_default, context - len(tokens))
    constraint, is_checked = _constraint(conversation, called, tokens, text)
    form = OutputForm(
        text.markup.name,
        in_reasoning(tokens, text),
        calls=bool(called),
        text_parameters=text_parameters(called) if text.markup.has_bare_values else {},
        checked=is_checked,
        heading=(_digest(found.head), _digest(tools)),
    )
    return Prompt(
        [tokens],
        tokens_max,
        conversation.logprobs,
        param,
        call_ids(conversation.messages),
        form,
        constraint,
        echo=conversation.echo,
        unread=conversation.unread,
        constraint_param="tools" if conversation.response is None else conversation.response_param,
        append=found.append,
        append_bare=found.append_bare,
        append_to=conversation.append_to,
        stored=conversation.stored,
        predicted=_encoded(conversation.predicted, text)[:context],
    )


def _check(conversation: Conversation, limits: PromptLimits) -> None:
    """Raises 400 for a conversation that has no prompt, or none of this size."""
    messages, param = conversation.messages, conversation.param
    if not messages:
        what, fix = "the conversation has no message", "send a message of the user"
        raise errors.INVALID_MESSAGES(what=what, fix=fix, param=param)
    if conversation.continues and conversation.response is not None:
        raise errors.INVALID_FIELD(
            param=conversation.response_param,
            what="an answer of a given form cannot go on with a message of the assistant",
            why="the form is of the whole answer, and the last message begins it",
            fix="send a last message of another role, or leave out the form of the answer",
        )
    context, bound = limits.context_tokens, limits.context_bound
    requests.check_text_size(sum(map(_text_bytes, messages)), context, bound, param)
    requests.check_text_size(len(conversation.predicted), context, bound, "prediction")


class _Rendered(NamedTuple):
    """A conversation as tokens: all of it, and the others as in `Prompt`. `head`: the messages of
    its heading."""

    tokens: list[int]
    append: list[int]
    append_bare: list[int]
    head: list[dict[str, Any]]


def _rendered(
    conversation: Conversation,
    tools: list[dict[str, Any]] | None,
    text: PromptEncoder,
    called: Mapping[str, str],
    *,
    appends: bool,
) -> _Rendered:
    first, begun = _split(conversation)
    head, rest = first[: conversation.heading], first[conversation.heading :]
    messages, shown = history.prepare(first, tools, text)
    template = history.variables(conversation.template, text)
    added: list[int] = []
    bare: list[int] = []
    if appends:
        later = history.prepare_later(rest, head, tools, text, called)
        added = bare = _begun(append.appended(text, later, shown, template), begun, text)
        if rest and (head or tools):
            later = history.prepare_later(rest, [], None, text, called)
            bare = _begun(append.appended(text, later, shown, template), begun, text)
    if conversation.append_to:  # without that turn the request is refused
        tokens = added
    else:
        tokens = _begun(text.encode_chat(messages, shown, template), begun, text)
    return _Rendered(tokens, added, bare, head)


def _digest(part: list[dict[str, Any]] | None) -> str:
    """A digest of one part of the heading; "" of one that is empty."""
    return hashlib.sha256(msgspec.json.encode(part)).hexdigest()[:16] if part else ""


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as the template gets it."""
    return {key: value for key, value in tool.items() if key != PATTERN}


def _split(conversation: Conversation) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The messages that the template gets, and the one that the answer goes on with."""
    messages = conversation.messages
    if not conversation.continues or not messages:
        return messages, None
    if len(messages) == 1:
        what = "the conversation has no message before that of the assistant"
        fix = "send a message of the user first; POST /v1/completions goes on with plain text"
        raise errors.INVALID_MESSAGES(what=what, param=conversation.param, fix=fix)
    return messages[:-1], messages[-1]


def _begun(tokens: list[int], message: dict[str, Any] | None, text: PromptEncoder) -> list[int]:
    """A prompt and the assistant's message that the answer goes on with."""
    if message is None:
        return tokens
    begun = message["content"]
    if text.markup.writes == "channel":
        return tokens + _begun_channel(message, text, is_inside=in_reasoning(tokens, text))
    if in_reasoning(tokens, text):
        closing = text.markup.reasoning[0][1]
        reasoning = f"{message.get('reasoning_content', '')}\n"
        if text.markup.has_breaks:
            tokens = tokens + _encoded(reasoning, text) + _encoded(closing, text, special=True)
        else:
            begun = f"{reasoning}{closing}\n\n{begun}"
    return tokens + _encoded(begun, text)


def _begun_channel(message: dict[str, Any], text: PromptEncoder, *, is_inside: bool) -> list[int]:
    """A message of the assistant in Harmony up to the end of its text, behind the role or, if
    `is_inside`, the head of its reasoning."""
    tokens: list[int] = []
    reasoning = message.get("reasoning_content", "")
    if reasoning or is_inside:
        opening, closing = text.markup.reasoning[0]
        tokens += [] if is_inside else _encoded(opening, text, special=True)
        tokens += _encoded(reasoning, text)
        tokens += _encoded(f"{closing}{START}assistant", text, special=True)
    return tokens + _encoded(FINAL, text, special=True) + _encoded(message["content"], text)


def _encoded(part: str, text: PromptEncoder, *, special: bool = False) -> list[int]:
    """The tokens of a part of a prompt."""
    return text.encode(part, special=special)[len(text.encode("", special=False)) :]


def _constraint(
    conversation: Conversation, tools: list[dict[str, Any]], tokens: list[int], text: PromptEncoder
) -> tuple[Constraint | None, bool]:
    """The grammar of the answer: its format, and calls that are forced or checked; and whether text
    that begins as a call is one (`core.OutputForm`).

    A JSON schema is of an answer without calls; any other form is of all that the model writes.
    """
    choice, response = conversation.tool_choice, conversation.response
    names = [tool["function"]["name"] for tool in tools]
    if missing := [name for name in choice.names if name not in names]:
        what = f"tool_choice names {missing[0][:64]!r}, which is not among the tools"
        raise errors.INVALID_FIELD(param="tool_choice", what=what, fix="add it to tools")
    required = choice.mode == "required"
    if required and not tools:
        what = "tool_choice asks for a call, and there are no tools"
        raise errors.INVALID_FIELD(param="tool_choice", what=what, fix="send tools")
    strict = any(tool["function"].get("strict") is True for tool in tools)
    calls = None
    has_schema = response is not None and response.kind == "json_schema"
    is_whole = response is not None and not has_schema and not required  # calls included
    if is_whole:
        tools = []
    if tools and (required or choice.names or strict or not choice.parallel or has_schema):
        wanted = choice.names or names
        chosen = [tool for tool in tools if tool["function"]["name"] in wanted]
        calls = grammars.Calls(chosen, required, choice.parallel)
    inside = in_reasoning(tokens, text)
    may_reason = text.reasons and not conversation.continues and not has_reasoned(tokens, text)
    response = None if required else response
    constraint = grammars.constraint_of(
        text.markup,
        text.control_id,
        in_reasoning=inside,
        may_reason=may_reason and not inside,
        calls=calls,
        response=response,
        refuses=choice.mode == "none" and bool(conversation.tools),
        continues=conversation.continues,
    )
    return constraint, calls is not None and response is None


def _end_of(prompt: list[int], text: PromptEncoder) -> str:
    return b"".join(map(text.piece, prompt[-END_TOKENS:])).decode("utf-8", "replace").rstrip()


def in_reasoning(prompt: list[int], text: PromptEncoder) -> bool:
    """Whether a prompt ends with the beginning of reasoning."""
    end = _end_of(prompt, text)
    return any(end.endswith(start) for start, _ in text.markup.reasoning)


def has_reasoned(prompt: list[int], text: PromptEncoder) -> bool:
    """Whether a prompt ends with the end of reasoning."""
    end = _end_of(prompt, text)
    return any(end.endswith(closing) for _, closing in text.markup.reasoning)


def text_parameters(tools: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Names of the parameters that are text, by tool; those of the first tools if there are many,
    as every turn's record holds them."""
    found: dict[str, tuple[str, ...]] = {}
    room = TEXT_PARAMETERS_CHARS_MAX
    for tool in tools:
        fields = object_of(object_of(tool["function"].get("parameters")).get("properties"))
        names = tuple(name for name, schema in fields.items() if _is_text(schema))
        room -= len(tool["function"]["name"]) + sum(map(len, names))
        if room < 0:
            break
        found[tool["function"]["name"]] = names
    return found


def _is_text(schema: object) -> bool:
    """Whether a JSON Schema says that a value is text, or that or null."""
    kind: object = object_of(schema).get("type")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def call_ids(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    """Ids of the calls in the messages, the newest last: a parked session may wait for one of them.

    Only the newest CALLS_MAX count; a value that is no id is left out.
    """
    found: dict[str, None] = {}
    for message in messages:
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        for value in [*(call.get("id") for call in calls), message.get("tool_call_id")]:
            if isinstance(value, str) and 0 < len(value) <= CALL_CHARS_MAX and value.isprintable():
                found.pop(value, None)
                found[value] = None
    return tuple(found)[-CALLS_MAX:]


def _text_bytes(message: dict[str, Any]) -> int:
    return len(message["content"].encode()) + len(message.get("reasoning_content", "").encode())
