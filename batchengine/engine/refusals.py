"""Every reason the engine refuses a request, in words a client can act on."""

from __future__ import annotations

from collections.abc import Sequence

from batchengine import cost
from batchengine.core import BatchEngineError, GenerationRequest
from batchengine.engine.turn import Turn
from kv_store.errors import StoreError


def loading(progress: float) -> BatchEngineError:
    """The model is not ready yet."""
    return BatchEngineError(
        "BE1201",
        "the model is still loading",
        why=f"{progress:.0%} done",
        fix="send the request again in a moment",
        http_status=503,
        api_code="loading_model",
        retry_after_ms=1000,
    )


def draining() -> BatchEngineError:
    """The daemon is about to stop."""
    return BatchEngineError(
        "BE1202",
        "the daemon is shutting down",
        why="it finishes what it has and takes nothing new",
        fix="send the request again after the restart",
        http_status=503,
        api_code="draining",
        retry_after_ms=5000,
    )


def internal(error: BaseException) -> BatchEngineError:
    """A background task failed; the log has the details."""
    return BatchEngineError(
        "BE1299",
        "the engine cannot compute any more",
        why=type(error).__name__,
        fix="look into the daemon's log, then restart it",
        http_status=503,
        api_code="engine_failed",
    )


def request_failed(error: Exception) -> BatchEngineError:
    """A fault of ours hit one request on its way to a lane, or what refused it said so itself."""
    if isinstance(error, BatchEngineError):
        return error
    return BatchEngineError(
        "BE1213",
        "this request could not be begun",
        why=f"a defect of the daemon met it ({type(error).__name__}); other requests go on",
        fix="try it once more; if it fails again, report it with the daemon's log",
        http_status=500,
        api_code="request_failed",
    )


def overloaded(waiting: int, eta_ms: float) -> BatchEngineError:
    """The queue is full."""
    return BatchEngineError(
        "BE1204",
        "too many requests are waiting",
        why=f"{waiting} requests are queued, the limit",
        fix="send it again later, or raise limits.queue_max",
        http_status=429,
        error_type="rate_limit_error",
        api_code="rate_limit_exceeded",
        retry_after_ms=cost.retry_after_ms(eta_ms),
    )


def wait_too_long(wait_ms: float, patience_ms: float, sla_class: str) -> BatchEngineError:
    """Every lane is busy for longer than this class waits."""
    return BatchEngineError(
        "BE1208",
        "the wait would be too long",
        why=f"about {wait_ms / 1000:.1f} s until it could start, and class {sla_class} waits at"
        f" most {patience_ms / 1000:.1f} s",
        fix=f"send it again later, or raise sla.{sla_class}.patience_s",
        http_status=429,
        error_type="rate_limit_error",
        api_code="rate_limit_exceeded",
        retry_after_ms=cost.retry_after_ms(wait_ms - patience_ms),
    )


def nothing_to_explain(given: str, found: Sequence[str]) -> BatchEngineError:
    """No request or session of that name, or more than one."""
    several = len(found) > 1
    return BatchEngineError(
        "BE1209",
        f"{given[:80]!r} names {'more than one' if several else 'no'} request or session",
        why=", ".join(found[:8]) if several else "the latest 4,096 decisions are remembered",
        fix="give more characters of the id" if several else "see `batchengine sessions`",
        http_status=409 if several else 404,
        error_type="invalid_request_error",
        api_code="ambiguous_id" if several else "not_found",
    )


def session_busy(queued: int) -> BatchEngineError:
    """Too many requests wait for one session."""
    return BatchEngineError(
        "BE1205",
        "this session has too many requests waiting",
        why=f"a session computes one request at a time, {queued} are queued behind it",
        fix="wait for the answers, or use other session ids",
        http_status=429,
        error_type="rate_limit_error",
        api_code="session_busy",
        retry_after_ms=1000,
    )


