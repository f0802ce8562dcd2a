"""The caller of a request, its session, and the SLA it asks for.

Clients carry these in many fields and headers. For each value the first carrier that sets it, in
the order below, wins. Model aliases carry a class for clients that can set nothing else, and are
rows of /v1/models.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from multidict import CIMultiDictProxy

from batchengine import errors
from batchengine.core import Sla, SlaClass
from service.protocols.schema import Common, Extension, binary32
from service.session_ids import session_key, shown_name

if TYPE_CHECKING:
    from batchengine.config import Config  # a text process, which reads bodies, has no settings


@dataclass(frozen=True, slots=True)
class Caller:
    """The owner of a request, by its API key. `tenant` "" = no keys configured: one for all."""

    tenant: str = ""
    sla_class: SlaClass | None = None


ALIAS_CLASSES = (SlaClass.INTERACTIVE, SlaClass.BACKGROUND, SlaClass.BATCH)
MILLIS_MAX = 86_400_000.0
PRIORITY_MAX = 1 << 31

# service_tier -> class; None = that of the key or the configuration
TIERS: dict[str, SlaClass | None] = {
    "priority": SlaClass.INTERACTIVE,
    "fast": SlaClass.INTERACTIVE,
    "ultrafast": SlaClass.INTERACTIVE,
    "auto": None,
    "default": None,
    "standard": None,
    "scale": None,
    "standard_only": SlaClass.STANDARD,
    "flex": SlaClass.BACKGROUND,
    "batch": SlaClass.BATCH,
}
SERVED_TIER = {
    SlaClass.INTERACTIVE: "priority",
    SlaClass.STANDARD: "default",
    SlaClass.BACKGROUND: "flex",
    SlaClass.BATCH: "flex",
}
HEADER_CLASS = "x-llm-d-inference-objective"
HEADERS_TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
HEADERS_TPOT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
HEADERS_TTLT = ("x-batchengine-ttlt-ms",)
HEADERS_PRIORITY = ("x-dynamo-request-priority", "x-dynamo-request-strict-priority")


# ---- the session ----

_GENERIC = re.compile(r"x-.+-session-id", re.IGNORECASE)

# in this order, after the body's own field; names are case-insensitive
HEADERS_EXACT = (
    "x-batchengine-session-id",
    "x-dynamo-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "x-session-id",
    "thread-id",  # Codex: the child's own, while its session-id is that of its root
    "session-id",
    "session_id",
    "conversation_id",
    "x-session-affinity",
)
HEADERS_LAST = ("x-conversation-id", "x-openwebui-chat-id")
HEADER_APPEND = "x-batchengine-append"
HEADER_FINAL = "x-dynamo-session-final"
HEADER_KEY = "Idempotency-Key"
SWITCHES = {"true": True, "false": False, "1": True, "0": False}
HEADER_AGENT = "x-claude-code-agent-id"  # a child, whose parent has the session id beside it
HEADERS_PARENT = (
    "x-batchengine-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-parent-session-id",
    "x-codex-parent-thread-id",
)
HEADER_RETRY = "x-stainless-retry-count"
USER_ID_CHARS_MAX = 4096
_EARLY_USER_ID = re.compile(r"user_[0-9a-f]+_account_[0-9a-f-]*_session_([0-9a-f-]{36})")
_read_user_id = msgspec.json.Decoder(dict[str, object]).decode


def session_of(body: Common, headers: CIMultiDictProxy[str], tenant: str) -> str | None:
    """The id of a request's session, None for an anonymous one; raises 400 for an unusable id."""
    for carrier, value in session_carriers(body, headers):
        value = value.strip()
        if value:
            return session_key(tenant, value, carrier)
    return None


def client_name(body: Common, headers: CIMultiDictProxy[str]) -> str:
    """What the client calls the session of its request, cut for listings; "" = nothing."""
    names = (value.strip() for _, value in session_carriers(body, headers))
    return shown_name(next(filter(None, names), ""))


def session_carriers(body: Common, headers: CIMultiDictProxy[str]) -> Iterable[tuple[str, str]]:
    """Every carrier that is set, first match first."""
    if body.batchengine is not None and body.batchengine.session_id is not None:
        yield "batchengine.session_id", body.batchengine.session_id
    for name in HEADERS_EXACT:
        if name in headers:
            yield name, headers[name]
    for name in headers:
        lower = name.lower()
        is_known = lower in HEADERS_EXACT or "parent" in lower
        if not is_known and _GENERIC.fullmatch(lower):
            yield lower, headers[name]
    for name in HEADERS_LAST:
        if name in headers:
            yield name, headers[name]
    if body.session_id is not None:
        yield "session_id", body.session_id
    if body.prompt_cache_key is not None:
        yield "prompt_cache_key", body.prompt_cache_key
    named = naming(body.metadata)
    if "session_id" in named:
        yield "metadata.session_id", named["session_id"]
    if "user_id" in named:
        yield from _of_user_id(named["user_id"])


