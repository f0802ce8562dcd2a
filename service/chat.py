"""POST /v1/chat/completions: messages in, OpenAI chat objects and chunks out."""

from __future__ import annotations

from typing import Any, cast

from batchengine.core import DoneEvent, TokenEvent, TokenLogprob
from service import errors, work
from service.door import Engine
from service.schema import ChatRequest
from service.shape import Answer, Shape, logprob_number
from service.strict_json import off_loop
from service.work import Job

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
REASONING_NAMES = ("reasoning_content", "reasoning", "reasoning_text")
CALLS_MAX = 64  # tool calls of one conversation that are looked up
CALL_CHARS_MAX = 256
KWARGS = {"enable_thinking": bool}  # what a client may tell a template (RELIABILITY R15)


async def prepare(
    job: Job, body: ChatRequest, engine: Engine, tokens_max_default: int
) -> ChatShape:
    """Tokens of the conversation into `job.requests`; raises 400."""
    context = engine.info.context_tokens
    messages, text_bytes, calls = await off_loop(job.body_bytes, _messages, body.messages)
    work.check_text_size(text_bytes, context, "messages")
    job.wishes.tool_call_ids = calls
    tools = None if body.tool_choice == "none" else _tools(body.tools)
    prompt = await engine.text.encode_chat(messages, tools, _kwargs(body))
    work.check_prompt(prompt, context, "messages")
    tokens_max = body.max_completion_tokens or body.max_tokens
    if tokens_max is None:  # the default must never be the reason for refusing a prompt that fits
        tokens_max = min(tokens_max_default, context - len(prompt))
    work.fill(job, body, [prompt], tokens_max, engine)
    return ChatShape(job)


def _messages(
    messages: list[dict[str, Any]],
) -> tuple[list[dict[str, Any]], int, tuple[str, ...]]:
    """Messages as templates know them, the bytes of their text, and the tool calls in them."""
    clean = [_message(message, index) for index, message in enumerate(messages)]
    return clean, sum(map(_text_bytes, clean)), _tool_calls(clean)