def client_too_slow(limit_ms: float) -> BatchEngineError:
    """The reader did not read."""
    return BatchEngineError(
        "BE1206",
        "the stream was not read fast enough",
        why=f"its buffer was full for {limit_ms / 1000:.0f} s",
        fix="read events as they come",
        http_status=408,
        error_type="invalid_request_error",
        api_code="client_too_slow",
    )


def check_request(request: GenerationRequest, context_tokens: int, vocab_size: int) -> None:
    """Raises for a request that can never run, whatever the load."""
    n_prompt = len(request.prompt)
    if n_prompt < 1:
        raise _invalid("prompt", "the prompt is empty", "send at least one token")
    if request.tokens_max < 1:
        raise _invalid("max_tokens", "max_tokens is less than 1", "ask for at least one token")
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        raise _invalid("prompt", "a token id is outside the vocabulary", "use this model's tokens")
    if n_prompt + request.tokens_max > context_tokens:
        raise BatchEngineError(
            "BE1203",
            f"prompt does not fit: {n_prompt:,} tokens + max {request.tokens_max:,}"
            f" > {context_tokens:,}",
            why="prompts are never truncated",
            fix="shorten the prompt or max_tokens, or start with a larger limits.context_tokens",
            http_status=400,
            error_type="invalid_request_error",
            api_code="context_length_exceeded",
            param="prompt",
            details={"n_prompt_tokens": n_prompt, "n_ctx": context_tokens},
        )


def no_room(turn: Turn) -> BatchEngineError:
    """The arena is full of this turn's pages and the store takes none."""
    return BatchEngineError(
        "BE2304",
        "there is no room for the KV of this request",
        why=f"its {len(turn.session.codes)} pages fill the open places of the lane, and the store"
        " takes none of them",
        fix="free disk space where the store lies, shorten the prompt, or raise lane.places",
        http_status=503,
        api_code="kv_full",
        details={"request_id": turn.generation.request_id},
    )


def too_large(turn: Turn, budget: int) -> BatchEngineError:
    """More pages than the store will ever have."""
    return BatchEngineError(
        "BE2301",
        "the request can never run here",
        why=f"it needs up to {turn.pages_max} KV pages and the store has {budget} in all",
        fix="shorten the prompt or max_tokens, or raise store.budget_bytes",
        http_status=400,
        error_type="invalid_request_error",
        api_code="kv_too_small",
    )


def numeric_fault(turn: Turn) -> BatchEngineError:
    """NaN or infinity in a row."""
    return BatchEngineError(
        "BE2302",
        "a number of this generation was not finite",
        why="the computation produced NaN or infinity; its KV was discarded",
        fix="send the request again; if it repeats, verify the model file",
        http_status=500,
        api_code="numeric_fault",
        details={"request_id": turn.generation.request_id},
    )


def pages_differ(turn: Turn) -> BatchEngineError:
    """Its pages were computed twice with different bytes, again and again."""
    return BatchEngineError(
        "BE2304",
        "pages of this generation were computed with different results",
        why="two computations of the same tokens gave other bytes, more than once",
        fix="see /health and the daemon's log; check the machine's memory",
        http_status=500,
        api_code="numeric_fault",
        details={"request_id": turn.generation.request_id},
    )


def model_changed(why: str) -> BatchEngineError:
    """What is on disk is not what was loaded (F11)."""
    return BatchEngineError(
        "BE1212",
        "the model changed under the running daemon",
        why=why,
        fix="restart the daemon",
        http_status=503,
        api_code="model_changed",
        retry_after_ms=30_000,
    )


def quarantined(turn: Turn) -> BatchEngineError:
    """It killed the worker twice, alone."""
    return BatchEngineError(
        "BE2303",
        "this session ended the worker process twice while running alone",
        why="it was stopped so that other sessions can go on",
        fix="report it with the daemon's log; do not send the same prompt again",
        http_status=500,
        api_code="session_quarantined",
        details={"request_id": turn.generation.request_id},
    )


