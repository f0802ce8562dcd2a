"""Daemons of a test with one real worker each, between which there are data links."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

from batchengine.config import LaneConfig, PeersConfig, load
from batchengine.engine.lane.supervisor import ModelLoader
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.lanes.worker_process import Lane
from batchengine.wire import lane as wire
from kv_store.arenas.arena import Arena
from kv_store.layout import PageLayout
from tests.peers.scene import Node, certify, node, until
from tests.support.engines import Site

SLOTS = 4


@dataclasses.dataclass(eq=False)
class Daemon:
    """One daemon's peers, its worker, and the data links of that."""

    node: Node
    loader: ModelLoader
    lane: Lane
    links: LaneLinks
    config: LaneConfig
    changes: list[tuple[str, int | None]]  # (peer, number of its link or None) at each report
    workers: list[int] = dataclasses.field(default_factory=list[int])  # incarnations reported

    async def start_worker(self) -> None:
        """Start the next worker, as the lane's loop does after a death."""
        facts = await self.loader.load(self.lane, self.config)
        layout = PageLayout(facts.layers)
        folder = self.node.folder / "kv"
        (folder / "ext").mkdir(parents=True, exist_ok=True)
        number = self.lane.incarnation
        path = str(folder / f"arena.{number}")
        Arena.create(path, layout, SLOTS, number).close(delete=False)
        attach = wire.Attach(path, SLOTS, layout.page_bytes, str(folder / "ext"))
        await self.lane.attach(attach)

    async def kill_worker(self) -> None:
        os.kill(self.lane.pid, signal.SIGKILL)
        await self.lane.died()

    async def until_up(self, peer: str, seconds: float = 60.0) -> int:
        """Wait for the data link to a peer; returns its number."""
        await until(lambda: self.links.number(peer) is not None, seconds)
        number = self.links.number(peer)
        assert number is not None
        return number

    async def until_down(self, peer: str, seconds: float = 60.0) -> None:
        await until(lambda: self.links.number(peer) is None, seconds)


@contextlib.asynccontextmanager
async def daemon(
    site: Site, name: str, *, tls: bool = True, incarnation: int = 1
) -> AsyncIterator[Daemon]:
    """A daemon whose files are in the folder NAME of the site, with a worker that is attached."""
    async with node(site.folder, name, tls=tls, incarnation=incarnation) as made:
        config = load(None, {"model.path": str(site.model)})
        peers = PeersConfig("127.0.0.1:0", "" if tls else name, str(made.folder), tls)
        lane_config = dataclasses.replace(config.lanes[0], threads=1, cores=())
        config = dataclasses.replace(
            config, peers=peers, cache_dir=str(site.cache_dir), lanes=(lane_config,)
        )
        loader, lane = ModelLoader(config, 2048), Lane(name)
        links = LaneLinks(lane, made.peers, lambda: loader.linked_as, incarnation)
        here = Daemon(made, loader, lane, links, lane_config, [])
        links.watchers.append(lambda peer: here.changes.append((peer, links.number(peer))))
        links.on_worker = lambda: here.workers.append(lane.incarnation)
        running = asyncio.create_task(links.run())
        try:
            await here.start_worker()
            yield here
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await lane.close()


@contextlib.asynccontextmanager
async def two_daemons(site: Site, *, tls: bool = True) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Daemons `a` and `b` with a data link; `a` has connected."""
    if tls:
        certify(site.folder, "a", "b")
    async with (
        daemon(site, "a", tls=tls, incarnation=1) as a,
        daemon(site, "b", tls=tls, incarnation=2) as b,
    ):
        await asyncio.gather(a.node.know(b.node), b.node.know(a.node))
        await asyncio.gather(a.until_up("b"), b.until_up("a"))
        yield a, b
