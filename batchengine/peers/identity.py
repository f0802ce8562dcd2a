"""Who this daemon is to its peers: its name and its two TLS contexts, read from files.

A control or data link is TLS 1.3 with certificates of one authority on both sides. The files are
made by `certificates`, which only the command line imports.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from batchengine import errors
from batchengine.config import PeersConfig, openness
from batchengine.config.peers import is_peer_name
from batchengine.wire.frames import WireError
from batchengine.wire.lane import LinkIdentity

AUTHORITY, OWN, PEERS = "ca.crt", "own.pem", "peers.d"  # own: certificate and key
NO_FILES = (
    "run `batchengine peers init` here, or `batchengine peers add NAME HOST:PORT --bundle FILE`"
    " with a bundle of the host where it was run"
)
OUT_OF_DATE = (
    "correct this host's clock, or move the folder away and import a new bundle of the host where"
    " `batchengine peers init` was run"
)
DATE_CODES = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL


@dataclass(frozen=True, slots=True)
class Identity:
    """The name of this daemon, and its contexts for links that it accepts and that it dials.

    Both contexts are None without TLS. Two are equal if name and content of the files are.
    """

    name: str
    server: ssl.SSLContext | None = field(compare=False)
    client: ssl.SSLContext | None = field(compare=False)
    digest: str = ""  # of the files


def identity_of(config: PeersConfig) -> Identity:
    """Who this daemon is by its configuration and its files. Raises PEER_IDENTITY."""
    if not config.tls:
        return Identity(config.name, None, None)
    folder = Path(config.dir)
    identity = read_identity(folder)
    if config.name and config.name != identity.name:
        why = f"its certificate is of {identity.name}, peers.name is {config.name}"
        fix = "remove peers.name, or make other certificates"
        raise errors.PEER_IDENTITY(folder=folder, why=why, fix=fix)
    return identity


def files_of(identity: Identity, config: PeersConfig) -> LinkIdentity:
    """What a worker needs to prove the same identity on its data links."""
    if not config.tls:
        return LinkIdentity(identity.name)
    folder = Path(config.dir).absolute()
    own = str(folder / OWN)  # certificate and key
    return LinkIdentity(identity.name, own, own, str(folder / AUTHORITY))


def read_identity(folder: Path) -> Identity:
    """Read certificate, key and authority of this daemon. Raises PEER_IDENTITY.

    A handshake between the two contexts, in memory, shows that they work and what the name is.
    """
    try:
        for file in (AUTHORITY, OWN):
            if not (folder / file).exists():
                raise FileNotFoundError(f"{file} does not exist")
        if why := openness(str(folder / OWN)):
            raise PermissionError(f"other users can read or replace {OWN}: {why}")
        content = hashlib.sha256()
        for file in (AUTHORITY, OWN):
            content.update(hashlib.sha256((folder / file).read_bytes()).digest())
        server = _context(folder, ssl.PROTOCOL_TLS_SERVER)
        server.num_tickets = 0  # no link is resumed
        client = _context(folder, ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        name = _name_by_handshake(server, client)
        client.check_hostname = True
    except (OSError, ValueError) as error:  # SSLError is an OSError
        is_date = getattr(error, "verify_code", 0) in DATE_CODES
        fix = OUT_OF_DATE if is_date else NO_FILES
        raise errors.PEER_IDENTITY(folder=folder, why=reason_of(error), fix=fix) from None
    return Identity(name, server, client, content.hexdigest())


def name_of(tls: ssl.SSLObject) -> str:
    """The one peer's name in the certificate of the other side; "" if it has none or several."""
    certificate = tls.getpeercert() or {}
    found = certificate.get("subjectAltName", ())
    names = [str(value) for _, value in found] if isinstance(found, tuple) else []
    return names[0] if len(names) == 1 and is_peer_name(names[0]) else ""


def reason_of(error: Exception | None) -> str:
    """Why a connection came to nothing, in plain words; None = the other side closed it."""
    if error is None:
        return "it closed the connection"
    if isinstance(error, WireError):
        return f"{error.what}: {error.why}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        words = (error.reason or str(error)).lower().replace("_", " ")
        _, alert, what = words.partition(" alert ")
        return f"it refuses TLS: {what}" if alert else f"TLS failed: {words}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / OWN)
    return context


def _name_by_handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The name in the certificate that both contexts have, after each has verified it."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)]
    waiting = list(ends)
    for _ in range(8):
        for end in tuple(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                waiting.remove(end)
    name = name_of(ends[1])
    if waiting or not name:
        raise ValueError(f"the certificate in {OWN} does not have one peer's name")
    return name
