"""Names and addresses of peers, the [peers] table, and one file of the folder `peers.d`.

A peer comes from the configuration file (`[peers.NAME]`) or from `peers.d/NAME.toml`, both with
the one key `address`. Refuses names that a certificate could not carry.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from pathlib import Path

from batchengine import errors
from batchengine.config.settings import PeerConfig, PeersConfig
from batchengine.config.toml import Source, Table, build, table

FILE_BYTES_MAX = 64 << 10
NAME_RULE = "1 to 63 of a-z, 0-9 and -, not - at an end"
ADDRESS_RULE = "HOST:PORT, such as 10.0.0.2:7718 or [fd00::2]:7718"
UNREADABLE_FIX = (
    "let the daemon's user read it, or remove it: each .toml file of that folder is a peer"
)
CONTENT_FIX = 'write one line into it, address = "HOST:PORT", or remove it'
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def is_peer_name(name: str) -> bool:
    """Whether `name` may name a peer: it is a host name of one part."""
    return _NAME.fullmatch(name) is not None


def split_address(text: str) -> tuple[str, int] | None:
    """(host, port) of `HOST:PORT`, without the brackets of IPv6; None if it is none."""
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    if not (colon and host and host.isprintable() and port.isascii() and port.isdigit()):
        return None
    if (":" in host) != is_bracketed or " " in host or int(port) > 65535:
        return None
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`; names other than localhost count as open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def build_peers(source: Source, value: object) -> PeersConfig:
    """The [peers] table: settings, and one table per peer. Raises BatchEngineError."""
    given = table(source, value, "peers")
    settings = {key: item for key, item in given.items() if not isinstance(item, dict)}
    if "known" in settings:
        raise source.unknown("peers.known", ["listen", "name", "dir", "tls", "hold_bytes"])
    config = build(source, PeersConfig, settings, "peers")
    if config.listen and split_address(config.listen) is None:
        raise _wrong_address(source, "peers.listen", config.listen)
    if config.name and not is_peer_name(config.name):
        raise _wrong_name(source, "peers.name", config.name)
    if config.listen and not config.tls and not config.name:
        raise source.contradiction("peers.name", "is missing: without TLS no certificate has it")
    _check_plain(source, config.tls, "peers.listen", config.listen)
    known = tuple(
        _build_peer(source, name, item, f"peers.{name}", config.tls)
        for name, item in given.items()
        if name not in settings
    )
    return dataclasses.replace(config, known=known)


def read_peer_file(path: Path, *, tls: bool) -> PeerConfig:
    """The peer of `peers.d/NAME.toml`. Raises BatchEngineError naming file, key and line."""
    try:
        size = path.stat().st_size
    except OSError as error:
        why = (error.strerror or "").lower()
        raise errors.CONFIG_UNREADABLE(path=path, why=why, fix=UNREADABLE_FIX) from None
    if size > FILE_BYTES_MAX:
        why = f"it has {size:,} bytes, more than {FILE_BYTES_MAX:,}"
        raise errors.CONFIG_UNREADABLE(path=path, why=why, fix=CONTENT_FIX)
    source = Source.read(str(path), UNREADABLE_FIX)
    return _build_peer(source, path.stem, source.tree, "", tls)


def _build_peer(source: Source, name: str, value: object, dotted: str, tls: bool) -> PeerConfig:
    if not is_peer_name(name):
        raise _wrong_name(source, dotted or source.path, name)
    entry: Table = table(source, value, dotted)
    peer = build(source, PeerConfig, entry, dotted, PeerConfig(name=name))
    key = f"{dotted}.address" if dotted else "address"
    found = split_address(peer.address)
    if found is None or found[1] == 0:
        raise _wrong_address(source, key, peer.address)
    _check_plain(source, tls, key, peer.address)
    return peer


def _check_plain(source: Source, tls: bool, key: str, address: str) -> None:
    found = split_address(address)
    if not tls and found is not None and not is_loopback(found[0]):
        raise source.error(
            errors.CONFIG_EXPOSED,
            key,
            f"= {address!r} needs TLS: peers.tls = false is for loopback addresses",
            fix="remove peers.tls = false, and make certificates with `batchengine peers init`",
        )


def _wrong_address(source: Source, key: str, given: str) -> Exception:
    what = f"= {given!r} is not an address" if given else "is missing"
    return source.error(errors.CONFIG_CHOICE, key, what, fix=ADDRESS_RULE)


def _wrong_name(source: Source, key: str, given: str) -> Exception:
    problem = f"is not a name for a peer: {given[:80]!r}"
    return source.error(errors.CONFIG_CHOICE, key, problem, fix=NAME_RULE)
