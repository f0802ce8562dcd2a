"""Types that the whole package shares: errors, SLA, sampling, requests, events of a generation.

Plain frozen data, no behaviour that needs a clock, a file or a socket. Imports no other module of
this package.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

PAGE_TOKENS = 256  # tokens per KV page; part of the format (docs/numerics.md, 7)
SUPERPAGE_PAGES = 4  # whose attention is folded as one: pages move between daemons in these
ID_PREFIX_CHARS_MIN = 4  # a shorter prefix of an id matches nothing
LOGPROBS_MAX = 20
# of a request, and of the events of its answer
FORM_CHAT, FORM_TEXT = "chat", "text"
FORM_RESPONSES, FORM_MESSAGES = "responses", "messages"


class Kind(enum.Enum):
    """Kind of an error; each protocol maps it to a status or type of its own."""

    INVALID = enum.auto()  # the request can never be served as it is
    UNAUTHENTICATED = enum.auto()
    FORBIDDEN = enum.auto()
    NOT_FOUND = enum.auto()  # what the request addresses does not exist
    MISSING = enum.auto()  # what the request depends on does not exist, or exists no more
    METHOD = enum.auto()  # the path exists, not with this HTTP method
    TIMEOUT = enum.auto()  # the client sent or read too slowly
    CONFLICT = enum.auto()  # the request contradicts the state of what it addresses
    TOO_LARGE = enum.auto()
    MEDIA_TYPE = enum.auto()
    BUSY = enum.auto()  # a limit of one key is reached: send it again later
    INTERNAL = enum.auto()
    UNAVAILABLE = enum.auto()  # the daemon cannot serve now: send it again later


class BatchEngineError(Exception):
    """An error for users: code, what happened, why, and the fix.

    `code` is BExxxx, `name` the machine-readable word that API clients compare (OpenAI's `code`).
    `param` is the field of the request that is wrong, `retry_ms` the time after which sending it
    again makes sense, `details` are extra fields of the error object (for example
    n_prompt_tokens and n_ctx). Raised by calling a row of `batchengine.errors`.
    """

    def __init__(
        self,
        code: str,
        kind: Kind,
        name: str,
        what: str,
        why: str = "",
        fix: str = "",
        *,
        param: str | None = None,
        retry_ms: int | None = None,
        details: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.kind = kind
        self.name = name
        self.what = what
        self.why = why
        self.fix = fix
        self.param = param
        self.retry_ms = retry_ms
        self.details = details or {}

    def __str__(self) -> str:
        text = f"{self.code} {self.what}"
        if self.why:
            text += f": {self.why}" if not text.endswith(".") else f" {self.why}"
        if self.fix:
            text += f". Fix: {self.fix}" if not text.endswith((".", "?")) else f" Fix: {self.fix}"
        return text


class SlaClass(enum.StrEnum):
    """Class of service, most urgent first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BACKGROUND = "background"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Sla:
    """Latency targets of one request, in milliseconds; None = the default of the class.

    `priority` breaks ties inside a class only; higher = sooner.
    """

    sla_class: SlaClass = SlaClass.STANDARD
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    ttlt_ms: float | None = None
    priority: int = 0


Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Bias = tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], Annotated[float, Meta(ge=-100.0, le=100.0)]]


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters; floats are binary32 values already (docs/numerics.md, 10).

    temperature 0 = greedy. top_k 0 = off, top_p 1 = off, min_p 0 = off, repetition_penalty 1 =
    off; penalties look at the last `penalty_tokens` tokens of the timeline. The request, the
    ledger's record of a turn and the step frame hold this same struct, by field name: a new
    field needs a default, so that older records are read.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    penalty_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 256
    seed: Annotated[int, Meta(ge=0)] = 0
    # -1 = none, 0 = chosen token only, n = also the n best
    logprobs: Annotated[int, Meta(ge=-1, le=LOGPROBS_MAX)] = -1
    logit_bias: Annotated[tuple[Bias, ...], Meta(max_length=1024)] = ()
    # before so many tokens of the answer none that ends it is chosen, unless a grammar is complete
    tokens_min: Annotated[int, Meta(ge=0, le=1 << 24)] = 0

    @property
    def history_tokens(self) -> int:
        """How many of the last tokens the sampler reads for penalties; 0 = all are off."""
        is_off = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (
            1.0,
            0.0,
            0.0,
        )
        return 0 if is_off else self.penalty_tokens


