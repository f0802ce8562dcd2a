"""One control link: its state, its connection, what the peer says of itself, requests and replies.

Owns the comparison of two Hello messages, the round trip time, and the fate of requests: a reply,
a deadline, or the end of the connection that carried them. How a connection is made is in
`listener` and `dialling`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from batchengine import errors
from batchengine.config import PeerConfig
from batchengine.core import BatchEngineError
from batchengine.peers.connection import FRAME_BYTES, QUEUE_BYTES_MAX, PeerConnection
from batchengine.peers.features import OF_OTHER_MODELS, OTHER_MODELS
from batchengine.peers.identity import reason_of
from batchengine.peers.transitions import Effect, LinkEvent, LinkMachine, LinkState
from batchengine.wire.frames import WireError
from batchengine.wire.peer import (
    ONE_WAY,
    PEER_LINK,
    REPLY,
    REQUEST,
    Bulk,
    BulkReceived,
    Declined,
    Heartbeat,
    Hello,
    PeerFrame,
    PeerLoad,
    PeerMessage,
)

log = logging.getLogger("batchengine.peers")

RTT_KEPT = 32
COMPARED = (("arith_id", "arith_id"), ("model_hash", "model"), ("repr_id", "repr_id"))
SAME_VERSION = "install the same version of batchengine on both"
LOGGED = (LinkState.UP, LinkState.SUSPECT, LinkState.DOWN, LinkState.REFUSED)
ID_CHARS_SHOWN = 16
BULK_FRAMES_MAX = 16  # of FRAME_BYTES, in one measurement of bandwidth
BULK_S_MAX = 0.5
BULK_REPLY_S = 10.0

OnMessage = Callable[["PeerLink", PeerFrame], None]
OnState = Callable[["PeerLink", LinkState], None]  # (link, the state before)


class PeerLink:
    """The link to one peer. Use: `send`, `request`, `reply`; `state` and `facts` are read."""

    def __init__(
        self,
        peer: PeerConfig,
        hello: Callable[[], Hello],
        incarnation: int,
        dial: Callable[[PeerLink], None],
        on_message: OnMessage,
        on_state: OnState,
        rng: random.Random,
    ) -> None:
        """`hello` is this daemon's; `dial` starts an attempt to connect, which ends in
        `connected` or `lost`. This daemon dials the peers whose names sort after its own."""
        self.peer = peer
        self.name = peer.name
        self.facts: Hello | None = None  # of the peer, since its last Hello
        self.is_of_other_model = False  # by its last Hello: then it only keeps pages
        self.load = PeerLoad()  # of the peer, since its last Heartbeat
        self.incarnation = 0  # of the peer; 0 until its first Hello
        self.bandwidth: float | None = None  # bytes per second to the peer, when last measured
        self._hello = hello
        self._own_incarnation = incarnation
        self._dial = dial
        self._on_message = on_message
        self._on_state = on_state
        self.dials = hello().name < peer.name
        self._machine = LinkMachine(dials=self.dials, rng=rng, now=time.monotonic())
        self._connection: PeerConnection | None = None
        self._round_trips: deque[int] = deque(maxlen=RTT_KEPT)  # microseconds
        self._echo: tuple[int, float] | None = None  # the peer's last clock, and when it came
        self._requests: dict[int, asyncio.Future[PeerFrame]] = {}
        self._last_request = 0
        self._bulk_bytes = 0
        self._logged = ""

    def __repr__(self) -> str:
        return f"<PeerLink {self.name} {self.state.value}>"

    # ------------------------------------------------------------------------------- reports

    @property
    def state(self) -> LinkState:
        return self._machine.state

    @property
    def why(self) -> str:
        """Why the link is not up; "" = it is."""
        return self._machine.why

    @property
    def rtt_us(self) -> float | None:
        """Median of the last round trips, without the time that the peer held them."""
        return statistics.median(self._round_trips) if self._round_trips else None

    @property
    def bytes_free(self) -> int:
        """Bytes of pages of this daemon that the peer would keep in addition; below 0 it wants room
        back."""
        load = self.load
        return load.other_bytes_free if self.is_of_other_model else load.hold_bytes_free

    def offers(self, feature: str) -> bool:
        """Whether the link is open to a peer that has a feature for this daemon."""
        return (
            self.state.is_open
            and self.facts is not None
            and feature in self.facts.features
            and (feature in OF_OTHER_MODELS or not self.is_of_other_model)
        )

    @property
    def queued_bytes(self) -> int:
        """Bytes of frames that wait to be sent."""
        return 0 if self._connection is None else self._connection.queued_bytes

    def row(self) -> dict[str, Any]:
        """Facts about the link and its peer, for operators."""
        facts, load, ours = self.facts, self.load, self._hello()
        row: dict[str, Any] = {
            "name": self.name,
            "address": self.peer.address,
            "state": self.state.value,
            "why": self.why,
            "since_s": round(time.monotonic() - self._machine.since, 1),
            "rtt_ms": None if self.rtt_us is None else round(self.rtt_us / 1000, 3),
            "bandwidth_bytes_per_s": self.bandwidth and round(self.bandwidth),
            "differs": [] if facts is None else [label for label, *_ in _differing(ours, facts)],
        }
        if facts is not None:
            row |= {
                "model": facts.model_id,
                "model_hash": facts.model_hash,
                "arith_id": facts.arith_id,
                "repr_id": facts.repr_id,
                "features": list(facts.features),
                "incarnation": f"{self.incarnation:016x}",
                **{name: getattr(load, name) for name in load.__struct_fields__},
            }
        return row

    # ------------------------------------------------------------------------------ messages

    def send(self, message: PeerMessage, payload: bytes = b"") -> None:
        """Queue one message. Raises PEER_DOWN unless the link is open.

        A peer that does not read loses the link when QUEUE_BYTES_MAX are queued; see `room`.
        """
        self._send(message, payload, 0, ONE_WAY)

    async def request(
        self, message: PeerMessage, payload: bytes = b"", *, timeout_s: float
    ) -> PeerFrame:
        """Send a request and return its reply. Raises PEER_DOWN, also when the link is lost
        meanwhile, and PEER_SLOW after `timeout_s`."""
        self._last_request += 1
        number = self._last_request
        answered = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message, payload, number, REQUEST)
            async with asyncio.timeout(timeout_s):
                return await answered
        except TimeoutError:
            raise errors.PEER_SLOW(peer=self.name, seconds=timeout_s) from None
        finally:
            del self._requests[number]
            answered.cancel()

    def reply(self, asked: PeerFrame, message: PeerMessage, payload: bytes = b"") -> None:
        """Answer the request `asked`; dropped if the link it came on was lost meanwhile."""
        if self.state.is_open and asked.incarnation == self.incarnation:
            self._send(message, payload, asked.step, REPLY)

    async def room(self) -> None:
        """Wait until little is queued. Raises PEER_DOWN unless the link is open then."""
        if self._connection is not None:
            await self._connection.room()
        if not self.state.is_open:
            raise self._down()

    async def measure_bandwidth(self) -> float:
        """Bytes per second to the peer, by a series of at most 16 MiB or half a second.

        Raises as `request`.
        """
        payload = bytes(FRAME_BYTES)
        began, sent = time.monotonic(), 1
        while sent < BULK_FRAMES_MAX and time.monotonic() - began < BULK_S_MAX:
            await self.room()
            self.send(Bulk(), payload)
            sent += 1
        await self.room()
        frame = await self.request(Bulk(), payload, timeout_s=BULK_REPLY_S)
        seconds = time.monotonic() - began - (self.rtt_us or 0.0) / 2e6
        if not isinstance(frame.message, BulkReceived) or frame.message.n_bytes != sent * len(
            payload
        ):
            raise errors.PEER_DOWN(peer=self.name, why="it did not count what was sent")
        self.bandwidth = sent * len(payload) / max(seconds, 1e-6)
        return self.bandwidth

    def _send(self, message: PeerMessage, payload: bytes, number: int, role: int) -> None:
        if not self.state.is_open or self._connection is None:
            raise self._down()
        frame = self._encode(message, payload, number, role)
        if len(frame) > QUEUE_BYTES_MAX:
            raise ValueError(f"a frame of {len(frame)} bytes can never be queued")
        self._connection.send(frame)

    def _encode(
        self, message: PeerMessage, payload: bytes = b"", number: int = 0, role: int = ONE_WAY
    ) -> bytes:
        return PEER_LINK.encode(
            message, payload, step=number, incarnation=self._own_incarnation, attempt=role
        )

    def _down(self) -> BatchEngineError:
        return errors.PEER_DOWN(peer=self.name, why=self.why or "it was just lost")

    def abort(self, why: str) -> None:
        """End the connection of a peer that does not keep to the protocol."""
        if self._connection is not None:
            self._connection.fail(ConnectionAbortedError(why))

    # ---------------------------------------------------------------------------- connection

    def connected(self, connection: PeerConnection) -> None:
        """Use a new connection to the right daemon; an earlier one ends."""
        self._take(LinkEvent.CONNECTED, connection=connection)

    def lost(self, connection: PeerConnection | None, error: Exception | None) -> None:
        """Note the end of a connection, or with None of an attempt to make one."""
        if connection is not self._connection:
            return
        if isinstance(error, WireError) and error.code == errors.FRAME_VERSION.code:
            why = f"it speaks another version of the link: {error.why}; {SAME_VERSION}"
            self._take(LinkEvent.REFUSED, why)
        self._take(LinkEvent.LOST, reason_of(error))

    def tick(self, now: float, heartbeat: PeerLoad | None) -> None:
        """Called every TICK_S; with `heartbeat`, this daemon's load, also sends that."""
        event = self._machine.tick(now)
        if event is not None:
            self._take(event)
        if heartbeat is not None and self.state.is_open and self._connection is not None:
            echo_us, came = self._echo or (0, now)
            held_us = int((time.monotonic() - came) * 1e6)
            beat = Heartbeat(_clock_us(), echo_us, held_us, heartbeat)
            self._connection.send(self._encode(beat))

    def close(self, why: str) -> None:
        """End the link for good."""
        self._take(LinkEvent.LOST, why)

    def _take(
        self, event: LinkEvent, why: str = "", connection: PeerConnection | None = None
    ) -> None:
        """Pass one event to the machine, do what it says, and report a change of state."""
        before = self.state
        effects = self._machine.on(event, time.monotonic(), why)
        if Effect.CLOSE in effects:
            self._end_connection()
        if connection is not None:
            self._connection = connection
            connection.heard = self._heard
        if Effect.GREET in effects and self._connection is not None:
            self._connection.send(self._encode(self._hello()))
        if self.state in (LinkState.DOWN, LinkState.REFUSED):
            self._end_connection()
        if self.state is not before or Effect.CLOSE in effects:
            self._changed(before)
        if Effect.DIAL in effects:
            self._dial(self)

    def _end_connection(self) -> None:
        """End the connection and fail what waits for it; Hello is sent to its end first."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.heard = None
            connection.close()
        for waiting in self._requests.values():
            if not waiting.done():
                waiting.set_exception(self._down())
        self._echo, self._bulk_bytes = None, 0
        self._round_trips.clear()

    def _changed(self, before: LinkState) -> None:
        news = f"{self.state.value}{self.why and ': '}{self.why}"
        if self.state in LOGGED and news != self._logged:
            self._logged = news
            log.info("peer %s is %s", self.name, news)
        self._on_state(self, before)

    # -------------------------------------------------------------------------------- frames

    def _heard(self) -> None:
        self._take(LinkEvent.HEARD)

    def on_frame(self, connection: PeerConnection, frame: PeerFrame) -> None:
        """Take one frame; those of a connection that was given up are dropped."""
        if connection is not self._connection:
            return
        message = frame.message
        if self.state is LinkState.GREETING:
            self._on_greeting(connection, frame)
        elif frame.incarnation != self.incarnation:
            connection.fail(ConnectionAbortedError("it changed its incarnation"))
        elif isinstance(message, Heartbeat):
            self._on_heartbeat(message)
        elif isinstance(message, Hello | Declined):
            connection.fail(ConnectionAbortedError("it greeted twice"))
        elif frame.attempt == REPLY:
            waiting = self._requests.get(frame.step)
            if waiting is not None and not waiting.done():
                waiting.set_result(frame)
        elif isinstance(message, Bulk):
            self._bulk_bytes += len(frame.payload)
            if frame.attempt == REQUEST:
                received, self._bulk_bytes = self._bulk_bytes, 0
                self.reply(frame, BulkReceived(received))
        else:
            self._on_message(self, frame)

    def _on_greeting(self, connection: PeerConnection, frame: PeerFrame) -> None:
        message = frame.message
        if isinstance(message, Declined):
            connection.fail(ConnectionAbortedError(f"it refuses: {message.why}"))
            return
        if not isinstance(message, Hello) or message.name != self.name:
            seen = message.name if isinstance(message, Hello) else type(message).__name__
            connection.fail(ConnectionAbortedError(f"it began with {seen!r:.80}"))
            return
        self.facts, self.load, self.incarnation = message, message.load, frame.incarnation
        own = self._hello()
        self.is_of_other_model = message.model_hash != own.model_hash
        differing = _differing(own, message)
        if differing and not _keep_pages(own, message):
            label, ours, theirs = differing[0]
            fix = "serve the same file on both" if label == "model" else SAME_VERSION
            why = f"{label} differs: {self.name} has {theirs}, this daemon {ours}; {fix}"
            self._take(LinkEvent.REFUSED, why)
        else:
            self._take(LinkEvent.ACCEPTED)

    def _on_heartbeat(self, beat: Heartbeat) -> None:
        self.load = beat.load
        self._echo = beat.sent_us, time.monotonic()
        if beat.echo_us:
            round_trip_us = _clock_us() - beat.echo_us - beat.held_us
            self._round_trips.append(max(0, round_trip_us))


def _differing(ours: Hello, theirs: Hello) -> list[tuple[str, str, str]]:
    """(what, ours, theirs) of everything in which two daemons that compute the same are equal."""
    return [
        (label, _shown(ours, field), _shown(theirs, field))
        for field, label in COMPARED
        if getattr(ours, field) != getattr(theirs, field)
    ]


def _keep_pages(ours: Hello, theirs: Hello) -> bool:
    """Whether two daemons that serve different models keep pages for each other."""
    return (
        ours.arith_id == theirs.arith_id
        and ours.model_hash != theirs.model_hash
        and all(OTHER_MODELS in one.features and one.kv is not None for one in (ours, theirs))
    )


def _shown(hello: Hello, field: str) -> str:
    """The first characters of an id, after the name of the model if it is the model's."""
    start = getattr(hello, field)[:ID_CHARS_SHOWN]
    return f"{hello.model_id} ({start})" if field == "model_hash" else start


def _clock_us() -> int:
    return int(time.monotonic() * 1e6)
