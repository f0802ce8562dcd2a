"""What the two completion APIs have in common: envelope, usage, and the facts about serving.

A Shape turns events into JSON objects and knows nothing of sockets; `service.generate` moves them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from batchengine.core import DoneEvent, TokenEvent, Usage
from service.work import Job

LOGPROB_MIN = -9999.0  # JSON has no minus infinity; OpenAI's servers send this number


@dataclass(slots=True)
class Answer:
    """One choice as it grows. `events` is filled only when log-probabilities are wanted.

    `bare` counts tokens without one: an earlier stream computed them, and told theirs.
    """

    texts: list[str] = field(default_factory=list[str])
    events: list[TokenEvent] = field(default_factory=list[TokenEvent])
    finish_reason: str = ""
    usage: Usage = field(default_factory=Usage)
    bare: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Shape(ABC):
    """Events to JSON objects, for one job."""

    def __init__(self, job: Job, object_id: str) -> None:
        self.job = job
        self._object_id = object_id

    def envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        """The outer object of a chunk or a whole answer."""
        body: dict[str, object] = {
            "id": self._object_id,
            "object": kind,
            "created": self.job.created,
            "model": self.job.model,
            "choices": choices,
        }
        if self.job.stream and self.job.include_usage:
            body["usage"] = None
        return body

    def with_facts(self, body: dict[str, object], answers: list[Answer]) -> dict[str, object]:
        """`body` with usage, tier, timings and our own object."""
        body["usage"] = usage_object(self.job, answers)
        if self.job.service_tier is not None:
            body["service_tier"] = self.job.service_tier
        body["timings"] = timings_object(answers)
        body["batchengine"] = serving_object(self.job, answers)
        return body

    @abstractmethod
    def first(self, index: int) -> dict[str, object]:
        """The event that tells a client it was admitted."""

    @abstractmethod
    def noop(self) -> dict[str, object]:
        """An event that changes nothing but resets a client's watchdog."""

    @abstractmethod
    def token(self, index: int, event: TokenEvent) -> dict[str, object] | None:
        """A chunk, or None when the token shows nothing yet."""

    @abstractmethod
    def finish(self, index: int, event: DoneEvent) -> list[dict[str, object]]:
        """The last chunks of one choice."""

    @abstractmethod
    def usage_chunk(self, answers: list[Answer]) -> dict[str, object]:
        """The usage chunk: no choices."""

    def closing(
        self, chunks: list[dict[str, object]], answers: list[Answer]
    ) -> list[dict[str, object]]:
        """`chunks` (the last of the stream) and the facts about serving.

        They travel in the usage chunk where a client asked for one, else in the last chunk.
        """
        if self.job.include_usage:
            return [*chunks, self.with_facts(self.usage_chunk(answers), answers)]
        facts = self.with_facts({}, answers)
        del facts["usage"]
        return [*chunks[:-1], chunks[-1] | facts]

    @abstractmethod
    def whole(self, answers: list[Answer]) -> dict[str, object]:
        """The answer of a request that does not stream."""


def logprob_number(value: float) -> float:
    return value if math.isfinite(value) else LOGPROB_MIN


def usage_object(job: Job, answers: list[Answer]) -> dict[str, object]:
    """Every prompt counts once, however many choices were drawn from it."""
    firsts = answers[:: job.choices_per_prompt]
    prompt = sum(answer.usage.prompt_tokens for answer in firsts)
    cached = sum(answer.usage.cached_tokens for answer in firsts)
    made = sum(answer.usage.completion_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def timings_object(answers: list[Answer]) -> dict[str, object]:
    """llama-server's timings, which local user interfaces read; of the first choice."""
    usage = answers[0].usage
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt_ms = max(0.0, usage.ttft_ms - usage.queue_ms)
    decode_ms = max(0.0, usage.total_ms - usage.ttft_ms)
    made = usage.completion_tokens - usage.resumed_tokens  # of them, by this stream
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


def serving_object(job: Job, answers: list[Answer]) -> dict[str, object]:
    """Who served it, where and how fast: what `promote` and a log reader need."""
    usage = answers[0].usage
    session_id = usage.session_id or (job.session.session_id if job.session else "")
    predicted = job.predict() or {}
    predicted_ms = predicted.get("ttft_ms")
    found: dict[str, object] = {
        "request_id": job.request_id,
        "session_id": session_id or None,
        "class": str(job.sla.sla_class),
        "route": job.route,
        "lane": usage.lane,
        "queue_ms": round(usage.queue_ms, 3),
        "ttft_ms": round(usage.ttft_ms, 3),
        "predicted_ttft_ms": _finite(predicted_ms),
        "total_ms": round(usage.total_ms, 3),
        "tokens_reused": usage.cached_tokens,
        "reuse_reason": usage.reuse_reason,
        "seed": job.seed,
    }
    if usage.resumed_tokens:
        found["resumed_tokens"] = usage.resumed_tokens
    bare = sum(answer.bare for answer in answers)
    if bare and any(asked.sampling.logprobs >= 0 for asked in job.requests):
        found["tokens_without_logprobs"] = bare
    if not usage.durable:
        found["durable"] = False
    return found


def _finite(ms: float | None) -> float | None:
    return round(ms, 3) if ms is not None and math.isfinite(ms) else None
