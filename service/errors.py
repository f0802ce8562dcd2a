"""The errors of the HTTP service: one constructor per way a request can be wrong, one JSON shape.

Owns the codes BE1700-BE1749 and the OpenAI error object. Refuses to let an unexpected exception
tell a client anything but its own error code: paths, addresses and prompts stay inside.
"""

from __future__ import annotations

import msgspec

from batchengine.core import BatchEngineError

INVALID = "invalid_request_error"

# error_type of the OpenAI object by HTTP status, for errors that aiohttp itself raises
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def error_object(error: BatchEngineError) -> dict[str, object]:
    """The OpenAI error object: message, type, param, code, and our what, why, fix beside them."""
    body: dict[str, object] = {
        "message": str(error),
        "type": error.error_type,
        "param": error.param,
        "code": error.api_code,
        "batchengine_code": error.code,
        "what": error.what,
        "why": error.why,
        "fix": error.fix,
    }
    body.update(error.details)
    return {"error": body}


def error_bytes(error: BatchEngineError) -> bytes:
    """The error object as JSON."""
    return msgspec.json.encode(error_object(error))


def error_headers(error: BatchEngineError) -> dict[str, str]:
    """Retry headers that the OpenAI and Anthropic SDKs obey; only where a retry makes sense."""
    headers: dict[str, str] = {}
    if error.http_status in (429, 503):
        retry_ms = error.retry_after_ms if error.retry_after_ms is not None else 1000
        headers["Retry-After"] = str(max(1, -(-retry_ms // 1000)))
        headers["retry-after-ms"] = str(max(1, retry_ms))
        headers["x-should-retry"] = "true"
    elif error.http_status >= 400:
        headers["x-should-retry"] = "false"
    if error.http_status == 405 and "allowed" in error.details:
        headers["Allow"] = str(error.details["allowed"])
    if error.http_status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="batchengine"'
    return headers


def invalid_json(why: str, param: str | None = None) -> BatchEngineError:
    return BatchEngineError(
        "BE1700",
        "the request body is not valid JSON",
        why=why,
        fix="send one UTF-8 JSON object",
        http_status=400,
        error_type=INVALID,
        api_code="invalid_json",
        param=param,
    )


def invalid_field(
    param: str | None, what: str, *, why: str = "", fix: str = "", api_code: str = "invalid_value"
) -> BatchEngineError:
    return BatchEngineError(
        "BE1701",
        what,
        why=why,
        fix=fix,
        http_status=400,
        error_type=INVALID,
        api_code=api_code,
        param=param,
    )


def unsupported_field(param: str, what: str, fix: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1704",
        what,
        why="this daemon does not implement it and will not pretend to",
        fix=fix,
        http_status=400,
        error_type=INVALID,
        api_code="unsupported_parameter",
        param=param,
    )


def unknown_fields(names: list[str]) -> BatchEngineError:
    listing = ", ".join(names[:8])
    return BatchEngineError(
        "BE1722",
        f"unknown fields in strict mode: {listing}",
        why="?strict=1 turns every field this daemon does not know into an error",
        fix="remove them, or drop ?strict=1",
        http_status=400,
        error_type=INVALID,
        api_code="unknown_parameter",
        param=names[0],
    )


def unknown_model(asked: str, served: list[str]) -> BatchEngineError:
    return BatchEngineError(
        "BE1702",
        f"the model {asked[:80]!r} is not served here",
        why="this daemon serves one model and never substitutes another",
        fix="use one of: " + ", ".join(served),
        http_status=404,
        error_type=INVALID,
        api_code="model_not_found",
        param="model",
    )


def prompt_too_long(
    tokens: int, context_tokens: int, param: str, *, counted: bool
) -> BatchEngineError:
    """`counted` False = an estimate from the size of the text, made before tokenising."""
    shown = f"{tokens:,}" if counted else f"at least {tokens:,}"
    return BatchEngineError(
        "BE1203",
        f"prompt does not fit: {shown} tokens, the context holds {context_tokens:,}",
        why="a prompt is never truncated",
        fix=f"shorten it below {context_tokens:,} tokens, or start the daemon with a larger --ctx",
        http_status=400,
        error_type=INVALID,
        api_code="context_length_exceeded",
        param=param,
        details={"n_prompt_tokens": tokens, "n_ctx": context_tokens},
    )


def answer_too_long(
    tokens: int, tokens_max: int, context_tokens: int, param: str
) -> BatchEngineError:
    """The prompt fits, the answer asked for does not fit behind it."""
    return BatchEngineError(
        "BE1203",
        f"prompt does not fit: {tokens:,} tokens + max {tokens_max:,} > {context_tokens:,}",
        why="neither prompt nor answer is cut in secret",
        fix=f"ask for at most {context_tokens - tokens:,} tokens, shorten the prompt, or start the"
        " daemon with a larger --ctx",
        http_status=400,
        error_type=INVALID,
        api_code="context_length_exceeded",
        param=param,
        details={"n_prompt_tokens": tokens, "n_ctx": context_tokens},
    )


def body_too_large(bytes_max: int) -> BatchEngineError:
    return BatchEngineError(
        "BE1705",
        f"the request body is larger than {bytes_max:,} bytes",
        fix="send a smaller body; a prompt that long does not fit the context either",
        http_status=413,
        error_type=INVALID,
        api_code="request_too_large",
    )


def wrong_content_type(seen: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1706",
        f"the content type is {seen[:60]!r}" if seen else "the content type is missing",
        why="a browser may send other types across sites without asking",
        fix="send Content-Type: application/json (UTF-8)",
        http_status=415,
        error_type=INVALID,
        api_code="unsupported_media_type",
    )


def content_encoded(seen: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1707",
        f"Content-Encoding {seen[:40]!r} is refused",
        why="a few compressed bytes can unpack into gigabytes",
        fix="send the body uncompressed",
        http_status=415,
        error_type=INVALID,
        api_code="unsupported_content_encoding",
    )


def wrong_host() -> BatchEngineError:
    return BatchEngineError(
        "BE1708",
        "the Host header names a host this daemon does not answer for",
        why="a web page could rebind its own name to this address",
        fix="use the address the daemon listens on, or start it with --allow-host NAME",
        http_status=403,
        error_type="permission_error",
        api_code="host_not_allowed",
    )


def wrong_origin() -> BatchEngineError:
    return BatchEngineError(
        "BE1709",
        "requests from this web origin are refused",
        why="a page in a browser must not drive the daemon unasked",
        fix="call the daemon from a program, not from another site's page",
        http_status=403,
        error_type="permission_error",
        api_code="origin_not_allowed",
    )


def unauthorised(sent: bool) -> BatchEngineError:
    return BatchEngineError(
        "BE1710",
        "the API key is wrong" if sent else "an API key is required",
        why="this daemon was started with API keys, which cover every route",
        fix="send Authorization: Bearer KEY",
        http_status=401,
        error_type="authentication_error",
        api_code="invalid_api_key",
    )


def unknown_route(method: str, path: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1711",
        f"there is no route {method} {path[:80]}",
        fix="POST /v1/chat/completions or /v1/completions; GET /v1/models, /v1/sessions,"
        " /v1/stream, /health, /metrics",
        http_status=404,
        error_type="not_found_error",
        api_code="route_not_found",
    )


def wrong_method(method: str, allowed: list[str]) -> BatchEngineError:
    return BatchEngineError(
        "BE1712",
        f"{method} is not possible on this route",
        fix="use " + " or ".join(name for name in allowed if name != "HEAD"),
        http_status=405,
        error_type=INVALID,
        api_code="method_not_allowed",
        details={"allowed": ", ".join(allowed)},  # the Allow header too
    )


def not_supported(what: str, fix: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1713",
        what,
        fix=fix,
        http_status=501,
        error_type="not_supported_error",
        api_code="not_supported",
    )


def too_many_connections(connections_max: int) -> BatchEngineError:
    return BatchEngineError(
        "BE1714",
        f"all {connections_max:,} connections are in use",
        fix="retry, or raise the connection limit",
        http_status=503,
        api_code="too_many_connections",
        retry_after_ms=1000,
    )


def still_loading(progress: float) -> BatchEngineError:
    return BatchEngineError(
        "BE1715",
        f"the model is still loading ({round(100 * progress)} %)",
        fix="retry; GET /health turns to 200 when it is ready",
        http_status=503,
        api_code="loading_model",
        retry_after_ms=1000,
    )


def draining() -> BatchEngineError:
    return BatchEngineError(
        "BE1716",
        "the daemon is draining",
        why="it finishes what is running and then stops or restarts",
        fix="retry in a few seconds",
        http_status=503,
        api_code="draining",
        retry_after_ms=5000,
    )


def client_too_slow(seconds: float) -> BatchEngineError:
    return BatchEngineError(
        "BE1717",
        f"the client read nothing for {seconds:g} s",
        fix="read the stream as it arrives",
        http_status=408,
        error_type=INVALID,
        api_code="client_too_slow",
    )


def body_too_slow(seconds: float) -> BatchEngineError:
    return BatchEngineError(
        "BE1718",
        f"the request body did not arrive within {seconds:g} s",
        fix="send the whole body at once",
        http_status=408,
        error_type=INVALID,
        api_code="request_timeout",
    )


def internal(request_id: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1719",
        f"internal error in request {request_id}",
        why="the daemon's log holds the details under that id",
        fix="retry; if it happens again, report it with the log",
        http_status=500,
        api_code="internal_error",
    )


def too_many_bodies(bytes_max: int) -> BatchEngineError:
    return BatchEngineError(
        "BE1733",
        f"request bodies of more than {bytes_max:,} bytes are on their way at once",
        why="they are held in memory until they are read and tokenised",
        fix="retry after the time given, or send smaller bodies",
        http_status=503,
        api_code="too_many_bodies",
        retry_after_ms=2000,
    )


def malformed_http(status: int) -> BatchEngineError:
    return BatchEngineError(
        "BE1720",
        "the request is not well-formed HTTP/1.1",
        fix="send one Host header, printable headers below 8 KiB, and no conflicting lengths",
        http_status=status,
        error_type=INVALID,
        api_code="malformed_http",
    )


def cancelled() -> BatchEngineError:
    return BatchEngineError(
        "BE1724",
        "the request was cancelled",
        why="the operator of the daemon called it off",
        fix="ask before sending it again",
        http_status=409,
        error_type=INVALID,
        api_code="cancelled",
    )


def shed(running: int, limit: int) -> BatchEngineError:
    return BatchEngineError(
        "BE1723",
        f"{running:,} requests are open, the limit is {limit:,}",
        fix="retry after the time given",
        http_status=429,
        error_type="rate_limit_error",
        api_code="too_many_requests",
        retry_after_ms=2000,
    )


def unknown_session(given: str, *, operator: bool = False) -> BatchEngineError:
    """No such session, or somebody else's: one answer for both, unless the operator asks."""
    return BatchEngineError(
        "BE1725",
        f"there is no session {given[:80]}",
        why="it was never used here or was dropped"
        if operator
        else "it was never used here, was dropped, or belongs to another key",
        fix="see `batchengine sessions --all`; write the client's own id, or 4 or more letters of"
        " ours"
        if operator
        else "use the x-batchengine-session-id of an answer, or the session id you sent",
        http_status=404,
        error_type="not_found_error",
        api_code="session_not_found",
    )


def unknown_key(given: str, keys: list[str]) -> BatchEngineError:
    """The operator named an API key that is not configured, and that left no session behind."""
    return BatchEngineError(
        "BE1731",
        f"there is no API key called {given[:80]!r}",
        why="the configuration has none of that name, and no session of such a key is stored",
        fix=f"name one of: {', '.join(keys)}" if keys else "leave --key-name out: none is set",
        http_status=404,
        error_type="not_found_error",
        api_code="session_not_found",
        param="tenant",
    )


def ambiguous_session(given: str, found: list[tuple[str, str]]) -> BatchEngineError:
    """More than one session goes by this name."""
    shown = [f"{name} (key {tenant})" if tenant else name for tenant, name in found[:8]]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return BatchEngineError(
        "BE1726",
        f"{given[:80]} means {len(found)} sessions",
        why=", ".join(shown) + more,
        fix="give more characters, or the key's name with --key-name",
        http_status=409,
        error_type=INVALID,
        api_code="ambiguous_session",
    )


def nothing_to_explain(given: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1727",
        f"nothing is known about {given[:80]}",
        why="no request or session of yours has that id, or its decision is forgotten by now",
        fix="use the x-request-id or x-batchengine-session-id of an answer",
        http_status=404,
        error_type="not_found_error",
        api_code="not_found",
    )


def unknown_lane(given: str, lanes: list[str]) -> BatchEngineError:
    return BatchEngineError(
        "BE1728",
        f"there is no lane {given[:80]!r}",
        fix="use " + " or ".join(lanes),
        http_status=400,
        error_type=INVALID,
        api_code="unknown_lane",
        param="to",
    )


def one_lane(lanes: list[str]) -> BatchEngineError:
    return BatchEngineError(
        "BE1729",
        "there is no other lane to move to",
        why=f"this daemon has one lane, {', '.join(lanes)}",
        fix="start it with --lanes 2, or write two [[lane]] tables into its configuration",
        http_status=409,
        error_type=INVALID,
        api_code="one_lane",
    )


def session_at_rest(session_id: str) -> BatchEngineError:
    """Nothing to move: it is on disk, and no lane has anything of it."""
    return BatchEngineError(
        "BE1732",
        f"session {session_id} is on no lane",
        why="it rests in the ledger since the daemon started, or was idle for long",
        fix="nothing is lost: its next request chooses a lane, a fast one for class interactive",
        http_status=409,
        error_type=INVALID,
        api_code="not_moved",
    )


def session_exists(given: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1730",
        f"there is a session {given[:80]} already",
        why="a fork begins a session, it replaces none",
        fix="choose another id for the fork, or drop that session first",
        http_status=409,
        error_type=INVALID,
        api_code="session_exists",
        param="session_id",
    )