GREEDY = Sampling()


CONSTRAINT_CHARS_MAX = 1 << 20
SCHEMA_TOOL = "x-tool"  # keyword of a schema in a grammar: the tool that it is of
SCHEMA_LOST = "x-lost"  # likewise: names of keywords that were taken out of it


class Constraint(msgspec.Struct, frozen=True):
    """A grammar that the whole text of an answer follows, control tokens of the markup included.

    `text` is a JSON Schema as JSON ("{}" = any JSON value), a grammar in llguidance's variant of
    Lark, or a regular expression.
    """

    kind: Literal["json_schema", "lark", "regex"]
    text: str


class OutputForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the text of an answer is split into parts (`service.protocols.output`).

    `markup`: its name (`batchengine.markup`), "" = all text is content. `in_reasoning`: the prompt
    ends inside a reasoning part. `calls`: calls of tools are taken out of the text.
    `text_parameters`: by tool, the parameters that are text, which markup without quotes does not
    tell. `checked`: a grammar holds the calls, so an answer that begins as one is one. `heading`:
    digests of the system's text and of the tools that the prompt has, which tell a request that
    appends what is new; "" = it has none.
    """

    markup: str = msgspec.field(default="", name="family")  # its name in records of turns
    in_reasoning: bool = False
    calls: bool = False
    text_parameters: dict[str, tuple[str, ...]] = {}
    checked: bool = False
    heading: tuple[str, str] = ("", "")


PLAIN_OUTPUT = OutputForm()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation: a whole prompt as token ids, and when to stop.

    `session_id` None = anonymous: prefix sharing still finds common pages.
    `tenant` namespaces sessions and salts content keys; KV is never shared across tenants.
    `tool_call_ids`: calls whose results the messages carry, and the turns of those that were made
    here; a request without a session continues the session that was parked for one of them. `park`:
    the session will wait for a tool, so its KV leaves the lane at the end of the turn.
    `idempotency_key`: the same key in one session is computed once. `promote`: route this turn to
    the fast lane. `expected_output_tokens`: the client's estimate, for the router only. `has_seed`:
    its client chose the seed. `patience_ms`: how long the client waits for its first byte, None =
    unknown, or it gets one at once. `form`: form of the answer's events; the engine records it for
    later streams of the same turn, and `output` with it. `constraint` None = any text.
    `client_name`: what the client calls the session, for listings. `echo`: text of the service,
    which the turn keeps. `prompt_logprobs`: as `Sampling.logprobs`, of the tokens of the prompt;
    such a request has no session, since tokens that have KV already have no logits, and the token
    that ends its answer is one of its events. `predicted`: tokens that its client expects of the
    answer, of which drafts are made; they change no token, and nothing records them. `choices`: how
    many generations its client asked for at once.

    For `Engine.begin`: `in_family`: the session id names a family of timelines. `append` (() =
    none): tokens of new messages, the end of the message before them first, which go behind the
    session's timeline, and replace `prompt`, if it has one; `append_to`: the turn behind whose
    answer they go, "" = the last one. `is_retry`: the client has sent the same request before.
    `parent_id`: the session that started this one. `attempt` is equal of requests that ask the
    same, streamed or not (`streams`); "" = not known. `found` is what `begin` decided.
    """

    request_id: str
    prompt: tuple[int, ...]
    tokens_max: int
    sampling: Sampling = GREEDY
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
    has_seed: bool = False
    patience_ms: float | None = None
    form: str = FORM_CHAT
    output: OutputForm = PLAIN_OUTPUT
    constraint: Constraint | None = None
    client_name: str = ""
    echo: str = ""
    prompt_logprobs: int = -1
    predicted: tuple[int, ...] = ()
    choices: int = 1
    in_family: bool = False
    append: tuple[int, ...] = ()
    append_to: str = ""
    is_retry: bool = False
    parent_id: str | None = None
    attempt: str = ""
    streams: bool = False
    found: Found | None = None

    @property
    def ends_at_end_token(self) -> bool:
        """Whether a token that ends a generation ends this one: a grammar that is complete allows
        nothing else, so `ignore_eos` does not count then."""
        return not self.ignore_eos or self.constraint is not None

    @property
    def session_of_key(self) -> str:
        """The id of the session of a request that names none but has an idempotency key: its
        repetitions find there what the first of them computed. "" = it has no key."""
        if not self.idempotency_key:
            return ""
        digest = hashlib.sha256(b"batchengine idempotency\0" + self.idempotency_key.encode())
        return f"idem_{digest.hexdigest()[:32]}"


