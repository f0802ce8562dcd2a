"""Every reason the engine refuses a request, in words a client can act on."""

from __future__ import annotations

from batchengine import cost
from batchengine.core import BatchEngineError, GenerationRequest
from batchengine.engine.turn import Turn


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
        http_status=503,
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
