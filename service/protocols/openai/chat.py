"""POST /v1/chat/completions: messages in, OpenAI chat objects and chunks out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import msgspec

from batchengine import errors
from batchengine.core import FORM_CHAT, TokenEvent
from batchengine.text.messages import ROLES
from service.protocols import conversation
from service.protocols.conversation import Conversation
from service.protocols.formatter import Answer
from service.protocols.openai import formats, tools
from service.protocols.openai.custom_tools import CustomInput, custom_input
from service.protocols.openai.envelope import Chunk, OpenAIFormatter, error_object, logprob_item
from service.protocols.output import (
    CallArguments,
    CallStart,
    OutputPart,
    Reasoning,
    Text,
    arguments_of,
    call_id_of,
    calls_of,
    plain_text,
    reasoning_text,
)
from service.protocols.protocol import PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import NOTHING, HttpJob, Prompt
from service.protocols.schema import EFFORTS, ChatRequest, openai_fields, tokens_asked

# echo of a request with `functions` instead of tools; of one with custom tools it is their names
LEGACY = b'"functions"'
_encode, _names = msgspec.json.Encoder().encode, msgspec.json.Decoder(tuple[str, ...]).decode
REASONING_NAMES = ("reasoning_content", "reasoning", "reasoning_text")


def check(body: ChatRequest) -> None:
    """Raises 400 for fields that would change the answer and are not implemented."""
    if body.top_logprobs is not None and not body.logprobs:
        what, fix = "top_logprobs needs logprobs: true", "set logprobs to true"
        raise errors.INVALID_FIELD(param="top_logprobs", what=what, fix=fix)


def read_prompt(body: ChatRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of the conversation; raises 400."""
    return conversation.read(_conversation(body), text, limits)


def _conversation(body: ChatRequest) -> Conversation:
    offered = tools.tools_of(body)
    echo = LEGACY if body.tools is None and body.functions is not None else NOTHING
    media = dict[str, None]()  # kinds of parts of results that are not read
    messages = [_message(message, index, media) for index, message in enumerate(body.messages)]
    continues = _continues(body)
    others = (index for index, one in enumerate(messages) if one["role"] != "system")
    return Conversation(
        messages=messages,
        tools=offered.functions,
        tool_choice=tools.choice_of(body),
        response=formats.constraint_of(body),
        continues=continues,
        template=_kwargs(body, continues=continues),
        tokens_max=tokens_asked(body.max_completion_tokens, body.max_tokens, body.n_predict),
        logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        echo=_encode(offered.custom) if offered.custom else echo,
        heading=next(others, len(messages)),
        unread=tuple(dict.fromkeys((*_unread(body, media), *offered.unread))),
        predicted=_predicted(body),
    )


def _unread(body: ChatRequest, media: Iterable[str]) -> Iterator[str]:
    """Names of fields that are accepted and change nothing."""
    yield from (f"tool.{kind}" for kind in media)
    if (body.prompt_cache_options or {}).get("prewarm") is not None:
        yield "prompt_cache_options.prewarm"  # of Responses only


def _predicted(body: ChatRequest) -> str:
    """The text that the client expects of the answer. Raises 400."""
    if (given := body.prediction) is None:
        return ""
    if given.get("type") != "content":
        what, fix = "prediction.type is not content", 'send {"type": "content", "content": "…"}'
        raise errors.INVALID_FIELD(param="prediction.type", what=what, fix=fix)
    return conversation.text_of(given.get("content") or "", "prediction.content")


def _continues(body: ChatRequest) -> bool:
    """Whether the answer goes on with the last message: one of the assistant that is text, unless
    the client says that it does not. Raises 400 where the client says so of another message."""
    last, asked = body.messages[-1], body.continue_final_message
    if last.get("role") != "assistant" or last.get("tool_calls") or last.get("function_call"):
        if asked:
            raise errors.INVALID_FIELD(
                param="continue_final_message",
                what="continue_final_message goes on with a text of the assistant",
                why="the last message is none",
                fix="put that text last, or leave out continue_final_message",
            )
        return False
    return body.add_generation_prompt is not True if asked is None else asked


