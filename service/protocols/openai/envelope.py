"""The common parts of chat and completions: OpenAI's envelope, usage, error object, and more."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec

from batchengine.core import BatchEngineError, Found, Kind, TokenEvent, TokenLogprob
from service.protocols.formatter import Answer, Formatter, SseEvent
from service.protocols.output import OutputPart
from service.protocols.requests import HttpJob, derived_seed
from service.session_ids import is_kept

LOGPROB_MIN = -9999.0  # JSON has no minus infinity; OpenAI's servers send this number
DONE = SseEvent(b"[DONE]")  # ends every stream that does not fail

_INVALID = "invalid_request_error"
ERROR_TYPES: dict[Kind, str] = {
    Kind.UNAUTHENTICATED: "authentication_error",
    Kind.FORBIDDEN: "permission_error",
    Kind.NOT_FOUND: "not_found_error",
    Kind.BUSY: "rate_limit_error",
    Kind.INTERNAL: "server_error",
    Kind.UNAVAILABLE: "server_error",
}  # all others are `_INVALID`

Chunk = dict[str, object]

_encoder = msgspec.json.Encoder()
LATER = msgspec.Raw(b"[\0]")  # a list that is sent item by item: JSON has no NUL elsewhere
HISTORY_MISSING = (
    "the session has earlier turns, and these messages hold none of them: send the whole"
    ' conversation, or set "batchengine": {"append": true}'
)
LIST_ITEMS = 32  # of such a list in one part; of up to 4 KiB each


class OpenAIFormatter(Formatter):
    """One JSON chunk per event. A protocol defines the content of its choices and its names."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]  # of a chunk, as its field `object`
    whole_object: ClassVar[str]
    content_field: ClassVar[str]  # of a chunk's choice
    logprob_lists: ClassVar[tuple[str, ...]]  # of a choice, with one item per token
    opening_content: ClassVar[object]  # of the first chunk
    empty_content: ClassVar[object]

    def __init__(self, job: HttpJob) -> None:
        super().__init__(job)
        self._object_id = self.id_prefix + job.asked.request_id.removeprefix("req_")

    def opening(self) -> list[SseEvent]:
        chunks = (self._chunk(index, self.opening_content) for index in range(len(self.answers)))
        return [self._event(chunk) for chunk in chunks]

    def noop(self) -> list[SseEvent]:
        return [self._event(self._chunk(0, self.empty_content))]

    def failure(self, error: BatchEngineError) -> list[SseEvent]:
        return [SseEvent(_encoder.encode(error_object(error)), name="error")]

    def _token(self, index: int, event: TokenEvent, parts: Sequence[OutputPart]) -> list[SseEvent]:
        return [self._event(chunk) for chunk in self._token_chunks(index, event, parts)]

    def _finish(self, index: int, parts: Sequence[OutputPart]) -> list[SseEvent]:
        chunks = self._finish_chunks(index, parts)
        if not self.is_done:
            return [self._event(chunk) for chunk in chunks]
        return [*(self._event(chunk) for chunk in self._with_closing(chunks)), DONE]

    def whole(self) -> Iterator[bytes]:
        body = self._with_facts(self._envelope(self.whole_object, LATER))
        head, tail = _encoder.encode(body).split(b"\0")
        yield head
        for shown, index in enumerate(self._shown()):
            answer = self.answers[index]
            choice = self._choice(index, answer) | {"index": shown}
            lists = [name for name, value in choice.items() if value is LATER]
            if self._shows_logprobs(index):
                choice["logprobs"] = self._logprobs(dict.fromkeys(self.logprob_lists, LATER))
                lists = [*self.logprob_lists, *lists]
            start, *rest = _encoder.encode(choice).split(b"\0")
            yield b"," + start if shown else start
            for name, after in zip(lists, rest, strict=True):
                yield from joined(answer.logprobs.get(name, []))
                yield after
        yield tail

    def _shown(self) -> list[int]:
        """The choices that a whole answer has, in its order."""
        return list(range(len(self.answers)))

    def _shows_logprobs(self, index: int) -> bool:
        """Whether a choice of a whole answer has its log-probabilities."""
        return self.job.requests[index].sampling.logprobs >= 0

    @abstractmethod
    def _token_chunks(
        self, index: int, event: TokenEvent, parts: Sequence[OutputPart]
    ) -> list[Chunk]: ...

    @abstractmethod
    def _finish_chunks(self, index: int, parts: Sequence[OutputPart]) -> list[Chunk]: ...

    @abstractmethod
    def _choice(self, index: int, answer: Answer) -> Chunk:
        """One choice of a whole answer, with `logprobs` None, and behind it names of other lists
        of `Answer.logprobs`, which are `LATER`."""

    @abstractmethod
    def _logprob_items(self, index: int, event: TokenEvent) -> tuple[object, ...]:
        """The items of a token in each of `logprob_lists`."""

    def _logprobs(self, lists: Chunk) -> Chunk:
        """The object of a choice that holds `logprob_lists`."""
        return lists

    def _token_logprobs(self, index: int, event: TokenEvent) -> Chunk | None:
        """That object in the chunk of one token."""
        if event.logprob is None:
            return None
        return self._items_object(self._logprob_items(index, event))

    def _items_object(self, items: tuple[object, ...]) -> Chunk:
        lists: Chunk = {name: [item] for name, item in zip(self.logprob_lists, items, strict=True)}
        return self._logprobs(lists)

    def _keep_logprob(self, index: int, event: TokenEvent) -> None:
        self._keep_items(index, self._logprob_items(index, event))

    def _keep_items(self, index: int, items: tuple[object, ...]) -> None:
        kept = self.answers[index].logprobs
        for name, item in zip(self.logprob_lists, items, strict=True):
            kept.setdefault(name, []).append(_encoder.encode(item))

    def _chunk(
        self,
        index: int,
        content: object,
        finish_reason: str | None = None,
        logprobs: Chunk | None = None,
    ) -> Chunk:
        choice: Chunk = {
            "index": index,
            self.content_field: content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._envelope(self.chunk_object, [choice])

    def _with_closing(self, chunks: list[Chunk]) -> list[Chunk]:
        """`chunks` (the last of the stream) and the facts about serving.

        They travel in the usage chunk where a client asked for one, else in the last chunk.
        """
        if self.job.include_usage:
            return [*chunks, self._with_facts(self._envelope(self.chunk_object, []))]
        facts = self._with_facts({})
        del facts["usage"]
        return [*chunks[:-1], chunks[-1] | facts]

    def _event(self, chunk: Chunk) -> SseEvent:
        return SseEvent(_encoder.encode(chunk), id="" if self.ids is None else self.ids.current)

    def _envelope(self, kind: str, choices: list[Chunk] | msgspec.Raw) -> Chunk:
        """The outer object of a chunk or a whole answer."""
        body: Chunk = {
            "id": self._object_id,
            "object": kind,
            "created": self.job.created,
            "model": self.job.model,
            "system_fingerprint": self.job.fingerprint,
            "choices": choices,
        }
        if self.job.stream and self.job.include_usage:
            body["usage"] = None
        return body

    def _with_facts(self, body: Chunk) -> Chunk:
        """`body` with usage, tier, timings and the `batchengine` object."""
        body["usage"] = usage_object(self.job, self.answers)
        if self.job.service_tier is not None:
            body["service_tier"] = self.job.service_tier
        body["timings"] = timings_object(self.answers)
        body["batchengine"] = serving_object(self.job, self.answers)
        return body


def joined(items: list[bytes]) -> Iterator[bytes]:
    """The items of a JSON list, in parts."""
    for start in range(0, len(items), LIST_ITEMS):
        part = b",".join(items[start : start + LIST_ITEMS])
        yield b"," + part if start else part


def error_object(error: BatchEngineError, request_id: str = "") -> Chunk:
    """The OpenAI error object (message, type, param, code) with added what, why, fix, details."""
    body: Chunk = {
        "message": str(error),
        "type": ERROR_TYPES.get(error.kind, _INVALID),
        "param": error.param,
        "code": error.name,
        "batchengine_code": error.code,
        "what": error.what,
        "why": error.why,
        "fix": error.fix,
    }
    if request_id:
        body["request_id"] = request_id
    body.update(error.details)
    return {"error": body}


def logprob_item(event: TokenEvent) -> Chunk:
    """A token with its log-probability and the likeliest ones in its place."""
    assert event.logprob is not None  # callers look first
    top = [_logprob(one) for one in event.top]
    return _logprob(event.logprob) | {"top_logprobs": top}


def _logprob(one: TokenLogprob) -> Chunk:
    return {
        "token": one.text.decode("utf-8", "replace"),
        "logprob": logprob_number(one.logprob),
        "bytes": list(one.text),
    }


def logprob_number(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_MIN


def usage_object(job: HttpJob, answers: list[Answer]) -> Chunk:
    """OpenAI's usage; every prompt counts once, however many choices were drawn from it."""
    firsts = answers[:: job.choices_per_prompt]
    prompt = sum(answer.usage.prompt_tokens for answer in firsts)
    cached = sum(answer.usage.cached_tokens for answer in firsts)
    made = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.reasoning_tokens for answer in answers)
        },
    }