def _tool_calls(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    """Ids of the calls in the messages, the newest last: one of them may be what a session awaits.

    Of many only the newest count; what is no id is no reason to refuse a conversation.
    """
    found: dict[str, None] = {}
    for message in messages:
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        for value in [*(call.get("id") for call in calls), message.get("tool_call_id")]:
            if isinstance(value, str) and 0 < len(value) <= CALL_CHARS_MAX and value.isprintable():
                found.pop(value, None)
                found[value] = None
    return tuple(found)[-CALLS_MAX:]


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    """One message as templates know it: known fields only, text content as one string."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise errors.invalid_field(
            f"{where}.role", f"{where}.role is missing or unknown", fix="use " + ", ".join(ROLES)
        )
    clean: dict[str, Any] = {"role": "system" if role == "developer" else role}
    clean["content"] = _content(message, role, where)
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise errors.invalid_field(f"{where}.{name}", f"{where}.{name} must be a string")
            clean[name] = message[name]
    calls = message.get("tool_calls")
    if calls is not None:
        clean["tool_calls"] = _objects(calls, f"{where}.tool_calls")
    for name in REASONING_NAMES:
        if isinstance(message.get(name), str):
            clean["reasoning_content"] = message[name]
            break
    return clean


def _content(message: dict[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # only tool calls, or an empty turn
        return ""
    if not isinstance(content, list):
        raise errors.invalid_field(
            f"{where}.content",
            f"{where}.content is missing or neither text nor a list of text parts",
            fix="send a string",
        )
    texts: list[str] = []
    for number, part in enumerate(cast("list[object]", content)):
        param = f"{where}.content[{number}]"
        if not isinstance(part, dict):
            raise errors.invalid_field(param, f"{param} must be an object")
        fields = cast("dict[str, object]", part)
        kind = fields.get("type")
        text = fields.get("refusal" if kind == "refusal" else "text")
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise errors.invalid_field(
                f"{param}.type",
                f"{param} is not a text part",
                why="this daemon reads text only",
                fix='send {"type": "text", "text": "…"}',
            )
        texts.append(text)
    return "\n".join(texts)


def _objects(value: object, param: str) -> list[dict[str, Any]]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or len(items) > 512 or not all(isinstance(item, dict) for item in items):
        raise errors.invalid_field(param, f"{param} must be a list of at most 512 objects")
    return cast("list[dict[str, Any]]", items)


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for index, tool in enumerate(tools or []):
        function: object = tool.get("function")
        named = isinstance(function, dict) and isinstance(
            cast("dict[str, object]", function).get("name"), str
        )
        if tool.get("type") != "function" or not named:
            raise errors.invalid_field(
                f"tools[{index}]",
                f"tools[{index}] is not a function with a name",
                fix='send {"type": "function", "function": {"name": "…", "parameters": {…}}}',
            )
    return tools or None


def _kwargs(body: ChatRequest) -> dict[str, Any]:
    """What the template hears beside the messages; whether it listens is the model's affair."""
    given = dict(body.chat_template_kwargs or {})
    for name, value in given.items():
        if name not in KWARGS or not isinstance(value, KWARGS[name]):
            raise errors.invalid_field(
                f"chat_template_kwargs.{name[:64]}",
                "this template argument is not allowed, or has the wrong type",
                fix="only enable_thinking: true or false may be set",
            )
    if body.reasoning_effort is not None:
        given["reasoning_effort"] = body.reasoning_effort
    return given


def _text_bytes(message: dict[str, Any]) -> int:
    return len(message["content"].encode()) + len(message.get("reasoning_content", "").encode())


class ChatShape(Shape):
    """Chat chunks and the whole chat object."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "chatcmpl-" + job.request_id.removeprefix("req_"))

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        return self.envelope("chat.completion.chunk", choices)

    def _choice(
        self,
        index: int,
        delta: dict[str, object],
        finish_reason: str | None = None,
        logprobs: dict[str, object] | None = None,
    ) -> dict[str, object]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def first(self, index: int) -> dict[str, object]:
        return self._chunk([self._choice(index, {"role": "assistant", "content": ""})])

    def noop(self) -> dict[str, object]:
        return self._chunk([self._choice(0, {})])

    def token(self, index: int, event: TokenEvent) -> dict[str, object] | None:
        if not event.text and event.logprob is None:
            return None
        logprobs: dict[str, object] | None = None
        if event.logprob is not None:
            logprobs = {"content": [_entry(event)], "refusal": None}
        delta: dict[str, object] = {"content": event.text}
        return self._chunk([self._choice(index, delta, logprobs=logprobs)])

    def finish(self, index: int, event: DoneEvent) -> list[dict[str, object]]:
        chunks: list[dict[str, object]] = []
        if event.text:
            chunks.append(self._chunk([self._choice(index, {"content": event.text})]))
        chunks.append(self._chunk([self._choice(index, {}, event.finish_reason)]))
        return chunks

    def usage_chunk(self, answers: list[Answer]) -> dict[str, object]:
        return self._chunk([])

    def whole(self, answers: list[Answer]) -> dict[str, object]:
        choices: list[dict[str, object]] = []
        for index, answer in enumerate(answers):
            entries = [_entry(event) for event in answer.events if event.logprob is not None]
            wanted = self.job.requests[index].sampling.logprobs >= 0
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": {"content": entries, "refusal": None} if wanted else None,
                    "finish_reason": answer.finish_reason,
                }
            )
        return self.with_facts(self.envelope("chat.completion", choices), answers)


def _entry(event: TokenEvent) -> dict[str, object]:
    assert event.logprob is not None  # callers look first
    return _logprob(event.logprob) | {"top_logprobs": [_logprob(one) for one in event.top]}


def _logprob(one: TokenLogprob) -> dict[str, object]:
    return {
        "token": one.text.decode("utf-8", "replace"),
        "logprob": logprob_number(one.logprob),
        "bytes": list(one.text),
    }