def _message(message: dict[str, Any], index: int, media: dict[str, None]) -> dict[str, Any]:
    """One message as templates expect it: known fields only, text content as one string."""
    where = f"messages[{index}]"
    role = message.get("role")
    if role == "function":  # of the form with `functions`: its name stands for the call's id
        message = {**message, "role": "tool", "tool_call_id": message.get("name")}
        role = "tool"
    if not isinstance(role, str) or role not in ROLES:
        what, fix = f"{where}.role is missing or unknown", "use " + ", ".join(ROLES)
        raise errors.INVALID_FIELD(param=f"{where}.role", what=what, fix=fix)
    clean: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    if content is None and role == "assistant":  # only tool calls, or an empty turn
        content = ""
    read = media if role == "tool" else None
    clean["content"] = conversation.text_of(content, f"{where}.content", read)
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                param = f"{where}.{name}"
                raise errors.INVALID_FIELD(param=param, what=f"{param} must be a string")
            clean[name] = message[name]
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), dict):
        function: dict[str, Any] = message["function_call"]
        calls = [{"id": function.get("name"), "type": "function", "function": function}]
    if calls is not None:
        where = f"{where}.tool_calls"
        clean["tool_calls"] = tools.calls_of(_objects(calls, where), where)
    for name in REASONING_NAMES:
        if isinstance(message.get(name), str):
            clean["reasoning_content"] = message[name]
            break
    return clean


def _objects(value: object, param: str) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or len(items) > 512 or not all(isinstance(item, dict) for item in items):
        what = f"{param} must be a list of at most 512 objects"
        raise errors.INVALID_FIELD(param=param, what=what)
    return cast("list[dict[str, Any]]", items)


