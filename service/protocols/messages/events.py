"""Events and whole messages of the Messages protocol.

Owns the blocks of an answer: `_Blocks` makes of the parts both the events of a stream and the
content of a whole message, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, Kind, SlaClass, TokenEvent
from service.protocols.formatter import Formatter, SseEvent
from service.protocols.messages.diagnosis import Miss
from service.protocols.messages.signatures import SHOWN, HiddenReasoning
from service.protocols.openai.envelope import serving_object
from service.protocols.output import (
    CallArguments,
    CallStart,
    OutputPart,
    Reasoning,
    Text,
    call_id_of,
)
from service.protocols.requests import HttpJob

_INVALID = "invalid_request_error"
ERROR_TYPES: dict[Kind, str] = {
    Kind.UNAUTHENTICATED: "authentication_error",
    Kind.FORBIDDEN: "permission_error",
    Kind.NOT_FOUND: "not_found_error",
    Kind.MISSING: "not_found_error",
    Kind.TOO_LARGE: "request_too_large",
    Kind.BUSY: "rate_limit_error",
    Kind.INTERNAL: "api_error",
    Kind.UNAVAILABLE: "overloaded_error",
}  # all others are `_INVALID`
SERVED_TIER = {
    SlaClass.INTERACTIVE: "priority",
    SlaClass.STANDARD: "standard",
    SlaClass.BACKGROUND: "standard",
    SlaClass.BATCH: "batch",
}
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}

# What the SDK's helpers look for in an error, by its code: without a thread they send all messages.
DETAILS: dict[str, dict[str, object]] = {
    errors.THREADS_UNSUPPORTED.code: {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    },
}

PARTIAL = "partial_json"  # name of the arguments of a call that was cut

Chunk = dict[str, Any]
_encode = msgspec.json.Encoder().encode


class Facts(msgspec.Struct, omit_defaults=True):
    """What the formatter needs to know of a request; `HttpJob.echo` holds it as JSON.

    `fills_context`: max_tokens is what the context has left, and less than was asked for.
    `hides_reasoning`: thinking blocks have a signature only. `warms`: no output is wanted.
    `edits`: those of the context that were applied, None = none was asked for.
    `marks`: the end of the message's id, "" = none. `miss`: what changed since an earlier request.
    """

    fills_context: bool = False
    hides_reasoning: bool = False
    warms: bool = False
    edits: list[Chunk] | None = None
    marks: str = ""
    miss: Miss | None = None


class MessagesFormatter(Formatter):
    """One message: its events, or the whole object."""

    def __init__(self, job: HttpJob) -> None:
        super().__init__(job)
        self._facts = msgspec.json.decode(job.echo, type=Facts | None) or Facts()
        self._blocks = _Blocks(job.turn_id, self._facts.hides_reasoning)

    def opening(self) -> list[SseEvent]:
        return [self._event({"type": "message_start", "message": self._message([], None)})]

    def noop(self) -> list[SseEvent]:
        return [self._event({"type": "ping"})]

    def failure(self, error: BatchEngineError) -> list[SseEvent]:
        body = error_object(error, self.job.asked.request_id)
        return [SseEvent(_encode(body), name="error")]

    def _token(self, index: int, event: TokenEvent, parts: Sequence[OutputPart]) -> list[SseEvent]:
        return self._events(self._shown(parts))

    def _skip(self, index: int, parts: Sequence[OutputPart]) -> None:
        for _ in self._shown(parts):
            pass  # the reader has these events

    def _finish(self, index: int, parts: Sequence[OutputPart]) -> list[SseEvent]:
        shown = list(self._shown(parts, ends=True))
        last: Chunk = {
            "type": "message_delta",
            "delta": self._stop(),
            "usage": self._final_usage(),
            **self._added(),
        }
        return self._events([*shown, last, {"type": "message_stop"}])

    def _keep_logprob(self, index: int, event: TokenEvent) -> None:
        raise NotImplementedError  # no field asks for log-probabilities

    def whole(self) -> Iterator[bytes]:
        changes = self._shown(_merged(self.answers[0].parts), ends=True)
        message = self._message(_content(changes), self._stop(), self._final_usage())
        yield _encode(message | self._added())

    def _shown(self, parts: Iterable[OutputPart], *, ends: bool = False) -> Iterator[Chunk]:
        if self._facts.warms:
            return
        for part in parts:
            yield from self._blocks.push(part)
        if ends:
            yield from self._blocks.end()

    def _events(self, changes: Iterable[Chunk]) -> list[SseEvent]:
        return [self._event(change) for change in changes]

    def _event(self, data: Chunk) -> SseEvent:
        event_id = "" if self.ids is None else self.ids.current
        return SseEvent(_encode(data), data["type"], event_id)

    def _id(self) -> str:
        plain = "msg_" + self.job.asked.request_id.removeprefix("req_")
        return f"{plain}_{self._facts.marks}" if self._facts.marks else plain

    def _message(
        self, content: list[Chunk], stop: Chunk | None, usage: Chunk | None = None
    ) -> Chunk:
        return {
            "id": self._id(),
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": content,
            **(stop or self._stop_of(None)),
            "usage": usage or self._usage(len(self.job.requests[0].prompt)),
            "diagnostics": self._diagnostics(),
        }

    def _diagnostics(self) -> Chunk | None:
        if self._facts.miss is None:
            return None
        return {"cache_miss_reason": self._facts.miss.reason(self.answers[0].usage.cached_tokens)}

    def _stop(self) -> Chunk:
        answer = self.answers[0]
        reason = STOP_REASONS.get(answer.finish_reason, "end_turn")
        if answer.cut:  # by the daemon: the client sends the answer back as it is, and it goes on
            reason = "pause_turn"
        if reason == "max_tokens" and self._facts.fills_context:
            reason = "model_context_window_exceeded"
        if reason == "end_turn" and answer.calls and not answer.is_call_cut:
            reason = "tool_use"  # whole calls must have results, whatever ended the text behind
        elif reason == "end_turn" and answer.stop_string:
            reason = "stop_sequence"
        return self._stop_of(reason, answer.stop_string)

    def _stop_of(self, reason: str | None, stop_string: str = "") -> Chunk:
        sequence = stop_string or None
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _final_usage(self) -> Chunk:
        usage = self.answers[0].usage
        return self._usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def _usage(self, prompt: int, cached: int = 0, made: int = 0) -> Chunk:
        """Tokens of the prompt that had KV, and those that had not, add up to the prompt.

        Some clients keep a number of the opening where the last one is 0, so `input_tokens` is
        never less there than here.
        """
        computed = prompt - cached
        warms = self._facts.warms
        reasoning = self.answers[0].reasoning_tokens
        return {
            "input_tokens": 0 if warms else computed,
            "cache_creation_input_tokens": computed if warms else 0,
            "cache_read_input_tokens": cached,
            "output_tokens": 0 if warms else made,
            "output_tokens_details": {"thinking_tokens": 0 if warms else reasoning},
            "service_tier": SERVED_TIER[self.job.asked.sla.sla_class],
        }

    def _added(self) -> Chunk:
        """Fields of the last event, or of the whole message, that some requests ask for."""
        added: Chunk = {"batchengine": serving_object(self.job, self.answers)}
        if self._facts.edits is not None:
            added["context_management"] = {"applied_edits": self._facts.edits}
        return added


class _Blocks:
    """The content blocks of one answer, as the events that build them."""

    def __init__(self, turn_of: Callable[[], str], hides_reasoning: bool) -> None:
        self._turn_of = turn_of
        self._hides_reasoning = hides_reasoning
        self._index = -1
        self._open = ""  # type of the open block
        self._hidden: HiddenReasoning | None = None

    def push(self, part: OutputPart) -> Iterator[Chunk]:
        """The events of one more part."""
        match part:
            case Text(text):
                if self._open != "text":
                    yield from self._begin({"type": "text", "text": ""})
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                if self._open != "thinking":
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    self._hidden = HiddenReasoning() if self._hides_reasoning else None
                if self._hidden is None:
                    yield self._delta("thinking_delta", thinking=text)
                else:
                    self._hidden.push(text)
            case CallStart(call, name):
                call_id = call_id_of(self._turn_of(), call, "toolu_")
                block: Chunk = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._begin(block)
            case CallArguments(_, json):
                yield self._delta("input_json_delta", partial_json=json)

    def end(self) -> Iterator[Chunk]:
        """The events that end the open block; of an answer without any block, an empty text."""
        if self._index < 0:
            yield from self._begin({"type": "text", "text": ""})
        yield from self._close()

    def _begin(self, block: Chunk) -> Iterator[Chunk]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Chunk]:
        if not self._open:
            return
        if self._open == "thinking":
            signature = SHOWN if self._hidden is None else self._hidden.signature()
            yield self._delta("signature_delta", signature=signature)
        self._open = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, kind: str, **change: str) -> Chunk:
        delta = {"type": kind, **change}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _merged(parts: Iterable[OutputPart]) -> Iterator[OutputPart]:
    """The same parts with neighbours of one kind joined."""
    texts: list[str] = []
    kind: type[Text | Reasoning] = Text
    for part in parts:
        if texts and not isinstance(part, kind):
            yield kind("".join(texts))
            texts = []
        if isinstance(part, Text | Reasoning):
            kind = type(part)
            texts.append(part.text)
        else:
            yield part
    if texts:
        yield kind("".join(texts))


def _content(changes: Iterable[Chunk]) -> list[Chunk]:
    """The blocks that the events of a whole answer build."""
    content: list[Chunk] = []
    texts: list[str] = []
    for change in changes:
        if change["type"] == "content_block_start":
            content.append(change["content_block"])
            texts = []
        elif change["type"] == "content_block_stop":
            block, text = content[-1], "".join(texts)
            kind = block["type"]
            block["input" if kind == "tool_use" else kind] = (
                _input(text) if kind == "tool_use" else text
            )
        elif change["delta"]["type"] == "signature_delta":
            content[-1]["signature"] = change["delta"]["signature"]
        else:
            texts += [value for name, value in change["delta"].items() if name != "type"]
    return content


def _input(text: str) -> object:
    """The arguments of a call; of one that was cut short, their text under a name of its own."""
    try:
        value: object = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {PARTIAL: text}
    return msgspec.Raw(text.encode() or b"{}") if isinstance(value, dict) else {PARTIAL: text}


def error_object(error: BatchEngineError, request_id: str = "") -> dict[str, object]:
    """Anthropic's error object, with fields of the catalogue's row beside the message."""
    message = str(error)
    asked, most = (int(error.details.get(name, 0)) for name in ("n_prompt_tokens", "n_ctx"))
    if error.code == errors.PROMPT_TOO_LONG.code and asked >= most:
        # Claude Code looks for these words and numbers
        message = f"prompt is too long: {asked} tokens > {min(most, asked - 1)} maximum"
    body: Chunk = {
        "type": ERROR_TYPES.get(error.kind, _INVALID),
        "message": message,
        "param": error.param,
        "code": error.name,
        "batchengine_code": error.code,
        "fix": error.fix,
    }
    body |= error.details
    if error.code in DETAILS:
        body["details"] = DETAILS[error.code]
    return {"type": "error", "error": body, "request_id": request_id or None}