def no_such_session(given: str, candidates: Sequence[str]) -> BatchEngineError:
    """No session in memory has this id, or several begin like this."""
    if candidates:
        return BatchEngineError(
            "BE3002",
            f"{len(candidates)} sessions are called {given}...",
            why=", ".join(sorted(candidates)[:8]),
            fix="name one of them in full",
            http_status=409,
            error_type="invalid_request_error",
            api_code="session_ambiguous",
        )
    return BatchEngineError(
        "BE3001",
        f"there is no session {given} on any lane",
        why="it is unknown, or so long idle that only the ledger knows it",
        fix="`batchengine sessions` lists those that can be moved",
        http_status=404,
        error_type="invalid_request_error",
        api_code="session_not_found",
    )


def no_such_lane(name: str, lanes: Sequence[str]) -> BatchEngineError:
    """A lane that is not configured."""
    return BatchEngineError(
        "BE3003",
        f"there is no lane {name}",
        why=f"this daemon has: {', '.join(lanes)}",
        fix="name one of these",
        http_status=400,
        error_type="invalid_request_error",
        api_code="unknown_lane",
    )


def no_other_lane(lane: str) -> BatchEngineError:
    """Nowhere to go."""
    return BatchEngineError(
        "BE3004",
        f"there is no lane to move to from {lane or 'here'}",
        why="no other lane is up and has a free seat",
        fix="configure a second [[lane]], or wait until one is back",
        http_status=409,
        error_type="invalid_request_error",
        api_code="no_other_lane",
    )


def not_moved(lane: str, why: str, *, may_be_gone: bool = False) -> BatchEngineError:
    """A hand-over that was given up; nothing changed, unless somebody dropped the session."""
    return BatchEngineError(
        "BE3005",
        f"the session stays on lane {lane}" if lane else "the session is on no lane yet",
        why=why,
        fix="ask again if `batchengine sessions` still lists it"
        if may_be_gone
        else "nothing is lost: ask again later, or name another lane",
        http_status=409,
        error_type="invalid_request_error",
        api_code="not_moved",
    )


def _invalid(param: str, what: str, fix: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1207",
        what,
        fix=fix,
        http_status=400,
        error_type="invalid_request_error",
        api_code="invalid_request",
        param=param,
    )


def damaged(error: StoreError) -> BatchEngineError:
    """The ledger cannot tell this session's history.

    What the store says names rows and the store's own names of sessions: that is for the log.
    """
    return BatchEngineError(
        "BE2401",
        "this session's history is damaged",
        why=error.why or "the ledger cannot read it",
        fix="use another session id; other sessions are not affected",
        api_code="session_damaged",
    )


def unknown_session(session_id: str) -> BatchEngineError:
    """No such session, or it is somebody else's: one answer for both."""
    return BatchEngineError(
        "BE2403",
        f"there is no session {session_id}",
        why="it was never used here, was dropped, or belongs to another key",
        fix="send the whole conversation; a session begins with its first request",
        http_status=404,
        error_type="invalid_request_error",
        api_code="session_not_found",
    )


def session_dropped(session_id: str) -> BatchEngineError:
    """Of those who were reading or waiting when somebody dropped it."""
    return BatchEngineError(
        "BE2414",
        f"session {session_id} was dropped while it computed",
        why="its client or the operator asked for that; its history is gone",
        fix="send the whole conversation again if the answer is still wanted",
        http_status=404,
        error_type="invalid_request_error",
        api_code="session_not_found",
    )


def not_dropped(session_id: str, waited_s: float) -> BatchEngineError:
    """Its turns were ended, but what computes or moves it did not let go."""
    return BatchEngineError(
        "BE2416",
        f"session {session_id} is not dropped yet",
        why=f"its turns were ended, but its lane has not let go of it in {waited_s:.0f} s",
        fix="ask again; `batchengine ps` shows what its lane does",
        http_status=409,
        error_type="invalid_request_error",
        api_code="session_busy",
    )


