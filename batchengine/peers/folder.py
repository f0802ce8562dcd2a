"""The folder of certificates and `peers.d`, looked at once a second.

Owns what its files say now: the identity, the peers, and the error of each file that is broken.
A broken file changes nothing but its own entry.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from batchengine.config import PeerConfig, PeersConfig
from batchengine.config.peers import read_peer_file
from batchengine.core import BatchEngineError
from batchengine.peers.identity import AUTHORITY, OWN, PEERS, Identity, identity_of

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
        try:
            return identity_of(self._config), ""
        except BatchEngineError as error:
            return None, str(error)

    def _stamps(self) -> dict[str, Stamp]:
        """Stamps of the files that are read; those that do not exist are left out."""
        paths = [self._path / AUTHORITY, self._path / OWN]
        with contextlib.suppress(OSError):
            for name in os.listdir(self._path / PEERS):
                if name.endswith(".toml") and name[0] != ".":
                    paths.append(self._path / PEERS / name)
        found: dict[str, Stamp] = {}
        for path in paths:
            with contextlib.suppress(OSError):
                stat = path.stat()
                found[path.name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        return found
