"""One seed of several daemons: linked by a simulated network, each with its store and its clients.

The invariants of one daemon hold for each of them, and beyond: a token does not depend on which
daemons have the pages, a daemon does not end because of a peer, a session without pages elsewhere
does not wait for a peer, and when all sessions are closed no daemon holds a page for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import secrets
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

from batchengine.config import Config, LaneConfig, PeerConfig, PeersConfig, load
from batchengine.core import PAGE_TOKENS
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.pages import LinkedPages
from batchengine.peers import features, peers
from batchengine.wire import lane as wire
from batchengine.wire.frames import MAGIC, Decoder
from batchengine.wire.peer import PEER_LINK, PagePart
from tests.simulation import faults
from tests.simulation.clock import OWNER
from tests.simulation.lanes import TRAVEL_S, SimLane
from tests.simulation.linked.network import Network, simulated_sockets
from tests.simulation.people import Person
from tests.simulation.seams import SimThread, Tape, replaced, starter_uses
from tests.simulation.seed import Ground
from tests.simulation.world import (
    LIVENESS_S,
    MODEL,
    PAGE_BYTES,
    EngineRun,
    World,
)

NAMES = ("ant", "bee", "cat")
FIRST_PORT = 7000
FRAME_OF_PAGE_BYTES = 10_000  # frames without page bytes are shorter
LINKED_S = 90.0  # after the last fault, until every link is up
SETTLED_S = 120.0  # after the last turn, until holders and owners agree


class Node(World):
    """One of the daemons."""

    def __init__(self, seed: int, folder: str, linked: LinkedWorld, name: str) -> None:
        self.name = name
        self.linked = linked
        super().__init__(seed, folder, linked.ground)
        self._is_cold = self._is_cold and name == NAMES[0]
        rng = self.tape("fewer")  # what goes wrong between daemons is to be seen too
        kept = {kind: chance for kind, chance in self._chances.items() if rng.random() < 0.4}
        self._chances = (self._chances if self._is_cold else kept) | linked.chances
        if linked.only is not None:
            self._is_cold, self._chances = False, dict(linked.only)

    def _choose_n_tokens(self) -> int:
        return self.linked.n_tokens  # the daemons compute turns of one another

    def _choose_config(self) -> Config:
        rng = self.tape("config")
        lanes = tuple(
            LaneConfig(
                name=f"lane{i}",
                threads=1,
                tier="any",
                entries_max=rng.choice([2, 4, 8]),
                open_pages=rng.choice([8, 16]),
                chunk_tokens_max=rng.choice([128, 256]),
                tokens_per_step=288,
            )
            for i in range(rng.choice([1, 1, 1, 2]))
        )
        budget = self.linked.budgets[self.name] * PAGE_BYTES
        config = load(
            None,
            {
                "model.path": str(MODEL),
                "store.dir": f"{self.folder}/{self.name}",
                "store.allow_volatile": True,
                "store.budget_bytes": budget,
                "store.durability": rng.choice(["turn", "power"]),
                "store.full_disk": rng.choice(["fail", "finish"]),
                "limits.canary_s": rng.choice([0.0, 600.0]),
                "server.admin_socket": f"{self.folder}/{self.name}.sock",
            },
        )
        peers_config = PeersConfig(
            listen=address_of(self.name),
            name=self.name,
            dir=f"{self.folder}/{self.name}.peers",
            tls=False,
            hold_bytes=budget * rng.choice([2, 3, 4]) // 4,
            known=tuple(
                PeerConfig(name, address_of(name))
                for name in self.linked.names
                if name != self.name
            ),
        )
        return dataclasses.replace(config, cache_dir=self.folder, lanes=lanes, peers=peers_config)

    def choose_names(self, rng: random.Random) -> list[str | None]:
        return [f"a-{self.name}", f"b-{self.name}"][: rng.randrange(1, 3)]

    def person(self, number: int, name: str | None) -> Person:
        return Traveller(self, number, name)

    def note_s(self) -> float:
        if self.decides("late"):
            return self.tape("notes").uniform(0.001, 0.1)
        return TRAVEL_S

    def trace(self, *what: object) -> None:
        super().trace(self.name, *what)

    def wrong(self, what: str) -> None:
        super().wrong(f"{self.name}: {what}")

    def _use_seams(self, engine_run: EngineRun) -> None:
        """Those of all nodes are in place."""
        engine_run.seam.model = self.linked.models[self.name]
        self.linked.threads.of[self.name] = engine_run.threads.all

    async def crash(self) -> None:
        if self.engine_run is not None and not self.engine_run.dead:
            self.linked.network.kill(self.name)
        await super().crash()

    # --------------------------------------------------------------------------- invariants

    @property
    def pages(self) -> LinkedPages:
        """What this daemon and its peers hold for each other."""
        return self.up.running.linked

    def on_step(self, lane: SimLane, step: wire.Step) -> None:
        super().on_step(lane, step)
        if any(entry.segments for entry in step.entries):
            self.count("steps with pages of peers")

    def on_served(self, lane: SimLane, codes: tuple[int, ...]) -> None:
        """A worker answers with these pages."""
        engine_run = self.engine_run
        if lane.abandoned or engine_run is None or engine_run.dead:
            self.count("served by the worker of a dead engine")
            return
        store = engine_run.seam.opened
        assert store is not None
        pinned = {
            pool.slot_code(page.ref)
            for pool in store.pools
            for page in pool.index._pages.values()
            if page.pins and page.ref
        }
        if not pinned.issuperset(codes):
            self.count("served without a pin")
        own = {info.index for info in store.pages.allocator.infos}
        if any(code >> 32 not in own for code in codes):
            self.count("served pages of another model")

    def check_owners(self, engine_run: EngineRun) -> None:
        super().check_owners(engine_run)
        if self.up.fatal is not None:
            raise AssertionError(f"{self.name} must restart: {self.up.fatal!r}")
        if engine_run.engine._running is not None:
            self.pages.given.check()

    def _busy(self, engine_run: EngineRun) -> str:
        return super()._busy(engine_run) or ("page moves" if self.pages.keeper.moves else "")

    def is_sealing(self, loop: LaneLoop) -> bool:
        """As in one daemon, but a session at rest may have more pages than the store has room."""
        sealing = loop.kv.sealing
        moving = sealing.in_flight.keys() - sealing.read_back.waiting()
        if moving or not sealing.queued:
            return super().is_sealing(loop)
        return sealing.has_results or loop.kv.has_chores

    def unlinked(self) -> str:
        """Links of this daemon that are not up."""
        links, data = self.up.running.peers.links, self.up.running.lane_links
        down = [
            f"{self.name} to {name}: {link!r} {link.why}, data {data.row(name)}"
            for name, link in links.items()
            if link.state.value != "up" or data.number(name) is None
        ]
        missing = len(self.linked.names) - 1 - len(links)
        return "; ".join(down) or (f"{self.name} has no link to {missing} peers" if missing else "")

    def check_holds(self) -> None:
        """Raise AssertionError unless every hold given has an owner that counts on it, and every
        hold taken is there."""
        self._check_served()
        given, nodes = self.pages.given, {node.name: node for node in self.linked.nodes}
        for name in given:
            owner = nodes[name.peer].pages.taken
            now = nodes[name.peer].up.running.peers.incarnation
            if name.incarnation != now:
                raise AssertionError(f"{self.name} keeps {name}: that run of {name.peer} is over")
            taken = owner._taken.get(name.hold)
            if taken is None:
                raise AssertionError(f"{self.name} keeps {name}, which {name.peer} does not use")
            if taken.n_pages != len(given._holds[name].pages):
                raise AssertionError(f"{self.name} keeps {given._holds[name].pages} of {taken}")
        for taken in self.pages.taken._taken.values():
            holds = nodes[taken.peer].pages.given
            if all(name.hold != taken.hold for name in holds):
                raise AssertionError(f"{self.name} counts on {taken!r}, which is not there")

    def check_nothing_held(self) -> None:
        """Raise AssertionError if a page lies here or elsewhere for another daemon."""
        pages = self.pages
        if list(pages.given) or pages.taken._taken or pages.taken._own:
            raise AssertionError(f"{self.name}: {list(pages.given)} {pages.taken!r}")
        self._check_served()

    def _check_served(self) -> None:
        """Raise AssertionError if the worker serves pages that the engine has given up."""
        lane, pages = self.up.state.lanes[0].lane, self.pages
        assert isinstance(lane, SimLane)
        known = {name.hold for name in pages.given} | pages.taken._own.keys()
        if lane.process is not None and (more := lane.process.far.holds.keys() - known):
            raise AssertionError(f"{self.name}: the worker serves {more}")


class Traveller(Person):
    """A client with long prompts that goes on with another daemon now and then."""

    world: Node

    def __init__(self, world: Node, number: int, name: str | None) -> None:
        super().__init__(world, number, name)
        self.answers = [1, 7, 40, 100]
        alone = world.linked.budgets[world.name] * PAGE_TOKENS  # what one daemon has room for
        self.fresh = [300, alone // 2, *(alone + pages * PAGE_TOKENS for pages in (1, 2, 3, 4, 6))]
        self.history_max = alone + 10 * PAGE_TOKENS

    def choose_world(self) -> None:
        if self.rng.random() >= 0.2:
            return
        to = self.rng.choice(self.world.linked.nodes)
        if to is self.world:
            return
        self.world, self.call = to, ""
        if self.name is not None:
            self.name = f"{self.name.split('@')[0]}@{to.name}"
        self.world.count("other daemon")


class _AllThreads:
    """The threads of every run, on which one that waits for a future may depend."""

    def __init__(self) -> None:
        self.of: dict[str, list[SimThread]] = {}

    @property
    def all(self) -> list[SimThread]:
        return list(itertools.chain.from_iterable(self.of.values()))


class LinkedWorld:
    """Two or three daemons. Use `simulate` with this.

    They have no pipelines: the rows of HashLM have no layers of which a daemon could compute some.
    """

    lines_kept = 60
    only: Mapping[str, float] | None = None  # kinds of faults and their chances, instead of drawn

    def __init__(self, seed: int, folder: str) -> None:
        self.ground = Ground(seed, self.lines_kept)
        self.counts = self.ground.counts
        self.tape = Tape(seed)
        rng = self.tape("linked")
        self.names = NAMES[: rng.choice([2, 2, 3])]
        self.n_tokens = self.tape("text").choice([0, 3])
        models = self.tape("models")  # of a daemon; the tokens of HashLM are the same
        self.models = {name: models.choice([0, 0, 1]) for name in self.names}
        self.budgets = {name: rng.choice([8, 12, 16]) for name in self.names}
        drawn = faults.choose_of_links(self.tape)
        self.chances = drawn if self.only is None else dict(self.only)
        self.network = Network(self.ground.loop, self.tape, self.ground.trace)
        self.network.delay_s = rng.choice([0.0001, 0.001, 0.02])
        self.threads = _AllThreads()
        self.nodes = [Node(seed, folder, self, name) for name in self.names]
        self.calm = False

    def has(self, fault: str) -> bool:
        return any(node.has(fault) for node in self.nodes)

    async def run(self) -> None:
        """Run all phases of the seed."""
        ground, enter = self.ground, self.ground.patches.enter_context
        ground.futures.threads = self.threads  # type: ignore[assignment]
        enter(simulated_sockets(self.network))
        done = (features.DATA_LINKS, features.HOLDS, features.OTHER_MODELS)
        enter(mock.patch.object(peers, "FEATURES", done))
        enter(_repeatable_secrets(self.tape("secrets")))
        enter(starter_uses(_StoreOfOwner(), lambda name, command: SimLane(_world(), name)))  # type: ignore[arg-type]
        for node in self.nodes:
            await node.boot()
        await asyncio.sleep(self.tape("linked").choice([0.0, 2.0, 2.0]))
        await self._live()
        await self._end()

    async def _live(self) -> None:
        """Clients and faults, until every client has ended."""
        people, strikes, moves = list[Any](), list[Any](), list[Any]()
        for node in self.nodes:
            theirs, (strike, move) = node.begin()
            people += theirs
            strikes.append(strike)
            moves.append(move)
        strikes.append(self.ground.own(self._strike(self.tape("strikes").uniform(2.0, 15.0))))
        try:
            async with asyncio.timeout(LIVENESS_S):
                await self.ground.gather([*people, *strikes])
        except TimeoutError:
            what = [node.waiting() for node in self.nodes]
            raise AssertionError(f"a waiter waits for ever: {what}") from None
        finally:
            for task in (*people, *strikes, *moves):
                task.cancel()
        await asyncio.gather(*moves, return_exceptions=True)

    async def _end(self) -> None:
        """Everything is linked, then released."""
        nodes = self.nodes
        await self._settled(LINKED_S, lambda: [node.unlinked() for node in nodes])
        for node in nodes:
            await node.rest()
        await self._settled(SETTLED_S, lambda: [_failure(node.check_holds) for node in nodes])
        for node in nodes:
            node.forget()
        await asyncio.sleep(3.0)
        await self._settled(
            SETTLED_S, lambda: [_failure(node.check_nothing_held) for node in nodes]
        )
        for node in nodes:
            await node.check_empty()
        self.ground.stopping = True
        for node in nodes:
            await node.stop()
        nodes[0].check_ended()

    async def _settled(self, seconds: float, troubles: Any) -> None:
        """Wait until there is no trouble. Raises AssertionError with the last one."""
        end = self.ground.loop.time() + seconds
        while any(found := troubles()):
            if self.ground.loop.time() > end:
                raise AssertionError(f"after {seconds:g} s: {'; '.join(filter(None, found))}")
            await asyncio.sleep(0.5)

    # --------------------------------------------------------------------------- faults

    async def _strike(self, seconds: float) -> None:
        """Faults of the network for a time; then end them, and what they have left behind."""
        rng, network, loop = self.tape("network faults"), self.network, self.ground.loop
        if not self.chances.keys().isdisjoint(("lie", "flip")):
            network.lies[rng.choice(self.names)] = Liar(rng, self.chances, self.counts).sent
        until = loop.time() + seconds
        while loop.time() < until:
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            for kind in ("cut", "reset", "vanish", "far"):
                if rng.random() < 0.1 * self.chances.get(kind, 0.0):
                    self.counts[f"fault {kind}"] += 1
                    self.ground.trace("fault", kind)
                    self._fault(kind, rng)
        self.calm = True
        lied = [*network.lies]
        network.lies.clear()
        network.heal_all()
        for end in [end for end in network.ends if end.host in lied and not end.is_workers]:
            network.reset(end)  # what a liar has said holds no longer than its connection
        self.ground.trace("no more faults between daemons")

    def _fault(self, kind: str, rng: random.Random) -> None:
        network = self.network
        match kind:
            case "cut":
                pair = rng.sample(self.names, 2)
                ways = [(pair[0], pair[1]), (pair[1], pair[0])][: rng.choice([1, 2, 2])]
                for way in ways:
                    network.cut(*way)
                self.ground.own(self._heal(ways, rng.choice([0.2, 1.5, 4.0, 12.0])))
            case "far":
                self.ground.own(self._far(rng.choice([0.5, 3.0])))
            case _:
                if network.ends:
                    end = rng.choice(network.ends)
                    network.reset(end) if kind == "reset" else network.vanish(end)

    async def _heal(self, ways: list[tuple[str, str]], seconds: float) -> None:
        await asyncio.sleep(seconds)
        for way in ways:
            if self.network.is_cut(*way):
                self.network.heal(*way)

    async def _far(self, seconds: float) -> None:
        self.network.delay_s *= 100
        await asyncio.sleep(seconds)
        self.network.delay_s /= 100


class Liar:
    """What a daemon sends that does not keep to the protocol: frames twice, late or never, or parts
    of pages with other bytes."""

    def __init__(
        self, rng: random.Random, chances: Mapping[str, float], counts: dict[str, int]
    ) -> None:
        self._rng = rng
        self._chances = chances
        self._counts = counts
        self._kept: list[bytes] = []

    def sent(self, data: bytes) -> list[bytes]:
        """What is sent instead of these bytes, which are one write."""
        kept, self._kept = self._kept, []
        if not data.startswith(MAGIC):
            return [data, *kept]
        if self._lies("flip") and (other := _flipped(data)) is not None:
            self._counts["fault flip"] += 1
            return [other, *kept]
        if not self._lies("lie"):
            return [data, *kept]
        how = self._rng.choice(["twice", "later", "never"])
        self._counts[f"fault lie {how}"] += 1
        if how == "twice":
            return [data, *kept, data]
        self._kept = [data] if how == "later" else []
        return kept

    def _lies(self, kind: str) -> bool:
        return self._rng.random() < self._chances.get(kind, 0.0)


def _flipped(data: bytes) -> bytes | None:
    """The frame with another byte of the page that it carries a part of; None for other frames."""
    frames = list(Decoder(PEER_LINK).feed(data)) if len(data) > FRAME_OF_PAGE_BYTES else []
    if not frames or not isinstance(frames[0].message, PagePart):
        return None
    frame, payload = frames[0], bytearray(frames[0].payload)
    payload[len(payload) // 2] ^= 1
    return PEER_LINK.encode(
        frame.message,
        bytes(payload),
        step=frame.step,
        incarnation=frame.incarnation,
        attempt=frame.attempt,
    )


class _StoreOfOwner:
    """`Store` as the starter of the running daemon sees it."""

    def open(self, *how: Any) -> Any:
        return OWNER.get().seam.open(*how)


def _world() -> World:
    return OWNER.get().world


def _failure(check: Any) -> str:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return ""


def address_of(name: str) -> str:
    return f"127.0.0.1:{FIRST_PORT + NAMES.index(name)}"


@contextlib.contextmanager
def _repeatable_secrets(rng: random.Random) -> Iterator[None]:
    """Random names of runs, holds and connections follow from the seed."""
    fake = SimpleNamespace(randbits=rng.getrandbits, token_bytes=rng.randbytes)
    with replaced("secrets", secrets, fake, "batchengine."):
        yield
