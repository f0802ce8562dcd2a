"""The nouns every room shares: errors, SLA, sampling, requests and the events of one generation.

Plain frozen data, no behaviour that needs a clock, a file or a socket. Nothing here imports
another room of this package.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

PAGE_TOKENS = 256  # tokens per KV page; part of the format (NUMERICS CA-1 rule 7)
SUPERPAGE_PAGES = 4  # pages folded together before super-pages fold
FORM_CHAT, FORM_TEXT = "chat", "text"  # of a request, and of the events that answer it


class BatchEngineError(Exception):
    """An error a person can act on: code, what happened, why, and the fix.

    `http_status` and `error_type` are what the HTTP service answers with; `api_code` is the
    machine-readable OpenAI-style code. `details` are extra fields of the error object
    (for example n_prompt_tokens and n_ctx).
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        http_status: int = 500,
        error_type: str = "server_error",
        api_code: str = "internal_error",
        param: str | None = None,
        retry_after_ms: int | None = None,
        details: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix
        self.http_status = http_status
        self.error_type = error_type
        self.api_code = api_code
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.details = details or {}

    def __str__(self) -> str:
        text = f"{self.code} {self.what}"
        if self.why:
            text += f": {self.why}" if not text.endswith(".") else f" {self.why}"
        if self.fix:
            text += f". Fix: {self.fix}" if not text.endswith(".") else f" Fix: {self.fix}"
        return text


class SlaClass(enum.StrEnum):
    """Class of promise, most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BACKGROUND = "background"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Sla:
    """What was promised to one request. Targets are milliseconds; None = the class default.

    `priority` breaks ties inside a class only; higher = sooner.
    """

    sla_class: SlaClass = SlaClass.STANDARD
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttlt_ms: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, already cast to binary32 where they are floats (NUMERICS 2.7).

    temperature 0 = greedy. top_k 0 = off, top_p 1 = off, min_p 0 = off,
    repetition_penalty 1 = off (applied to the last `penalty_tokens` tokens of the timeline).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_tokens: int = 256
    seed: int = 0
    logprobs: int = -1  # -1 = none, 0 = chosen token only, n = also the n best
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: a whole prompt as token ids, and when to stop.

    `session_id` None = anonymous: prefix sharing still finds common pages.
    `tenant` namespaces sessions and salts content keys; KV is never shared across tenants.
    `tool_call_ids`: calls whose results the messages carry; a request without a session continues
    the session that was parked for one of them. `park`: the session will wait for a tool, so its
    KV leaves the lane at the end of the turn. `idempotency_key`: the same key in one session is
    computed once. `promote`: this turn wants the fast lane. `expected_output_tokens`: the
    client's estimate, for the router only. `form`: of the answer's events, for a later stream
    of the same turn; the engine keeps it and gives it back.
    """

    request_id: str
    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sla: Sla = Sla()
    session_id: str | None = None
    tenant: str = ""
    tool_call_ids: tuple[str, ...] = ()
    park: bool = False
    idempotency_key: str = ""
    promote: bool = False
    expected_output_tokens: int | None = None
    form: str = FORM_CHAT


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of a finished generation; times in ms.

    `reuse_reason` says why less than the whole prompt came from KV; "" = all of it did.
    `resumed_tokens` are tokens of this turn that an earlier stream computed. `durable` is False
    where a full disk kept the last tokens of a named session out of the ledger.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    lane: str = ""
    session_id: str = ""
    reuse_reason: str = ""
    resumed_tokens: int = 0
    durable: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural log of its probability before temperature and truncation."""

    token: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """Still waiting; eta None = no estimate yet."""

    position: int
    eta_ms: float | None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One committed token. `text` holds only complete UTF-8 characters and may be empty.

    With `stop` strings some text is held back until it can no longer be part of one.
    """

    token: int
    text: str
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of a generation: reason "stop", "length" or "shutdown"; `text` = held-back rest."""

    finish_reason: str
    usage: Usage
    text: str = ""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The generation failed after it was admitted."""

    error: BatchEngineError


GenerationEvent = QueuedEvent | TokenEvent | DoneEvent | ErrorEvent


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the start-up stage list."""

    index: int
    count: int
    name: str
    detail: str
    seconds: float


@dataclass(slots=True)
class ModelInfo:
    """What the service tells clients about the model it serves."""

    model_id: str
    path: str
    arch: str
    n_layer: int
    n_params: int
    file_bytes: int
    context_tokens: int  # what this daemon really accepts, never the training context
    context_trained: int
    vocab_size: int
    quantisation: str
    has_chat_template: bool
    details: dict[str, str | int | float] = field(default_factory=dict[str, str | int | float])
