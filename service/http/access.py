"""Access checks: API keys, the Host and Origin headers, the type of the body.

Owns the checks that run before any route. Keys are compared by their SHA-256, in constant time;
once a key exists, only `server.keyless_routes` and the page of the dashboard need none.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import cast

from multidict import CIMultiDictProxy

from batchengine import errors
from batchengine.config import ApiKey, Config, openness
from service.protocols.carriers import Caller
from service.session_ids import printable

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(:[0-9]{0,5})?")
FREE_FAILURES = 10  # of an address in FAILURES_SECONDS, until its attempts wait
FAILURES_SECONDS = 60.0
WAIT_SECONDS = 0.1  # for each attempt of the address that waits
WAIT_SECONDS_MAX = 2.0
ADDRESSES_MAX = 4096
OWN_HEADERS = ("x-batchengine-session-id", "Last-Event-ID", "Authorization", "x-api-key")
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class Keyring:
    """The configured API keys, kept as digests only."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._callers = [(_digest(key.key), Caller(key.name, key.sla_class)) for key in keys]

    def __repr__(self) -> str:
        return f"<Keyring {len(self._callers)} keys>"

    def identify(self, headers: CIMultiDictProxy[str]) -> Caller:
        """The caller behind `Authorization: Bearer` or `x-api-key`; raises 401."""
        if not self._callers:
            return Caller()
        sent = _sent_key(headers)
        digest = _digest(sent)
        found: Caller | None = None
        for known, caller in self._callers:  # every key is compared: no early exit to time
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise errors.INVALID_API_KEY(problem="wrong" if sent else "missing")
        return found


@dataclass(slots=True)
class _Address:
    failed: int = 0
    since: float = 0.0  # of the first failure that counts
    waiting: int = 0
    accepted: set[str] = field(default_factory=set[str])  # names of keys that were right


class Attempts:
    """Wrong keys per client address: after FREE_FAILURES in a minute, attempts from there wait.

    Right keys wait as wrong ones do, or else the wait would show which is right; but never a key
    that was right from this address before, and none is refused. So a client is delayed once, by
    WAIT_SECONDS_MAX at most, by others of its address.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, _Address] = {}  # the least recently used first

    def must_wait(self, address: str, caller: Caller | None, now: float) -> bool:
        """Whether an attempt with the key of `caller` (None = a wrong key) has to wait."""
        known = self._known(address, now)
        is_accepted = caller is not None and caller.tenant in known.accepted
        return known.failed >= FREE_FAILURES and not is_accepted

    async def wait(self, address: str, caller: Caller | None, now: float) -> None:
        """Counts an attempt, and returns when it may be answered."""
        must_wait = self.must_wait(address, caller, now)
        known = self._known(address, now)
        if caller is None:
            known.failed += 1
        if must_wait:
            known.waiting += 1
            try:
                await asyncio.sleep(min(WAIT_SECONDS_MAX, WAIT_SECONDS * known.waiting))
            finally:
                known.waiting -= 1
        if caller is not None:
            known.accepted.add(caller.tenant)

    def _known(self, address: str, now: float) -> _Address:
        known = self._addresses.pop(address, None) or _Address(since=now)
        if now - known.since > FAILURES_SECONDS:
            known.failed, known.since = 0, now
        self._addresses[address] = known
        if len(self._addresses) > ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]
        return known


def address_of(peer: object) -> str:
    """The client's address as it counts for failed keys: of IPv6 the network of 64 bits, unless it
    stands for an IPv4 address."""
    host = str(cast("Sequence[object]", peer)[0]) if isinstance(peer, tuple) and peer else ""
    if ":" not in host:
        return host
    address = IPv6Address(host)
    return str(address.ipv4_mapped or address.packed[:8].hex())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _sent_key(headers: CIMultiDictProxy[str]) -> str:
    scheme, _, value = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    return headers.get("x-api-key", "").strip()


def has_key(headers: CIMultiDictProxy[str]) -> bool:
    """Whether a request brings an API key, right or wrong."""
    return "Authorization" in headers or "x-api-key" in headers


def key_lines(path: Path) -> list[str]:
    """The keys in a file, one per line, # comments left out; refuses a file others can read."""
    try:
        why = openness(str(path))
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        fix = "name a text file with one key per line"
        raise errors.API_KEY_FILE(
            path=path, problem="cannot be read", why=reason or "unreadable", fix=fix
        ) from None
    if why:
        problem = "is open to other users"
        raise errors.API_KEY_FILE(path=path, problem=problem, why=why, fix=f"chmod 600 {path}")
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


class OriginPolicy:
    """The hosts and origins that the configuration allows."""

    def __init__(self, config: Config) -> None:
        names = {*config.server.allowed_hosts, *LOOPBACK, config.server.host}
        self._hosts = {_host_name(name) for name in names if name} - {"0.0.0.0", "::"}
        self._origins = {origin.lower().rstrip("/") for origin in config.server.allowed_origins}

    def check(self, headers: CIMultiDictProxy[str]) -> None:
        """Raises BatchEngineError 400 or 403 for a host or origin that is not allowed."""
        hosts = headers.getall("Host", [])
        if len(hosts) != 1 or not hosts[0]:
            raise errors.MALFORMED_HTTP()
        if not _HOST.fullmatch(hosts[0]) or _host_name(hosts[0]) not in self._hosts:
            raise errors.WRONG_HOST()
        origins = headers.getall("Origin", [])
        if not origins and _fetch_site(headers) in ("cross-site", "same-site"):
            # an image or a link on a page: browsers send no Origin
            raise errors.WRONG_ORIGIN(origin="the page's origin")
        for origin in origins:
            own = (f"http://{hosts[0]}".lower(), f"https://{hosts[0]}".lower())
            if origin.lower() not in self._origins and origin.lower() not in own:
                raise errors.WRONG_ORIGIN(origin=printable(origin))

    def consent(self, headers: CIMultiDictProxy[str]) -> dict[str, str]:
        """The headers that let a page of an allowed origin read the answer (CORS); none for
        others."""
        origin = headers.get("Origin", "")
        if origin.lower() not in self._origins:
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "*",
            "Vary": "Origin",
        }


def check_changes(headers: CIMultiDictProxy[str]) -> None:
    """Raises 403 for a GET that changes something and that a page of another site could send.

    Browsers on plain HTTP send neither Origin nor Sec-Fetch-Site with an image; but no page can
    add one of OWN_HEADERS without consent (CORS), which allowed origins alone get.
    """
    could_be_page = "Mozilla/" in headers.get("User-Agent", "") or "Referer" in headers
    is_own = _fetch_site(headers) in ("same-origin", "none") or "Origin" in headers
    if could_be_page and not is_own and not any(name in headers for name in OWN_HEADERS):
        raise errors.PAGE_REFUSED(header=OWN_HEADERS[0])


def _fetch_site(headers: CIMultiDictProxy[str]) -> str:
    return headers.get("Sec-Fetch-Site", "").lower()


def check_content(headers: Mapping[str, str], content_type: str, charset: str | None) -> None:
    """Raises 415 unless the body is plain, uncompressed application/json in UTF-8."""
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise errors.CONTENT_ENCODED(seen=encoding)
    if "Content-Type" not in headers:
        raise errors.WRONG_CONTENT_TYPE(seen="missing")
    if content_type != "application/json" or (charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise errors.WRONG_CONTENT_TYPE(seen=repr(headers["Content-Type"]))


def _host_name(host: str) -> str:
    """Lower-case name without port and without a trailing dot: `[::1]:7717` -> `::1`."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.rstrip(".")