class TimelineUse(enum.StrEnum):
    """How a request relates to the timelines of the session that it names."""

    NEW = "new"  # the first timeline of its session
    CONTINUED = "continued"  # the prompt has the whole timeline, or repeats its last turn
    APPENDED = "appended"  # the engine made the prompt of the timeline and the new messages
    EDITED = "edited"  # the timeline is cut where the prompt differs, and goes on from there
    FORKED = "forked"  # a new timeline beside the others of the session
    UNNAMED = "unnamed"  # all timelines that the session may have compute: this one is not kept


@dataclass(frozen=True, slots=True)
class Found:
    """The timeline that the engine chose for a request, and why. `shared` leading tokens of the
    prompt are those of session `of`; `cut` tokens of the chosen timeline go; `is_history_missing`:
    the messages look like the newest ones alone."""

    use: TimelineUse
    of: str = ""
    shared: int = 0
    cut: int = 0
    is_history_missing: bool = False


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn of the ledger: its request, and its answer as its client got it.

    `tokens` of the answer are durable. `finish_reason` "" = it has not ended, or its daemon was
    killed. `only`: its session has no other turn but deleted responses. `ended_s`: when it ended,
    seconds since the Unix epoch; 0 = not known. `texts`: of its tokens but the one that ended it,
    and behind them what was held back until the end. `cached_tokens`: as in `Usage`.
    """

    request: GenerationRequest
    tokens: int
    texts: tuple[str, ...]
    finish_reason: str
    is_last: bool
    is_running: bool
    only: bool
    ended_s: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """The whole answer."""
        return "".join(self.texts)


class Presence(enum.Enum):
    """Where the engine has a session."""

    IN_MEMORY = enum.auto()
    STORED = enum.auto()  # in the ledger only
    UNKNOWN = enum.auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts and times of a finished generation; times in ms.

    `reuse_reason`: why less than the whole prompt came from KV; "" = all of it did.
    `resumed_tokens` are tokens of this turn that an earlier stream computed. `durable` is False
    where a full disk kept the last tokens of a named session out of the ledger. `seed`: the one
    that chose the tokens, of an earlier attempt where that went on; None = not known.
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
    seed: int | None = None

    @property
    def tpot_ms(self) -> float | None:
        """Mean ms per token after the first one of this stream; None = there was no such token."""
        later = self.completion_tokens - self.resumed_tokens - 1
        return round((self.total_ms - self.ttft_ms) / later, 3) if later > 0 else None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural log of its probability before temperature and truncation."""

    token: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """Place among waiting requests of the same tenant, from 1; `eta_ms` None = no estimate yet."""

    position: int
    eta_ms: float | None