def _kwargs(body: ChatRequest, *, continues: bool) -> dict[str, Any]:
    """Arguments of the template beside the messages; a template may ignore them. `continues`: the
    beginning of an answer stands in front of the last message, whatever the client says."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        if name == "enable_thinking" and isinstance(value, bool):
            continue
        if name == "reasoning_effort" and value in EFFORTS:
            continue
        what, fix = f"the template argument {name[:64]!r} cannot be set", "leave it out"
        if name == "enable_thinking":
            what, fix = "enable_thinking has a wrong value", "send true or false"
        if name == "reasoning_effort":
            what, fix = "reasoning_effort has a wrong value", f"send one of {', '.join(EFFORTS)}"
        raise errors.INVALID_FIELD(
            param=f"chat_template_kwargs.{name[:64]}",
            what=what,
            why="only enable_thinking, to true or false, and reasoning_effort can be set",
            fix=fix,
        )
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = body.reasoning_effort
    if given.get("reasoning_effort") == "none":
        given.setdefault("enable_thinking", False)
    if body.add_generation_prompt is False and not continues:
        given["add_generation_prompt"] = False
    return given


class CustomCall(NamedTuple):
    """A call of a custom tool that grows."""

    call: int
    reader: CustomInput


class ChatFormatter(OpenAIFormatter):
    """Chat chunks and the whole chat object."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    content_field = "delta"
    logprob_lists = ("content",)
    opening_content: ClassVar[object] = {"role": "assistant", "content": ""}
    empty_content: ClassVar[object] = {}

    def __init__(self, job: HttpJob) -> None:
        super().__init__(job)
        self._custom = () if job.echo in (LEGACY, NOTHING) else _names(job.echo)
        self._inputs: dict[int, CustomCall] = {}  # the call that grows, by choice

    def _token_chunks(
        self, index: int, event: TokenEvent, parts: Sequence[OutputPart]
    ) -> list[Chunk]:
        logprobs = self._token_logprobs(index, event)
        # one chunk, since a reader that goes on behind its id has all of the token
        deltas = [delta for part in parts or (Text(""),) for delta in self._deltas(index, part)]
        return [self._chunk(index, _joined(deltas), logprobs=logprobs)]

    def _skip(self, index: int, parts: Sequence[OutputPart]) -> None:
        for part in parts:
            self._deltas(index, part)

    def _finish_chunks(self, index: int, parts: Sequence[OutputPart]) -> list[Chunk]:
        deltas = [delta for part in parts for delta in self._deltas(index, part)]
        if self.ids is None or not self.answers[index].cut:  # else a reader may go on
            deltas += self._rest(index)
        chunks = [self._chunk(index, delta) for delta in deltas]
        return [*chunks, self._chunk(index, {}, self._finish_reason(index))]

    def _finish_reason(self, index: int) -> str:
        answer = self.answers[index]
        if not answer.calls or answer.finish_reason != "stop" or answer.is_call_cut:
            return answer.finish_reason
        return "function_call" if self.job.echo == LEGACY else "tool_calls"

    def _deltas(self, index: int, part: OutputPart) -> list[Chunk]:
        """What a part adds to the message, behind what is left of a custom tool's call before."""
        if isinstance(part, CallArguments):
            if (growing := self._inputs.get(index)) is None:
                return [self._delta(index, part)]
            return _more_input(growing.call, growing.reader.push(part.json))
        deltas = self._rest(index)
        if isinstance(part, CallStart) and part.name in self._custom:
            self._inputs[index] = CustomCall(part.call, CustomInput())
        return [*deltas, self._delta(index, part)]

    def _rest(self, index: int) -> list[Chunk]:
        """The end of the input of a custom tool's call, which is over."""
        growing = self._inputs.pop(index, None)
        return [] if growing is None else _more_input(growing.call, growing.reader.flush())

    def _delta(self, index: int, part: OutputPart) -> Chunk:
        match part:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return dict.fromkeys(self.job.reasoning_fields, text)
            case CallStart(_, name) if self.job.echo == LEGACY:
                return {"function_call": {"name": name, "arguments": ""}}
            case CallArguments(_, text) if self.job.echo == LEGACY:
                return {"function_call": {"arguments": text}}
            case CallStart(call, name):
                return {"tool_calls": [{"index": call, **self._call(index, call, name)}]}
            case CallArguments(call, text):
                return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}

    def _call(self, index: int, call: int, name: str, arguments: str = "") -> Chunk:
        call_id = call_id_of(self.job.turn_id(index), call)
        if name in self._custom:
            custom = {"name": name, "input": custom_input(arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _choice(self, index: int, answer: Answer) -> Chunk:
        parts = answer.parts
        calls = [
            self._call(index, call, name, arguments)
            for (call, name), arguments in zip(calls_of(parts), arguments_of(parts), strict=True)
        ]
        text = plain_text(parts)
        message: Chunk = {
            "role": "assistant",
            "content": None if calls and not text else text,
            "refusal": None,
        }
        if reasoning := reasoning_text(parts):
            message |= dict.fromkeys(self.job.reasoning_fields, reasoning)
        if calls and self.job.echo == LEGACY:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        return {
            "index": index,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish_reason(index),
        }

    def _logprob_items(self, index: int, event: TokenEvent) -> tuple[object, ...]:
        return (logprob_item(event),)

    def _logprobs(self, lists: Chunk) -> Chunk:
        return lists | {"refusal": None}


def _more_input(call: int, text: str) -> list[Chunk]:
    return [{"tool_calls": [{"index": call, "custom": {"input": text}}]}] if text else []


def _joined(deltas: Iterable[Chunk]) -> Chunk:
    """One delta that says what several in a row say."""
    made: dict[str, Any] = {}
    for delta in deltas:
        for name, value in cast("dict[str, Any]", delta).items():
            if name not in made:
                made[name] = value
            elif name == "tool_calls":
                last, new = made[name][-1], value[0]
                field, text = ("custom", "input") if "custom" in new else ("function", "arguments")
                if last["index"] == new["index"]:
                    last[field][text] += new[field][text]
                else:
                    made[name].append(new)
            elif name == "function_call":
                made[name]["arguments"] += value["arguments"]
            else:
                made[name] += value
    return made


CHAT = Protocol(
    name=FORM_CHAT,
    routes=("/v1/chat/completions",),
    body=ChatRequest,
    check=check,
    read_prompt=read_prompt,
    formatter=ChatFormatter,
    error=error_object,
    common=openai_fields,
    count_route="/v1/chat/completions/input_tokens",
)
