"""Which session a request belongs to: carriers in a fixed order, and ids that cannot cross tenants.

A session id we hand out is `be_` + 16 letters of body + 16 letters of tag; the tag ties it to one
tenant, so an id is taken as it stands only from the tenant that owns it, and anything else is a
client's own name for a session, hashed together with the tenant. The engine makes `idem_` ids out
of idempotency keys; they stand as they are, since it looks sessions up by tenant and id.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from multidict import CIMultiDictProxy

from service import errors
from service.schema import ChatRequest, CompletionRequest

ID_CHARS_MAX = 4096  # beyond this it is not an id
_OURS = re.compile(r"be_[a-z2-7]{32}")
_OF_KEY = re.compile(r"idem_[0-9a-f]{32}")
_GENERIC = re.compile(r"x-.+-session-id", re.IGNORECASE)

# API 1.5, after the body's own field; names are case-insensitive
HEADERS_EXACT = (
    "x-batchengine-session-id",
    "x-dynamo-session-id",
    "x-claude-code-agent-id",
    "x-claude-code-session-id",
    "x-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "conversation_id",
    "x-session-affinity",
)
HEADER_LAST = "x-conversation-id"
# They match the generic rule but name another session or another thing.
NOT_SESSIONS = {"x-parent-session-id", "x-dynamo-parent-session-id"}


@dataclass(frozen=True, slots=True)
class SessionName:
    """Where the id came from (for logs and tests) and the tenant-bound key."""

    carrier: str
    session_id: str


def resolve(
    body: ChatRequest | CompletionRequest, headers: CIMultiDictProxy[str], tenant: str
) -> SessionName | None:
    """The session of a request, or None for an anonymous one; raises 400 for an absurd id."""
    for carrier, value in carriers(body, headers):
        value = value.strip()
        if value:
            return SessionName(carrier, session_key(tenant, value, carrier))
    return None


def carriers(
    body: ChatRequest | CompletionRequest, headers: CIMultiDictProxy[str]
) -> Iterable[tuple[str, str]]:
    """Every carrier that is set, first match first."""
    if body.batchengine is not None and body.batchengine.session_id is not None:
        yield "batchengine.session_id", body.batchengine.session_id
    for name in HEADERS_EXACT:
        if name in headers:
            yield name, headers[name]
    for name in headers:
        lower = name.lower()
        if lower not in NOT_SESSIONS and lower not in HEADERS_EXACT and _GENERIC.fullmatch(lower):
            yield lower, headers[name]
    if HEADER_LAST in headers:
        yield HEADER_LAST, headers[HEADER_LAST]
    if body.session_id is not None:
        yield "session_id", body.session_id
    if body.prompt_cache_key is not None:
        yield "prompt_cache_key", body.prompt_cache_key
    if body.metadata is not None and isinstance(body.metadata.get("session_id"), str):
        yield "metadata.session_id", body.metadata["session_id"]


def session_key(tenant: str, client_id: str, param: str = "session_id") -> str:
    """The id of a session: our own id unchanged for its owner, else a hash of tenant and id."""
    if len(client_id) > ID_CHARS_MAX or not client_id.isprintable():
        raise errors.invalid_field(
            param,
            f"{param} is not a usable session id",
            why=f"it must be printable and at most {ID_CHARS_MAX} characters",
            fix="send a short identifier, such as a UUID",
        )
    if _OURS.fullmatch(client_id) and client_id[19:] == _tag(tenant, client_id[3:19]):
        return client_id
    if _OF_KEY.fullmatch(client_id):
        return client_id
    body = _letters(b"session", tenant, client_id)
    return f"be_{body}{_tag(tenant, body)}"


def _tag(tenant: str, body: str) -> str:
    return _letters(b"tag", tenant, body)


def _letters(domain: bytes, *parts: str) -> str:
    """16 base32 letters of SHA-256 over length-prefixed parts: no two inputs read the same."""
    digest = hashlib.sha256(b"batchengine " + domain)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return base64.b32encode(digest.digest()[:10]).decode().lower()
