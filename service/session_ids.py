"""Session ids: turns a client's names for sessions into ids that cannot cross tenants.

A session id that this daemon hands out is `be_` + 16 letters of body + 16 letters of tag, and for
one of several timelines of a session a dot and its number; the tag
ties it to one tenant, so an id is used unchanged only for the tenant that owns it. Anything
else is a client's own name for a session, hashed together with the tenant. The engine makes
`idem_` ids out of idempotency keys; these are used unchanged, as the engine looks sessions up by
tenant and id.
"""

from __future__ import annotations

import base64
import hashlib
import re

from batchengine import errors

ID_CHARS_MAX = 4096  # of a client's name for a session
NAME_CHARS_MAX = 64  # of it, as listings show it
CALL_CHARS_MAX = 256  # of a tool call's id
_OURS = re.compile(r"(be_[a-z2-7]{16}([a-z2-7]{16}))(\.[1-9][0-9]{0,8})?")
_OF_KEY = re.compile(r"idem_[0-9a-f]{32}")


def printable(name: str) -> str:
    """A name from outside, safe to repeat in an error: short and without halves of characters."""
    return name[:64].encode("utf-8", "replace").decode("utf-8")


def is_kept(session_id: str) -> bool:
    """Whether a session outlives its request; False for that of a request which names none."""
    return bool(session_id) and not session_id.startswith("be_req_")


def shown_name(client_id: str) -> str:
    """A client's own name for a session as listings keep it: one line, NAME_CHARS_MAX characters at
    most; "" for an id that this daemon made."""
    if not client_id.isprintable() or _OURS.fullmatch(client_id) or _OF_KEY.fullmatch(client_id):
        return ""
    return client_id[:NAME_CHARS_MAX]


def session_key(tenant: str, client_id: str, param: str = "session_id") -> str:
    """A session's id: a handed-out id unchanged for its owner, else a hash of tenant and id."""
    if len(client_id) > ID_CHARS_MAX or not client_id.isprintable():
        raise errors.INVALID_FIELD(
            param=param,
            what=f"{param} is not a usable session id",
            why=f"it must be printable and at most {ID_CHARS_MAX} characters",
            fix="send a short identifier, such as a UUID",
        )
    ours = _OURS.fullmatch(client_id)
    if ours is not None and ours[2] == _tag(tenant, client_id[3:19]):
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