def naming(metadata: Mapping[str, object] | None) -> dict[str, str]:
    """The fields of a body's metadata that may name its session."""
    found = {name: (metadata or {}).get(name) for name in ("session_id", "user_id")}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _of_user_id(user_id: str) -> Iterator[tuple[str, str]]:
    """The session in Claude Code's `metadata.user_id`: JSON, in its versions before 2.1 a text that
    ends with the session; others name a person."""
    if len(user_id) > USER_ID_CHARS_MAX:
        return
    early = _EARLY_USER_ID.fullmatch(user_id)
    if early is not None:
        yield "metadata.user_id", early[1]
    elif user_id.startswith("{"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            facts = _read_user_id(user_id)
            named = facts.get("session_id") or facts.get("sessionId")
            if isinstance(named, str):
                yield "metadata.user_id", named


def parent_of(body: Common, headers: CIMultiDictProxy[str], tenant: str) -> str | None:
    """The id of the session that started this one, None if no carrier names a usable one."""
    given = [] if body.batchengine is None else [body.batchengine.parent_session_id]
    given += [headers.get(name) for name in HEADERS_PARENT]
    if HEADER_AGENT in headers:
        given.append(headers.get("x-claude-code-session-id"))
    if "thread-id" in headers:
        given.append(headers.get("session-id"))
    for value in given:
        if value is not None and value.strip():
            parent = session_key(tenant, value.strip(), "parent_session_id")
            if parent != session_of(body, headers, tenant):  # as a root names itself
                return parent
    return None


def is_retry(headers: CIMultiDictProxy[str]) -> bool:
    """Whether the client's library has sent the same request before."""
    given = headers.get(HEADER_RETRY, "")
    return given.isascii() and given.isdecimal() and len(given) <= 9 and int(given) > 0


def appends(headers: CIMultiDictProxy[str], caller: Caller, config: Config) -> bool:
    """Whether requests of the caller hold new messages only; their bodies may say otherwise.

    Raises 400 for a header that says neither.
    """
    from batchengine.config import keys

    given = headers.get(HEADER_APPEND, "").strip().lower()
    if not given:
        return keys.key_of(config, caller.tenant).append
    if given not in SWITCHES:
        what, fix = f"{HEADER_APPEND} {given[:40]!r} is unknown", "use " + ", ".join(SWITCHES)
        raise errors.INVALID_FIELD(param=HEADER_APPEND, what=what, fix=fix)
    return SWITCHES[given]


# ---- the SLA ----


def model_names(model_id: str, aliases: tuple[str, ...]) -> list[str]:
    """Every id that /v1/models lists: the model, its aliases, and each with its class suffixes."""
    names: list[str] = []
    for name in dict.fromkeys((model_id, *aliases)):
        names.append(name)
        names.extend(f"{name}:{sla_class}" for sla_class in ALIAS_CLASSES)
    return names


def alias_class(model: str | None) -> SlaClass | None:
    """The class in a model id such as `qwen:background`."""
    suffix = (model or "").rpartition(":")[2]
    return next((c for c in ALIAS_CLASSES if suffix == c and model != suffix), None)


def sla_of(body: Common, headers: CIMultiDictProxy[str], caller: Caller, config: Config) -> Sla:
    """The SLA of one request; raises 400 naming the carrier with a wrong value.

    A class above the one that the caller's key may have is served as that one.
    """
    from batchengine.config import keys

    asked = body.batchengine or Extension()
    sla_class = next(_classes(body, headers, caller), config.sla.default_class)
    most = keys.class_max(config, caller.tenant)
    classes = list(SlaClass)
    if most is not None and classes.index(sla_class) < classes.index(most):
        sla_class = most
    return Sla(
        sla_class=sla_class,
        ttft_ms=_target(asked.ttft_ms, headers, HEADERS_TTFT),
        tpot_ms=_target(asked.tpot_ms, headers, HEADERS_TPOT),
        ttlt_ms=_target(asked.ttlt_ms, headers, HEADERS_TTLT),
        priority=next(_priorities(body, headers), 0),
    )


def _classes(body: Common, headers: CIMultiDictProxy[str], caller: Caller) -> Iterator[SlaClass]:
    """Classes in order of precedence; generated lazily, so a later carrier is not even parsed."""
    if body.batchengine is not None and body.batchengine.sla_class is not None:
        yield _class_of(body.batchengine.sla_class, "batchengine.class")
    if HEADER_CLASS in headers:
        yield _class_of(headers[HEADER_CLASS], HEADER_CLASS)
    if body.service_tier is not None:
        tier = body.service_tier
        if tier not in TIERS:
            raise errors.INVALID_FIELD(
                param="service_tier",
                what=f"service_tier {tier[:40]!r} is unknown",
                fix="use one of " + ", ".join(TIERS),
            )
        if (mapped := TIERS[tier]) is not None:
            yield mapped
    if body.speed == "fast":
        yield SlaClass.INTERACTIVE
    if (alias := alias_class(body.model)) is not None:
        yield alias
    if caller.sla_class is not None:
        yield caller.sla_class


def _class_of(text: str, param: str) -> SlaClass:
    name = text.strip().lower()
    if name not in set(SlaClass):
        what, fix = f"{param} {name[:40]!r} is unknown", "use one of " + ", ".join(SlaClass)
        raise errors.INVALID_FIELD(param=param, what=what, fix=fix)
    return SlaClass(name)


def _target(
    given: float | None, headers: CIMultiDictProxy[str], names: tuple[str, ...]
) -> float | None:
    if given is not None:
        return binary32(given)
    for name in names:
        if name in headers:
            return binary32(_number(headers[name], name, 0.001, MILLIS_MAX))
    return None


def _priorities(body: Common, headers: CIMultiDictProxy[str]) -> Iterator[int]:
    """Priorities in order of precedence; higher = sooner, so vLLM's top-level field is negated."""
    if body.batchengine is not None and body.batchengine.priority is not None:
        yield body.batchengine.priority
    hints = body.nvext.agent_hints if body.nvext else None
    if hints is not None:
        for value in (hints.priority, hints.strict_priority):
            if value is not None:
                yield value
    for name in HEADERS_PRIORITY:
        if name in headers:
            yield int(_number(headers[name], name, -PRIORITY_MAX, PRIORITY_MAX))
    if body.priority is not None:
        yield -body.priority


# ---- the client's patience ----

HEADERS_TIMEOUT = ("x-stainless-read-timeout", "x-stainless-timeout")  # seconds, or NOT_GIVEN


def patience_ms(headers: Mapping[str, str]) -> float | None:
    """How long the client waits for an answer without a byte of it; None = it does not say."""
    for name in HEADERS_TIMEOUT:
        text = headers.get(name, "")
        if text.isascii() and len(text) <= 32:
            with contextlib.suppress(ValueError):
                if 0.0 < (seconds := float(text)) <= MILLIS_MAX / 1000:
                    return 1000.0 * seconds
    return None


def _number(text: str, param: str, low: float, high: float) -> float:
    try:
        value = float(text) if len(text) <= 32 and text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # also refuses NaN
        raise errors.INVALID_FIELD(
            param=param,
            what=f"{param} has a wrong value",
            why=f"expected a number from {low:g} to {high:g}",
            fix=f"correct the header {param} or leave it out",
        )
    return value


# What headers of a request say: of a row the first one that is set, unless the body says it.
REQUEST_HEADERS = (
    ((*HEADERS_EXACT, "x-...-session-id", *HEADERS_LAST), "The session's name"),
    (HEADERS_PARENT, "Name of the session that started this one"),
    ((HEADER_APPEND,), "`true` = the messages are new ones, behind those of the session"),
    ((HEADER_FINAL,), "`true` = the session's last turn"),
    ((HEADER_CLASS,), "Class: " + ", ".join(f"`{one}`" for one in SlaClass)),
    (HEADERS_TTFT, "Target: time to the first token (ms)"),
    (HEADERS_TPOT, "Target: time of each further token (ms)"),
    (HEADERS_TTLT, "Target: time to the last token (ms)"),
    (HEADERS_PRIORITY, "Order among requests of one class; higher is sooner"),
    ((HEADER_KEY,), "Requests with the same key are computed once, and have the same answer"),
    (HEADERS_TIMEOUT, "How long the client waits for an answer without a stream (s)"),
)