def timings_object(answers: list[Answer]) -> Chunk:
    """The timings of llama-server, which local user interfaces read; of the first choice."""
    usage = answers[0].usage
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt_ms = max(0.0, usage.ttft_ms - usage.queue_ms)
    decode_ms = max(0.0, usage.total_ms - usage.ttft_ms)
    made = usage.completion_tokens - usage.resumed_tokens  # by this stream
    later = max(0, made - 1)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": _per_second(computed, prompt_ms),
        "predicted_n": made,
        "predicted_ms": round(decode_ms, 3),
        "predicted_per_second": _per_second(later, decode_ms),
    }


def _per_second(count: int, ms: float) -> float:
    return round(1000.0 * count / ms, 3) if ms > 0 else 0.0


def serving_object(job: HttpJob, answers: list[Answer]) -> Chunk:
    """Session, lane, times and reuse of the answer."""
    usage = answers[0].usage
    predicted = job.predict() or {}
    found: Chunk = {
        "request_id": job.asked.request_id,
        "session_id": usage.session_id if is_kept(usage.session_id) else job.asked.session_id,
        "class": str(job.asked.sla.sla_class),
        "route": job.route,
        "lane": usage.lane,
        "queue_ms": round(usage.queue_ms, 3),
        "ttft_ms": round(usage.ttft_ms, 3),
        "predicted_ttft_ms": _finite(predicted.get("ttft_ms")),
        "total_ms": round(usage.total_ms, 3),
        "tokens_reused": usage.cached_tokens,
        "reuse_reason": usage.reuse_reason,
        "seed": job.seed if usage.seed in (None, derived_seed(job.seed, 0)) else usage.seed,
    }
    if usage.resumed_tokens:
        found["resumed_tokens"] = usage.resumed_tokens
    if (found_use := job.requests[0].found) is not None:
        found["timeline"] = timeline_object(found_use)
    bare = sum(answer.bare for answer in answers)
    if bare and any(asked.sampling.logprobs >= 0 for asked in job.requests):
        found["tokens_without_logprobs"] = bare
    if cut := next((answer.cut for answer in answers if answer.cut), ""):
        found["cut"] = cut
    if not usage.durable:
        found["durable"] = False
    return found


def timeline_object(found: Found) -> Chunk:
    """How the request went on with its session."""
    row: Chunk = {
        "use": found.use.value,
        "tokens_shared": found.shared,
        "tokens_cut": found.cut,
    }
    if found.of:
        row["of"] = found.of
    if found.is_history_missing:
        row["warning"] = HISTORY_MISSING
    return row


def _finite(ms: float | None) -> float | None:
    return round(ms, 3) if ms is not None and math.isfinite(ms) else None
