"""Events of a generation as the stream or the whole object of OpenAI Responses.

Owns the response object: the fields of its request, its items, its status and usage.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, DoneEvent, Kind, PastTurn, TokenEvent
from service.protocols.formatter import Formatter, SseEvent
from service.protocols.openai.envelope import (
    LATER,
    Chunk,
    joined,
    logprob_item,
    serving_object,
    timings_object,
)
from service.protocols.output import OutputPart
from service.protocols.requests import NOTHING, HttpJob
from service.protocols.responses.output import OutputItems
from service.protocols.responses.tools import ToolNames

ID_PREFIX = "resp_"
TURN_PREFIX = "req_"  # of a request's id, which is its turn's
STATUS = {  # of a finish reason; of any other one "failed"
    "stop": "completed",
    "tool_calls": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
}

_encode = msgspec.json.Encoder().encode


class Echo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer repeats or needs of its request; JSON, as `Prompt.echo` carries it. `input` is
    the input of a response that is stored, as `past_items.kept_input` packs it."""

    fields: dict[str, msgspec.Raw] = {}
    names: ToolNames = ToolNames()
    encrypts: bool = False
    created: int = 0  # seconds since the epoch
    warms: bool = False  # no output is wanted
    summarises: bool = False  # reasoning is shown as its summary
    input: str = ""


def response_id(turn_id: str) -> str:
    """The id of the response that a turn makes."""
    return ID_PREFIX + turn_id.removeprefix(TURN_PREFIX)


def turn_id_of(given: str) -> str:
    """The turn of a response's id."""
    return TURN_PREFIX + given.removeprefix(ID_PREFIX)


def echo_of(data: bytes) -> Echo:
    """The `Echo` of a job; an empty one of a job that has none."""
    return Echo() if data == NOTHING else msgspec.json.decode(data, type=Echo)


def head(job: HttpJob, turn_id: str, echo: Echo) -> Chunk:
    """A response that has not ended: all of it but status, output and usage."""
    fields: Chunk = {
        "id": response_id(turn_id),
        "object": "response",
        "created_at": echo.created or job.created,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": job.model,
        "output": [],
        **echo.fields,
        "service_tier": job.service_tier or "default",
        "usage": None,
    }
    return fields


def ended(status: str, ended_s: int) -> Chunk:
    """The fields of a response that ended with this status, at this time if that is known."""
    fields: Chunk = {"status": status}
    if status == "completed":
        fields["completed_at"] = ended_s or None
    elif status == "incomplete":
        fields["incomplete_details"] = {"reason": "max_output_tokens"}
    elif status == "failed":
        why = "the daemon stopped in the middle of this answer; send the request again"
        fields["error"] = {"code": "server_error", "message": why}
    return fields


def usage_object(prompt: int, cached: int, made: int, reasoning: int) -> Chunk:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + made,
    }


def error_fields(error: BatchEngineError) -> Chunk:
    """The error of a response that failed. Clients know few codes, and retry `server_error`."""
    is_wrong = error.kind in (Kind.INVALID, Kind.TOO_LARGE, Kind.CONFLICT)
    code = error.name if is_wrong else "server_error"
    return {"code": code, "message": str(error), "batchengine_code": error.code}