def nothing_to_resume(session_id: str) -> BatchEngineError:
    """The session has no turn, or another request began one meanwhile."""
    return BatchEngineError(
        "BE2404",
        f"session {session_id} has no turn to resume",
        why="it has computed nothing yet, its last turn was written by an older program or for"
        " another tokenizer, or another request came first",
        fix="send the request itself",
        http_status=409,
        error_type="invalid_request_error",
        api_code="nothing_to_resume",
    )


def turn_followed(session_id: str, turn_id: str, *, is_known: bool) -> BatchEngineError:
    """The rest of another turn would be spliced onto what the reader has."""
    return BatchEngineError(
        "BE2417",
        f"turn {turn_id} cannot be resumed",
        why=f"another turn of session {session_id} followed it"
        if is_known
        else f"session {session_id} has no such turn: its history was edited, or restored from a"
        " time before it",
        fix="GET /v1/sessions/ID lists the session's turns; send the request itself to have its"
        " answer, with its Idempotency-Key if it had one",
        http_status=409,
        error_type="invalid_request_error",
        api_code="turn_followed",
    )


def resumed_elsewhere() -> BatchEngineError:
    """A second reader took the stream over: the newest connection is the one that lives."""
    return BatchEngineError(
        "BE2405",
        "this stream was resumed by another connection",
        why="a turn has one reader, and the newest one wins",
        fix="read the other stream, or resume again to take it back",
        http_status=409,
        error_type="invalid_request_error",
        api_code="resumed_elsewhere",
    )


def other_request_of_key() -> BatchEngineError:
    """An idempotency key names one request."""
    return BatchEngineError(
        "BE2406",
        "this idempotency key was used for another request",
        why="the prompt, a limit or the sampling is not what was sent with it, or the answer is"
        " gone: the session's history was edited since",
        fix="use a new key for a new request",
        http_status=409,
        error_type="invalid_request_error",
        api_code="idempotency_conflict",
    )


def in_quarantine(session_id: str, strikes: int) -> BatchEngineError:
    """It ended a worker or the engine again and again, while nobody else was computing."""
    return BatchEngineError(
        "BE2303",
        f"session {session_id} is quarantined",
        why=f"it ended the process that computed it {strikes} times while running alone",
        fix="report it with the daemon's log; drop the session to lift the quarantine",
        api_code="session_quarantined",
    )


def session_in_use(session_id: str, wanted: str) -> BatchEngineError:
    """It computes now."""
    return BatchEngineError(
        "BE2407",
        f"session {session_id} cannot be {wanted} now",
        why="it has a request that is not finished",
        fix="wait for the request to end, or cancel it",
        http_status=409,
        error_type="invalid_request_error",
        api_code="session_busy",
        retry_after_ms=1000,
    )


def session_exists(session_id: str) -> BatchEngineError:
    """A fork needs a name of its own."""
    return BatchEngineError(
        "BE2408",
        f"there is a session {session_id} already",
        fix="choose another id for the fork",
        http_status=409,
        error_type="invalid_request_error",
        api_code="session_exists",
    )


def from_token_outside(from_token: int, tokens_max: int) -> BatchEngineError:
    """A resume begins inside the answer."""
    return BatchEngineError(
        "BE2409",
        f"the answer has no token {from_token}",
        why=f"it may have up to {tokens_max}, and the first one is 0",
        fix="name how many tokens were received",
        http_status=400,
        error_type="invalid_request_error",
        api_code="invalid_value",
        param="from",
    )


def not_durable(error: BaseException) -> BatchEngineError:
    """The ledger could not take it."""
    return BatchEngineError(
        "BE2402",
        "the turn could not be made durable",
        why=str(error),
        fix="free space where the store lies, or look into the daemon's log; then send it again",
        http_status=503,
        api_code="durability_unavailable",
    )