class DaemonLoad(NamedTuple):
    """How much a daemon has to do: requests with and without a seat, and the share of the lanes'
    places for open pages that are in use."""

    requests_running: int
    requests_waiting: int
    kv_usage_ratio: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """How far a request has come before its first token. `position` 0 = it is being computed;
    `eta_ms` None = no estimate yet. `computed_tokens` of `prompt_tokens` have KV."""

    position: int = 0
    eta_ms: float | None = None
    computed_tokens: int = 0
    prompt_tokens: int = 0


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
class PromptTokenEvent:
    """One token of a prompt whose log-probabilities are asked for, before any TokenEvent.

    `logprob` None = the first one, in front of which there is nothing.
    """

    token: int
    text: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SkippedEvent:
    """The text of one token that the reader has from an earlier stream of the same turn."""

    text: str


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The end of a generation; `text` = held-back rest.

    Reason "stop" or "length" for a whole answer; "shutdown" or "cancelled" for one that was cut.
    `stop_string`: the one of the request that ended it, "" = none did.
    """

    finish_reason: str
    usage: Usage
    text: str = ""
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The generation failed after it was admitted."""

    error: BatchEngineError


GenerationEvent = (
    QueuedEvent | PromptTokenEvent | SkippedEvent | TokenEvent | DoneEvent | ErrorEvent
)


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the start-up stage list."""

    index: int
    count: int
    name: str
    detail: str
    seconds: float


class ContextBound(enum.StrEnum):
    """What bounds the context that a daemon accepts; a value says what allows a longer one."""

    MODEL = "serve a model that was trained for a longer context"
    SETTING = "start the daemon with a larger --ctx, at most what the model was trained for"
    STORE = "raise store.budget_bytes: the KV store holds no longer session"
    STORE_ALONE = (
        "raise store.budget_bytes: the KV store holds no longer session, and linked daemons keep no"
        " pages of this model"
    )
    PEERS = (
        "raise store.budget_bytes here or on linked daemons: together they hold no longer session"
    )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, from which costs, pages and what peers may compute are derived.

    Heads are those of the first layer; `has_equal_heads`: of every layer. `v_first`: of a latent
    layer, else 0. Whole layers attend to all tokens: `n_layer_whole` of them, whose queries have
    `whole_query_dims` values of a token, and `whole_kv_share` of the KV. `is_whole`: layers cannot
    be divided between hosts. Tables are matrices of which a token reads a row; experts, all banks.
    """

    n_embd: int = 0
    n_head: int = 0
    n_kv_head: int = 0
    head_dim: int = 0
    v_first: int = 0
    has_equal_heads: bool = True
    is_whole: bool = False
    n_layer_whole: int = 0
    whole_query_dims: int = 0
    whole_kv_share: float = 1.0
    page_payload_bytes: int = 0
    state_bytes: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    expert_params: int = 0
    expert_bytes: int = 0
    table_params: int = 0
    table_bytes: int = 0

    @property
    def equal_heads(self) -> int:
        """Query heads of every layer; 0 = layers differ in them."""
        return self.n_head if self.has_equal_heads else 0


@dataclass(slots=True)
class ModelInfo:
    """The model as the service reports it to clients."""

    model_id: str
    path: str
    arch: str
    n_layer: int
    n_params: int
    file_bytes: int
    context_tokens: int  # that this daemon accepts; may be less than `context_trained`
    context_trained: int
    vocab_size: int
    quantisation: str
    chat_template: str = ""  # "" = the file has none
    tool_template: str = ""  # of chats with tools, "" = no other one
    shape: ModelShape = ModelShape()
    notes: list[str] = field(default_factory=list[str])  # what is not as it was asked for
    created: int = 0  # when the file was written, in seconds since the epoch
    model_hash: str = ""  # of its tensors
    arith_id: str = ""  # of the arithmetic that computes it
    kv_format: str = ""  # of its pages, whose rounding answers depend on; "" = the common one
    context_bound: ContextBound = ContextBound.MODEL

    def template_reads(self, name: str) -> bool:
        """Whether a chat template mentions a variable."""
        word = re.compile(rf"\b{re.escape(name)}\b")
        return any(map(word.search, (self.chat_template, self.tool_template)))

    @property
    def fingerprint(self) -> str:
        """What answers are a function of beside the request: model, arithmetic, format of KV."""
        parts = ("be", self.model_hash[:12], self.arith_id[:12], self.kv_format)
        return "-".join(filter(None, parts))