class ResponsesFormatter(Formatter):
    """Events with `sequence_number`, or one response object."""

    is_fetched = True

    def __init__(self, job: HttpJob, first: int = 0, past: PastTurn | None = None) -> None:
        """Events before number `first` are not sent: the client has them.

        `past`: the turn of a stored response that has ended; None = its end is to come.
        """
        super().__init__(job)
        self._first, self._past = first, past
        self._echo = echo_of(job.echo)
        self._warms = self._echo.warms
        self._sent = 0  # events
        self._early: list[bytes] = []  # log-probabilities of tokens whose text is held back

    # ---- streams ----

    def opening(self) -> list[SseEvent]:
        names = ("response.created", "response.in_progress")
        return self._events([{"type": name, "response": self._head} for name in names])

    def begun(self, status: str) -> bytes:
        """The whole object of a response that has not ended."""
        return _encode(self._head | {"status": status})

    def noop(self) -> list[SseEvent]:
        """The second event once more, as comments do not reset the watchdog of every client."""
        self._sent -= 1
        return self._events([{"type": "response.in_progress", "response": self._head}])

    def failure(self, error: BatchEngineError) -> list[SseEvent]:
        chunks = self._items.close("incomplete")
        name, fields = "failed", {"status": "failed", "error": error_fields(error)}
        if error.code == errors.CANCELLED.code:  # as `_cancel` of the routes answers
            name, fields = "incomplete", ended("cancelled", 0)
        response = self._head | fields | {"output": self._items.done}
        chunks.append({"type": f"response.{name}", "response": response})
        return self._last_events(chunks)

    def _token(self, index: int, event: TokenEvent, parts: Sequence[OutputPart]) -> list[SseEvent]:
        if self._warms:
            return []
        if event.logprob is not None:
            self._early.append(_encode(logprob_item(event)))
        return self._events(self._push(parts))

    def _skip(self, index: int, parts: Sequence[OutputPart]) -> None:
        self._sent += len(self._items.push(parts, []))

    def _finish(self, index: int, parts: Sequence[OutputPart]) -> list[SseEvent]:
        chunks = [] if self._warms else self._push(parts, is_last=True)
        status = self._status()
        chunks += self._items.close("completed" if status == "completed" else "incomplete")
        response = self._ended(status)
        name = "incomplete" if status == "cancelled" else status  # which has no event of its own
        chunks.append({"type": f"response.{name}", "response": response})
        return self._last_events(chunks)

    # ---- whole answers ----

    def _keep_logprob(self, index: int, event: TokenEvent) -> None:
        self._early.append(_encode(logprob_item(event)))

    def collect(self, index: int, event: TokenEvent | DoneEvent) -> None:
        answer = self.answers[0]
        super().collect(index, event)
        if not self._warms:
            self._push(answer.parts, is_last=isinstance(event, DoneEvent))
        answer.parts.clear()

    def whole(self) -> Iterator[bytes]:
        status = self._status()
        self._items.close("completed" if status == "completed" else "incomplete")
        messages = [item for item in self._items.done if item["type"] == "message"]
        for item in messages:
            item["content"] = [{**item["content"][0], "logprobs": LATER}]
        response = self._ended(status)
        if self._past is not None:  # nothing recorded these
            del response["timings"], response["batchengine"]
        start, *rest = _encode(response).split(b"\0")
        yield start
        for logprobs, after in zip(self._items.logprobs, rest, strict=True):
            yield from joined(logprobs)
            yield after

    # ---- inner ----

    def _push(self, parts: Sequence[OutputPart], *, is_last: bool = False) -> list[Chunk]:
        """The events of parts: log-probabilities of tokens that showed nothing stand with the next
        text of their message. Reasoning and calls have none."""
        chunks, items = self._items.push(parts, self._early), self._items
        if items.kind == "message" and is_last:
            items.logprobs[-1] += self._early
        if items.kind and (is_last or items.kind != "message"):
            self._early.clear()
        return chunks

    @cached_property
    def _turn_id(self) -> str:
        """The turn that names the response and its items: read when a client first sees it, since
        a request may repeat an earlier turn."""
        return self.job.turn_id()

    @cached_property
    def _head(self) -> Chunk:
        return head(self.job, self._turn_id, self._echo)

    @cached_property
    def _items(self) -> OutputItems:
        echo, turn = self._echo, self._turn_id.removeprefix(TURN_PREFIX)
        return OutputItems(turn, echo.names, encrypts=echo.encrypts, summarises=echo.summarises)

    def _status(self) -> str:
        answer = self.answers[0]
        status = STATUS.get(answer.cut or answer.finish_reason, "failed")
        return "completed" if self._warms and status == "incomplete" else status

    def _usage(self, prompt: int, cached: int, made: int) -> Chunk:
        made = 0 if self._warms else made
        return usage_object(prompt, cached, made, min(made, self.answers[0].reasoning_tokens))

    def _ended(self, status: str) -> Chunk:
        usage, ended_s = self.answers[0].usage, int(time.time())
        cached = usage.cached_tokens
        if self._past is not None:  # not those of the request that asks for it again
            ended_s, cached = self._past.ended_s, self._past.cached_tokens
        return {
            **self._head,
            **ended(status, ended_s),
            "output": self._items.done,
            "usage": self._usage(usage.prompt_tokens, cached, usage.completion_tokens),
            "timings": timings_object(self.answers),
            "batchengine": serving_object(self.job, self.answers),
        }

    def _events(self, chunks: list[Chunk]) -> list[SseEvent]:
        began = self._sent
        events = [self._event(chunk) for chunk in chunks]
        return events[max(0, self._first - began) :]

    def _last_events(self, chunks: list[Chunk]) -> list[SseEvent]:
        """At least the last one, whatever the client says to have: no stream is without an end."""
        *before, last = chunks
        return [*self._events(before), self._event(last)]

    def _event(self, chunk: Chunk) -> SseEvent:
        name = str(chunk["type"])
        data = _encode({"type": name, "sequence_number": self._sent, **chunk})
        self._sent += 1
        return SseEvent(data, name, "" if self.ids is None else self.ids.current)
