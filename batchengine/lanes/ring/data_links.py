"""The data links of one worker: connected sockets that its engine passes to it, and one poll set.

Nothing here blocks. Received bytes become frames, and a frame that the socket does not take waits
in a bounded buffer. A link ends alone: by its peer, by bytes that are no frame, by a failed
handshake, or because its peer does not read or sends more than is served.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable

from batchengine import errors
from batchengine.wire import lane as wire
from batchengine.wire.data import DATA_LINK, DataFrame, DataMessage
from batchengine.wire.frames import Decoder, WireError

RECEIVE_BYTES = 256 << 10
RECEIVES_MAX = 64  # of one link in one poll: then others have their turn
RECORD_BYTES = 16 << 10  # of TLS: what one receive returns at most
SEND_CHUNK = 256 << 10
SEND_BYTES_MAX = 96 << 20  # what waits for a peer that does not read: a frame of any size, and more
HANDSHAKE_S = 5.0
USER_TIMEOUT_MS = 10_000  # for data that a peer's host does not acknowledge
TOKEN_BYTES = 16
FILES_MAX = 16  # sockets that have come and that no OpenLink has named

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]  # of the end that dials, and of the other
OnFrame = Callable[[int, DataFrame], None]  # link, frame


def tls_contexts(identity: wire.LinkIdentity) -> Contexts | None:
    """The contexts of these files, which are read here; None without files.

    Both ends prove their names by certificates of one authority, with TLS 1.3. Raises LINK_FILES.
    """
    if not identity.certificate:
        return None
    try:
        return _context(identity, ssl.PROTOCOL_TLS_CLIENT), _context(
            identity, ssl.PROTOCOL_TLS_SERVER
        )
    except (OSError, ValueError) as error:
        raise errors.LINK_FILES(why=str(error)) from None


def _context(identity: wire.LinkIdentity, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # _end_handshake compares the whole name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(identity.authority)
    context.load_cert_chain(identity.certificate, identity.key)
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


class DataLink:
    """One connected socket. A method that raises OSError, WireError or LinkError ends it."""

    def __init__(self, note: wire.OpenLink, sock: socket.socket, tls: Contexts | None) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
        self.number = note.number
        self.peer = note.peer
        self.is_up = tls is None
        self.handshake_due = time.monotonic() + HANDSHAKE_S
        self.watched = select.EPOLLIN
        self._decoder = Decoder[DataMessage](DATA_LINK)
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._most = RECEIVE_BYTES  # that a receive returns while more is there
        if tls is not None:
            context = tls[0] if note.dials else tls[1]
            sock = context.wrap_socket(
                sock, server_side=not note.dials, do_handshake_on_connect=False
            )
            self._most = RECORD_BYTES
        self.sock = sock

    def advance_handshake(self) -> None:
        """Take the TLS handshake as far as the received bytes allow; `is_up` at its end."""
        sock = self.sock
        if not isinstance(sock, ssl.SSLSocket):
            return
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self.watched = select.EPOLLIN
            return
        except ssl.SSLWantWriteError:
            self.watched = select.EPOLLIN | select.EPOLLOUT
            return
        certificate = sock.getpeercert() or {}
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
        if self.peer not in names:
            raise LinkError(f"the certificate is of {names}")
        self.is_up = True
        self.flush()

    def receive(self, buffer: memoryview, on_frame: OnFrame) -> None:
        """Pass on every frame that has arrived; `buffer` is for the bytes of one receive."""
        for _ in range(RECEIVES_MAX):
            try:
                count = self.sock.recv_into(buffer)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            if not count:
                self._decoder.end()
                raise LinkError("the peer closed it")
            for frame in self._decoder.feed(buffer[:count]):
                on_frame(self.number, frame)
            if count < self._most:
                return

    def send(self, frame: bytes) -> None:
        """Send a frame, now or when the socket takes it."""
        self.waiting_bytes += len(frame)
        if self.waiting_bytes > SEND_BYTES_MAX:
            raise LinkError(f"{self.waiting_bytes} bytes wait for the peer to read")
        view = memoryview(frame)
        self._waiting.extend(view[at : at + SEND_CHUNK] for at in range(0, len(view), SEND_CHUNK))
        if self.is_up:
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        waiting = self._waiting
        while waiting:
            try:
                count = self.sock.send(waiting[0])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            self.waiting_bytes -= count
            if count == len(waiting[0]):
                waiting.popleft()
            else:
                waiting[0] = waiting[0][count:]
        self.watched = select.EPOLLIN | (select.EPOLLOUT if waiting else 0)


class LinkError(Exception):
    """Why a link must end."""


class DataLinks:
    """All data links of a worker, and its engine's link in the same poll set.

    `on_frame` is called for each frame, from `poll`; `on_lost` once for each link that has ended,
    from any method. `report` takes what the engine is to know. `poll` looks for `spin_us` before it
    sleeps.
    """

    def __init__(
        self,
        identity: wire.LinkIdentity,
        files: socket.socket,
        engine: int,
        report: Callable[[wire.LinkChanged], None],
        spin_us: int,
    ) -> None:
        self.name = identity.name
        self.on_frame: OnFrame = lambda number, frame: None
        self.on_lost: Callable[[int], None] = lambda number: None
        self._tls = tls_contexts(identity)
        files.setblocking(False)
        self._files = files
        self._engine = engine
        self._report = report
        self._spin_s = spin_us * 1e-6
        self._tokens: dict[bytes, socket.socket] = {}
        self._links: dict[int, DataLink] = {}
        self._by_fd: dict[int, DataLink] = {}
        self._by_peer: dict[str, int] = {}
        self._opening: set[int] = set()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._epoll = select.epoll()
        self._epoll.register(engine, select.EPOLLIN)

    @property
    def has_timers(self) -> bool:
        """Whether `poll` must be called again soon though nothing has happened."""
        return bool(self._opening)

    def peer_of(self, number: int) -> str | None:
        """The name behind an open link; this worker's own for SELF."""
        if number == wire.SELF:
            return self.name
        link = self._links.get(number)
        return link.peer if link is not None else None

    def link_to(self, peer: str) -> int | None:
        """The open link to a peer; SELF for this worker's own name."""
        return wire.SELF if peer == self.name else self._by_peer.get(peer)

    def waiting(self, number: int) -> int:
        """Bytes that wait for the peer of an open link to read them; 0 for SELF."""
        link = self._links.get(number)
        return link.waiting_bytes if link is not None else 0

    def open(self, note: wire.OpenLink) -> None:
        """Serve the socket that has come with a token."""
        sock = self._take(note.token)
        why = ""
        if sock is None:
            why = "no socket has come with this token"
        elif not wire.SELF < note.number <= wire.LINK_MAX or note.number in self._links:
            why = f"link {note.number} is in use or out of range"
        if sock is None or why:
            if sock is not None:
                sock.close()
            self._report(wire.LinkChanged(note.number, False, why))
            return
        try:
            link = DataLink(note, sock, self._tls)
        except (OSError, ValueError) as error:
            sock.close()
            self._report(wire.LinkChanged(note.number, False, str(error)))
            return
        self._links[link.number] = self._by_fd[link.sock.fileno()] = link
        self._by_peer[link.peer] = link.number
        self._epoll.register(link.sock.fileno(), link.watched)
        if link.is_up:
            self._report(wire.LinkChanged(link.number, True))
        else:
            self._opening.add(link.number)
            self._step(link, link.advance_handshake)

    def close(self, number: int, why: str) -> None:
        """End a link; no error if it has ended."""
        link = self._links.pop(number, None)
        if link is None:
            return
        self._opening.discard(number)
        fd = link.sock.fileno()
        del self._by_fd[fd]
        if self._by_peer.get(link.peer) == number:
            del self._by_peer[link.peer]
            others = [other for other in self._links.values() if other.peer == link.peer]
            self._by_peer.update({other.peer: other.number for other in others})
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)
        link.sock.close()
        self._report(wire.LinkChanged(number, False, why))
        self.on_lost(number)

    def send(self, number: int, frame: bytes) -> bool:
        """Send one encoded frame; False if the link has ended or ends by this."""
        link = self._links.get(number)
        if link is None:
            return False
        watched = link.watched
        try:
            link.send(frame)
        except (OSError, LinkError) as error:
            self.close(number, str(error))
            return False
        if link.watched != watched:
            self._epoll.modify(link.sock.fileno(), link.watched)
        return True

    def poll(self, timeout_s: float | None) -> bool:
        """Receive and send what can be; wait for it at most `timeout_s`, None = for ever.

        Returns whether the engine's link can be read.
        """
        is_engine = False
        for fd, event in self._wait(timeout_s):
            if fd == self._engine:
                is_engine = True
            elif (link := self._by_fd.get(fd)) is not None:
                self._serve(link, event)
        if self._opening:
            now = time.monotonic()
            for number in [n for n in self._opening if self._links[n].handshake_due < now]:
                self.close(number, f"no handshake in {HANDSHAKE_S:.0f} s")
        return is_engine

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """The events that are due. Looks again for a while before it sleeps: waking up takes
        longer than a hop."""
        events = self._epoll.poll(0)
        if events or timeout_s == 0:
            return events
        end = time.perf_counter() + self._spin_s
        while not events and time.perf_counter() < end:
            events = self._epoll.poll(0)
        return events or self._epoll.poll(timeout_s)

    def _serve(self, link: DataLink, event: int) -> None:
        if not link.is_up:
            self._step(link, link.advance_handshake)
            return
        if event & select.EPOLLOUT:
            self._step(link, link.flush)
        if event & ~select.EPOLLOUT and link.number in self._links:
            self._step(link, lambda: link.receive(self._buffer, self.on_frame))

    def _step(self, link: DataLink, step: Callable[[], None]) -> None:
        watched = link.watched
        try:
            step()
        except (OSError, LinkError, WireError) as error:
            self.close(link.number, str(error))
            return
        if link.number not in self._links:
            return
        if link.is_up and link.number in self._opening:
            self._opening.discard(link.number)
            self._report(wire.LinkChanged(link.number, True))
            self._step(
                link, lambda: link.receive(self._buffer, self.on_frame)
            )  # may have come with the handshake
        elif link.watched != watched:
            self._epoll.modify(link.sock.fileno(), link.watched)

    def _take(self, token: bytes) -> socket.socket | None:
        """The socket that has come with a token."""
        while True:
            try:
                got, fds, _, _ = socket.recv_fds(self._files, TOKEN_BYTES + 1, 4)
            except OSError:
                break
            if not got and not fds:
                break
            for fd in fds[1:]:
                os.close(fd)
            if fds:
                if (replaced := self._tokens.pop(got, None)) is not None:
                    replaced.close()
                self._tokens[got] = socket.socket(fileno=fds[0])
            while len(self._tokens) > FILES_MAX:
                self._tokens.pop(next(iter(self._tokens))).close()
        return self._tokens.pop(token, None)
