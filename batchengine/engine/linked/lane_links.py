"""Data links of the linked lane: one to the worker of each peer, kept up as long as it can be.

Of two daemons the one whose name sorts first asks for a token over the control link, connects, and
begins with the token. Both pass their end to their worker, which does the TLS handshake, and keep
no copy. Whatever ends a link, it is tried again while the control link is open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchengine.core import BatchEngineError
from batchengine.engine.linked.data_link import DataEffect, DataEvent, DataLinkMachine, DataState
from batchengine.lanes.worker_process import Lane
from batchengine.peers.features import DATA_LINKS
from batchengine.peers.identity import Identity, reason_of
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import Peers
from batchengine.wire import lane as wire
from batchengine.wire.peer import (
    REQUEST,
    TEXT_CHARS_MAX,
    DataExpected,
    DataReady,
    DataRefused,
    OpenData,
    PeerFrame,
)

log = logging.getLogger("batchengine.linked")

TICK_S = 0.1
ANSWER_S = 5.0  # for the peer's answer to OpenData
ASKED_EVERY_S = 0.1  # a handshake takes milliseconds of the worker: a peer may not have more
RENEW_S = 30.0  # between two restarts of the worker because its certificate has changed


@dataclass(eq=False, slots=True)
class _Link:
    """The data link to one peer. `number`: of the worker's end, 0 = it has none.

    `asked`: when the peer asked last.
    """

    machine: DataLinkMachine
    number: int = 0
    asking: asyncio.Task[None] | None = None
    asked: float = 0.0


class LaneLinks:
    """The data links of one lane's worker. Use: `number`, `watchers`; `run` as a task.

    `watchers` are called with the name of a peer when the data link to it has come up or ended.
    `on_hold` and `on_stage` take what the worker reports of holds and stages. `on_worker` is called
    when another worker takes notes, which knows of no link and no hold.
    """

    def __init__(
        self, lane: Lane, peers: Peers, loaded: Callable[[], Identity | None], seed: int
    ) -> None:
        """`loaded`: the identity that the lane's worker has read; `seed` is of the retry times."""
        self.watchers: list[Callable[[str], None]] = []
        self.on_hold: Callable[[wire.HoldChanged], None] = lambda event: None
        self.on_stage: Callable[[wire.StageEvent], None] = lambda event: None
        self.on_worker: Callable[[], None] = lambda: None
        self._lane = lane
        self._peers = peers
        self._loaded = loaded
        self._rng = random.Random(seed)
        self._links: dict[str, _Link] = {}
        self._numbers = itertools.count(1)
        self._renew_at = 0.0
        lane.on_event = self._on_event
        lane.on_attached = self._on_attached
        peers.subscribe(self._on_message, lambda link, before: self._settle(link))

    def __repr__(self) -> str:
        return f"<LaneLinks {self.up}>"

    # ------------------------------------------------------------------------------- questions

    def number(self, peer: str) -> int | None:
        """The number of the data link to a peer in the lane's worker; None: it is not up."""
        link = self._links.get(peer)
        return link.number if link is not None and link.machine.state is DataState.UP else None

    @property
    def up(self) -> list[str]:
        """Names of the peers to which a data link is up."""
        return [name for name in self._links if self.number(name) is not None]

    def row(self, peer: str) -> dict[str, Any]:
        """The state of the data link to a peer, for operators."""
        if (link := self._links.get(peer)) is None:
            return {}
        machine = link.machine
        is_opening = machine.state in (DataState.ASKING, DataState.EXPECTED, DataState.OPENING)
        shown = "up" if machine.state is DataState.UP else "opening" if is_opening else "down"
        since_s = round(time.monotonic() - machine.since, 1)
        return {"data": shown, "data_why": machine.why, "data_since_s": since_s}

    # ---------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Keep the links until cancelled."""
        try:
            while True:
                self._tick()
                await asyncio.sleep(TICK_S)
        finally:
            for name in self._links:
                self._take(name, DataEvent.DISABLED, "this daemon stops")

    def _tick(self) -> None:
        """Do what is due, and look at everything that has no event."""
        now, peers = time.monotonic(), self._peers.links
        for name in self._links.keys() - peers.keys():
            self._take(name, DataEvent.DISABLED, "it is no peer any more")
            del self._links[name]
        for name, link in list(peers.items()):
            self._settle(link)
            if (due := self._links[name].machine.tick(now)) is not None:
                self._take(name, *due)
        identity = self._peers.identity
        is_other = identity is not None and identity != self._loaded()
        if is_other and self._lane.is_attached and now >= self._renew_at:
            self._renew_at = now + RENEW_S
            log.warning("a new worker begins, since the certificate of data links has changed")
            self._lane.kill("has an old certificate", blames_step=False)

    def _settle(self, link: PeerLink) -> None:
        """Bring the data link in step with the control link and the worker."""
        if link.name not in self._links:
            if self._peers.links.get(link.name) is not link:
                return
            rng = random.Random(self._rng.random())
            machine = DataLinkMachine(dials=link.dials, rng=rng, now=time.monotonic())
            self._links[link.name] = _Link(machine)
        why = self._objection(link)
        was_off = self._links[link.name].machine.state is DataState.OFF
        self._take(link.name, DataEvent.DISABLED if why else DataEvent.ENABLED, why)
        if was_off and not why and not link.dials:
            link.send(DataReady())

    def _objection(self, link: PeerLink) -> str:
        """Why there can be no data link to a peer; "" = there can be one."""
        if not link.state.is_open or link.facts is None:
            return f"the control link is {link.state.value}"
        if DATA_LINKS not in link.facts.features:
            return "it knows no data links, or those of another version"
        if not self._lane.is_attached:
            return "the worker of this daemon starts"
        if self._loaded() is None or self._loaded() != self._peers.identity:
            return "the worker of this daemon has no certificate, or an old one"
        return ""

    def _take(self, name: str, event: DataEvent, why: str = "") -> None:
        """Pass one event to the machine of a link, do what it says, and report a change."""
        link = self._links[name]
        before, state = self.number(name), link.machine.state
        effects = link.machine.on(event, time.monotonic(), why)
        if DataEffect.STOP in effects:
            self._peers.forget_data(name)
            if link.asking is not None:
                link.asking.cancel()
        if DataEffect.CLOSE in effects:
            self._lane.note(wire.CloseLink(link.number))  # no error if it has ended
            link.number = 0
        if DataEffect.ASK in effects:
            link.asking = asyncio.get_running_loop().create_task(self._ask(name))
        if self.number(name) != before:
            news = "up" if state is not DataState.UP else f"down: {link.machine.why}"
            log.info("data link to %s is %s", name, news)
            for watcher in self.watchers:
                watcher(name)

    # ---------------------------------------------------------------------------------- opening

    async def _ask(self, name: str) -> None:
        """Ask for a data link and connect; cancelled when there can be none any more."""
        try:
            token = await self._token(self._peers.links[name])
            sock = await self._peers.connect_data(name, token)
        except (BatchEngineError, OSError) as error:
            why = error.why if isinstance(error, BatchEngineError) else reason_of(error)
            return self._take(name, DataEvent.LOST, why or str(error))
        with sock:
            return self._give(name, sock, dials=True)

    async def _token(self, link: PeerLink) -> bytes:
        """Ask a peer for a token. Raises BatchEngineError or ConnectionAbortedError."""
        answer = (await link.request(OpenData(), timeout_s=ANSWER_S)).message
        if isinstance(answer, DataExpected):
            return answer.token
        if not isinstance(answer, DataRefused):
            link.abort(f"it answered OpenData with {type(answer).__name__}")
        raise ConnectionAbortedError(f"it refuses: {getattr(answer, 'why', '')}")

    def _give(self, name: str, sock: socket.socket, *, dials: bool) -> None:
        """Give a connection to the worker; the caller closes its end."""
        number = next(self._numbers)
        note = wire.OpenLink(number, name, secrets.token_bytes(16), dials)
        try:
            self._lane.open_link(note, sock)
        except OSError as error:
            why = f"the worker of this daemon takes no connection: {reason_of(error)}"
            return self._take(name, DataEvent.LOST, why)
        self._links[name].number = number
        return self._take(name, DataEvent.GIVEN)

    def _on_message(self, link: PeerLink, frame: PeerFrame) -> None:
        """Take a message of a peer: a request for a data link, or one that does not fit."""
        if isinstance(frame.message, DataExpected | DataRefused):
            link.abort(f"it sent {type(frame.message).__name__}, which was not asked for")
        elif isinstance(frame.message, DataReady):
            if not link.dials:
                link.abort("it waits for a data link, which is not its part")
                return
            self._settle(link)
            self._links[link.name].machine.hasten(time.monotonic())
        elif isinstance(frame.message, OpenData):
            if frame.attempt != REQUEST or link.dials:
                link.abort("it asks for a data link, which is not its part")
                return
            self._settle(link)
            link.reply(frame, self._answer(link.name))

    def _answer(self, name: str) -> DataExpected | DataRefused:
        """The answer to a peer that has asked for a data link."""
        link, now = self._links[name], time.monotonic()
        if now - link.asked < ASKED_EVERY_S:
            return DataRefused("it is asked too often")
        link.asked = now
        self._take(name, DataEvent.ASKED)
        machine = link.machine
        if machine.state is not DataState.EXPECTED:
            return DataRefused(machine.why[:TEXT_CHARS_MAX])
        return DataExpected(
            self._peers.expect_data(name, lambda sock: self._give(name, sock, dials=False))
        )

    # ------------------------------------------------------------------------------- the worker

    def _on_attached(self) -> None:
        """A worker takes notes from now on, or has ended with all of its links."""
        for link in list(self._peers.links.values()):
            self._settle(link)
        if self._lane.is_attached:
            self.on_worker()

    def _on_event(self, event: wire.LaneEvent) -> None:
        match event:
            case wire.LinkChanged():
                self._on_changed(event)
            case wire.HoldChanged():
                self.on_hold(event)
            case wire.StageChanged() | wire.GatherChanged():
                self.on_stage(event)

    def _on_changed(self, event: wire.LinkChanged) -> None:
        """Take the news of a link; that of one that was given up is dropped."""
        for name, link in self._links.items():
            if link.number == event.number:
                self._take(name, DataEvent.OPENED if event.is_up else DataEvent.LOST, event.why)
                return
