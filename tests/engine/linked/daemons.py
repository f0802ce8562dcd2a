"""Engines of one process with real workers, linked over loopback, with tiny budgets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from batchengine.config import LaneConfig
from batchengine.engine.linked.pages import LinkedPages
from batchengine.engine.state import EngineState
from batchengine.lanes.worker_process import Lane, LaneRequest
from batchengine.peers import certificates
from batchengine.peers.link import PeerLink
from batchengine.policy.cost import CostModel
from batchengine.wire import lane as wire
from tests.support.engines import Site, WatchedEngine, running_engine, until

PAGE_BYTES = 327_680  # of the pocket model
STEP_S = 0.004  # see `slow_down`


def fix_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of links and lanes that do not depend on what else this machine does."""

    async def measure(link: PeerLink) -> float:
        link.bandwidth = 1e9
        return 1e9

    monkeypatch.setattr(PeerLink, "measure_bandwidth", measure)
    monkeypatch.setattr(PeerLink, "rtt_us", 50.0)
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)


@dataclasses.dataclass(eq=False)
class Daemon:
    """One engine, linked by its name."""

    name: str
    site: Site
    engine: WatchedEngine

    @property
    def linked(self) -> LinkedPages:
        return self.engine.running.linked

    @property
    def state(self) -> EngineState:
        return self.engine.state

    def knows(self, *others: Daemon) -> None:
        """Write the files of its peers."""
        for other in others:
            self.knows_at(other.name, other.engine.running.peers.port)

    def knows_at(self, name: str, port: int) -> None:
        """Write the file of a peer, also anew."""
        (self.site.folder / "peers.d" / f"{name}.toml").unlink(missing_ok=True)
        certificates.write_peer(self.site.folder, name, f"127.0.0.1:{port}")

    def page_bytes(self) -> int:
        return self.engine.running.store.pages.layout.page_bytes

    def is_linked(self, other: Daemon) -> bool:
        """Whether the data link to another daemon is up."""
        return self.engine.running.lane_links.number(other.name) is not None

    def pages(self) -> int:
        """Pages that the store may have."""
        return self.engine.running.store.pages.allocator.slots_max

    def beyond(self) -> int:
        """Pages that peers would keep for its sessions, as its scheduler knows it."""
        return self.state.lanes[0].seats.pages_beyond


@contextlib.asynccontextmanager
async def daemon(
    site: Site,
    name: str,
    n_pages: int,
    *,
    n_lanes: int = 1,
    promote_auto: bool = False,
    **overrides: object,
) -> AsyncIterator[Daemon]:
    """A daemon in the folder NAME of the site, whose store has about `n_pages` pages.

    Unless `promote_auto`, it gives no turns to peers by itself, however slow the machine is.
    """
    own = site.at(name)
    own.folder.mkdir(exist_ok=True)
    async with running_engine(
        own,
        lanes=tuple(LaneConfig(name=f"{name}{number}", threads=1) for number in range(n_lanes)),
        peers__listen="127.0.0.1:0",
        peers__name=name,
        peers__dir=str(own.folder),
        peers__tls=False,
        store__budget_bytes=n_pages * PAGE_BYTES,
        router__promote_auto=promote_auto,
        **overrides,
    ) as engine:
        yield Daemon(name, own, engine)


@contextlib.asynccontextmanager
async def daemons(
    site: Site, names: str, n_pages: int, *, promote_auto: bool = False, **overrides: object
) -> AsyncIterator[list[Daemon]]:
    """Daemons with one-letter names, each linked with every other."""
    async with contextlib.AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(
                daemon(site, name, n_pages, promote_auto=promote_auto, **overrides)
            )
            for name in names
        ]
        for one in made:
            one.knows(*[other for other in made if other is not one])
        await until(
            lambda: all(one.is_linked(other) for one in made for other in made if other is not one)
        )
        for one in made:
            room = sum(other.linked.given.bytes_max for other in made if other is not one)
            await until(lambda: one.beyond() * PAGE_BYTES >= room)  # noqa: B023
        yield made


def slow_down(monkeypatch: pytest.MonkeyPatch, step_s: float = STEP_S) -> None:
    """Have every step take `step_s` or longer: a turn does not end before its scene on any
    machine."""
    answer = Lane.answer

    async def late(self: Lane, asked: LaneRequest) -> wire.StepDone:
        await asyncio.sleep(step_s)
        return await answer(self, asked)

    monkeypatch.setattr(Lane, "answer", late)
