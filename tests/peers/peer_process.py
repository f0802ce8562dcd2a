"""A process that has nothing but links to peers: FOLDER, the port, the incarnation."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from batchengine.config import PeersConfig
from batchengine.peers.peers import Peers
from batchengine.wire.peer import PeerLoad
from tests.peers.scene import FACTS


async def main(folder: str, port: int, incarnation: int) -> None:
    """Print the port, then keep the links until the process is killed."""
    config = PeersConfig(listen=f"127.0.0.1:{port}", dir=folder)
    peers = Peers(config, FACTS, lambda _: PeerLoad(), incarnation)
    peers.bind()
    await peers.look()
    print(peers.port, flush=True)
    await peers.run()


if __name__ == "__main__":
    uvloop.run(asyncio.wait_for(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), 100))
