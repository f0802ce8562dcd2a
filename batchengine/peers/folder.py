"""The folder of certificates and `peers.d`, looked at once a second.

Owns what its files say now: the identity, the peers, and the error of each file that is broken.
A broken file changes nothing but its own entry.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from batchengine import errors
from batchengine.config import PeerConfig, PeersConfig
from batchengine.config.peers import read_peer_file
from batchengine.core import BatchEngineError
from batchengine.peers.identity import AUTHORITY, OWN, PEERS, Identity, read_identity

PEERS_MAX = 64

Stamp = tuple[int, int, int]  # time, size and number of a file


@dataclass(frozen=True, slots=True)
class FolderContent:
    """What the configuration and the folder say. `broken`: name of a file -> its error.

    `identity` is None while there is no usable certificate, and `trouble` says why.
    """

    identity: Identity | None
    trouble: str
    peers: dict[str, PeerConfig]
    broken: dict[str, str]


class PeersFolder:
    """Reads the folder when one of its files has changed."""

    def __init__(self, config: PeersConfig) -> None:
        self._config = config
        self._path = Path(config.dir)
        self._seen: dict[str, Stamp] | None = None

    def changed(self) -> FolderContent | None:
        """The content, if a file has changed since the last call; else None. Blocks on disk."""
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        self._seen = stamps
        identity, trouble = self._identity()
        peers = {peer.name: peer for peer in self._config.known}
        broken: dict[str, str] = {}
        for file in sorted(stamps):
            if not file.endswith(".toml"):
                continue
            try:
                peer = read_peer_file(self._path / PEERS / file, tls=self._config.tls)
            except BatchEngineError as error:
                broken[file] = str(error)
                continue
            if peer.name in peers:
                broken[file] = f"{peer.name} is a peer of the configuration file already"
            elif len(peers) >= PEERS_MAX:
                broken[file] = f"there are {PEERS_MAX} peers already"
            else:
                peers[peer.name] = peer
        if identity is not None and peers.pop(identity.name, None) is not None:
            broken[f"{identity.name}.toml"] = f"{identity.name} is this daemon itself"
        return FolderContent(identity, trouble, peers, broken)

    def _identity(self) -> tuple[Identity | None, str]:
        config = self._config
        if not config.tls:
            return Identity(config.name, None, None), ""
        try:
            identity = read_identity(self._path)
            if config.name and config.name != identity.name:
                why = f"its certificate is of {identity.name}, peers.name is {config.name}"
                raise errors.PEER_IDENTITY(
                    folder=self._path, why=why, fix="remove peers.name, or make other certificates"
                )
        except BatchEngineError as error:
            return None, str(error)
        return identity, ""

    def _stamps(self) -> dict[str, Stamp]:
        """Stamps of the files that are read; those that do not exist are left out."""
        names: Iterable[str]
        try:
            names = [f for f in os.listdir(self._path / PEERS) if f.endswith(".toml")]
        except OSError:
            names = ()
        places = [(AUTHORITY, self._path / AUTHORITY), (OWN, self._path / OWN)]
        places += [(name, self._path / PEERS / name) for name in names if name[0] != "."]
        found: dict[str, Stamp] = {}
        for name, path in places:
            try:
                stat = path.stat()
            except OSError:
                continue
            found[name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found
