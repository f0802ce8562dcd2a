"""The peer port against everything that is not a peer: bounded in time, bytes, places and log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from batchengine.peers import certificates, channel, listener
from batchengine.peers.channel import CONTROL, UNAUTHENTICATED_BYTES_MAX
from batchengine.peers.identity import PEERS, Identity, _context
from batchengine.peers.transitions import LinkState
from batchengine.wire.peer import Bulk, BulkReceived
from tests.peers.scene import Node, ScriptedListener, certify, dial, identity, node, pair, until
from tests.wire.test_peer import forge

UP, DOWN = LinkState.UP, LinkState.DOWN
LOG = "batchengine.peers"


@contextlib.asynccontextmanager
async def unharmed(folder: Path) -> AsyncIterator[tuple[Node, int]]:
    """Daemon `b` with a link to `a`, which is the same link after the block."""
    async with pair(folder) as (a, b):
        since = b.states[-1]
        yield b, b.peers.port
        assert b.states[-1] == since
        frame = await a.link("b").request(Bulk(), b"123", timeout_s=5)
        assert frame.message == BulkReceived(3)
        assert not b.task.done()


async def end_of(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    loop, data = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while part := await loop.sock_recv(sock, 1 << 16):
            data += part
    return data


async def opened(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(10_000),
    "tls to the plain prefix": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "prefix, then garbage": CONTROL + b"\xff" * 9_000,
    "prefix, then no TLS": CONTROL + b"\x01a" + b"BEWF" + bytes(44),
    "prefix, then an endless handshake": CONTROL + b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" * 500,
    "data prefix": b"BEPD1" + bytes(16),
}


@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_is_closed_at_once(tmp_path: Path, what: str) -> None:
    async with unharmed(tmp_path) as (b, port):
        before = b.peers.connections_refused
        sock = await opened(port)
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(sock, GARBAGE[what])
        answer = await end_of(sock)
        assert time.monotonic() - began < listener.KNOWN_S + 3.0
        assert len(answer) < 100, "an alert at most"
        sock.close()
        await until(lambda: b.peers.connections_refused == before + 1)


@pytest.mark.alone
async def test_a_handshake_that_is_slow_or_never_begins_ends_in_a_second(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as (b, port):
        silent, begun = await opened(port), await opened(port)
        loop, began = asyncio.get_running_loop(), time.monotonic()
        await loop.sock_sendall(begun, CONTROL)

        async def drip() -> None:
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(505)
            with contextlib.suppress(ConnectionError):
                for byte in hello:
                    await loop.sock_sendall(begun, bytes([byte]))
                    await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await asyncio.gather(end_of(silent), end_of(begun))
        took = time.monotonic() - began
        assert listener.KNOWN_S - 0.1 <= took < listener.KNOWN_S + 2.0
        await dripping
        silent.close()
        begun.close()
        assert "not known within 1 s" in b.peers.status()["last_refused"]


async def test_a_stranger_is_read_up_to_4_kib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where the bytes are taken from the socket."""
    async with unharmed(tmp_path) as (_, port):
        loop, taken = asyncio.get_running_loop(), 0
        receive = channel.asyncio.get_running_loop

        class Counting:
            def __getattr__(self, name: str) -> object:
                return getattr(loop, name)

            async def sock_recv(self, sock: socket.socket, n: int) -> bytes:
                nonlocal taken
                data = await loop.sock_recv(sock, n)
                taken += len(data)
                return data

        monkeypatch.setattr(channel.asyncio, "get_running_loop", Counting)
        sock = await opened(port)
        record = b"\x16\x03\x01\x40\x00" + b"\x01\x00\x3f\xfc" + bytes(16380)
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(sock, CONTROL + record * 20)
        await asyncio.sleep(0.3)
        monkeypatch.setattr(channel.asyncio, "get_running_loop", receive)
        sock.close()
        assert 0 < taken <= UNAUTHENTICATED_BYTES_MAX + len(CONTROL)


def test_a_handshake_takes_less_than_half_of_what_is_read(tmp_path: Path) -> None:
    """So that certificates with other kinds of keys fit too."""
    certify(tmp_path, "a", "b")
    client_context, server_context = identity(tmp_path, "a").client, identity(tmp_path, "b").server
    assert client_context is not None
    assert server_context is not None
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname="b")
    server = server_context.wrap_bio(up, down, server_side=True)
    read = 0
    for end in (client, server, client, server):
        read += up.pending if end is server else 0
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert server.version() == "TLSv1.3"
    assert 0 < read < UNAUTHENTICATED_BYTES_MAX / 2


async def test_a_certificate_of_another_authority(tmp_path: Path) -> None:
    async with unharmed(tmp_path) as (b, port):
        certify(tmp_path / "other", "a", "b")
        with pytest.raises(ssl.SSLCertVerificationError):  # the client looks first
            await dial(identity(tmp_path / "other", "a"), "b", port)
        lax = identity(tmp_path / "other", "a").client
        assert lax is not None
        lax.check_hostname = False
        lax.verify_mode = ssl.CERT_NONE
        sock = await opened(port)
        await asyncio.get_running_loop().sock_sendall(sock, CONTROL)
        tls, _ = await channel._handshake(sock, lax, "b")
        await asyncio.get_running_loop().sock_sendall(sock, tls.seal(b"BEWF" + bytes(44)))
        await end_of(sock)
        sock.close()
        await until(lambda: "certificate is refused" in b.peers.status()["last_refused"])


async def test_a_dialler_says_why_a_certificate_was_refused(tmp_path: Path) -> None:
    """`a` of one authority, `b` of another: `a` sees b's, `b` sees the alert."""
    certify(tmp_path, "a", "b")
    certify(tmp_path / "other", "b", "a")
    async with node(tmp_path, "a") as a, node(tmp_path / "other", "b") as b:
        link = await a.know(b)
        await until(lambda: "certificate is refused" in link.why)
        assert link.state is not UP
        await until(lambda: b.peers.connections_refused > 0)
        assert "refuses TLS" in b.peers.status()["last_refused"]


async def test_right_authority_and_another_name(tmp_path: Path) -> None:
    """`c` listens where `a` expects `b`; and `c` connects where only `a` is known."""
    certify(tmp_path, "a", "b", "c")
    async with node(tmp_path, "a") as a, node(tmp_path, "c") as c:
        link = await a.add("b", c.peers.port)
        await until(lambda: "certificate is refused" in link.why)
        assert "'b'" in link.why
        scripted = await dial(identity(tmp_path, "c"), "a", a.peers.port)
        declined = await scripted.receive()
        assert declined is not None
        assert "a has no peer c" in getattr(declined.message, "why", "")
        scripted.close()
        assert not any(state.is_open for _, *both in a.states for state in both)


async def test_an_expired_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own daemon names it, and another refuses it."""
    certify(tmp_path, "b")
    monkeypatch.setattr(certificates, "CLOCK_SKEW_DAYS", 20)
    monkeypatch.setattr(certificates, "VALID_DAYS", -1)
    bundle = certificates.issue_bundle(tmp_path / "b", "a")
    certificates.import_bundle(tmp_path / "a", bundle)
    async with node(tmp_path, "a") as a, node(tmp_path, "b") as b:
        await until(lambda: "expired" in a.peers.status()["trouble"])
        sock = await opened(a.peers.port)
        await asyncio.get_running_loop().sock_sendall(sock, CONTROL)
        assert await end_of(sock) == b""
        sock.close()
        expired = Identity("a", None, _context(tmp_path / "a", ssl.PROTOCOL_TLS_CLIENT))
        scripted = await dial(expired, "b", b.peers.port)
        with pytest.raises(ssl.SSLError, match="expired"):
            await scripted.receive()
        scripted.close()
        await until(lambda: "expired" in b.peers.status()["last_refused"])


async def test_a_thousand_connections_of_garbage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half are garbage, half say nothing and stay: memory, files, tasks and log stay bounded."""
    monkeypatch.setattr(listener, "GIVE_WAY_S", 0.005)  # each silent one holds its place so long
    caplog.set_level(logging.INFO, LOG)
    async with unharmed(tmp_path) as (b, port):
        caplog.clear()
        process = psutil.Process()
        memory = process.memory_info().rss
        waiting_most = 0
        socks: list[socket.socket] = []
        for index in range(1000):
            sock = await opened(port)
            with contextlib.suppress(OSError):
                if index % 2:
                    await asyncio.get_running_loop().sock_sendall(sock, os.urandom(600))
                    sock.close()
                else:
                    socks.append(sock)
            waiting_most = max(waiting_most, len(b.peers._listener._waiting))
            if len(socks) > 200:
                socks.pop(0).close()
        assert waiting_most <= listener.WAITING_MAX
        for sock in socks:
            sock.close()
        await until(lambda: b.peers.connections_refused >= 1000, 60)
        assert process.memory_info().rss - memory < 16 << 20
        lines = [r for r in caplog.records if r.name == LOG and r.levelno >= logging.WARNING]
        assert len(lines) <= 1


async def test_a_new_link_comes_up_while_strangers_hold_every_place(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "a") as a, node(tmp_path, "b") as b:
        stop = False

        async def flood() -> None:
            held: list[socket.socket] = []
            while not stop:
                with contextlib.suppress(OSError):
                    held.append(await opened(b.peers.port))
                if len(held) > 60:
                    held.pop(0).close()
                await asyncio.sleep(0.01)
            for sock in held:
                sock.close()

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(0.5)
        await asyncio.gather(a.know(b), b.know(a))
        await b.until("a", UP, 30)
        await asyncio.sleep(1.0)
        assert a.link("b").state is UP
        stop = True
        await flooding


@pytest.mark.parametrize("what", ["oversize", "corrupt", "truncated", "unknown kind"])
async def test_a_broken_frame_of_a_peer_ends_its_link_only(tmp_path: Path, what: str) -> None:
    certify(tmp_path, "a", "b", "c")
    async with node(tmp_path, "b") as b, node(tmp_path, "c") as c:
        await asyncio.gather(b.know(c), c.know(b))
        await b.until("c", UP)
        await b.add("a")
        scripted = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await scripted.greet("a")
        link = await b.until("a", UP)
        data = {
            "oversize": forge(4, b"\x91\x04", payload_len=2**32 - 1),
            "corrupt": b"\0" + forge(4, b"\x91\x04")[1:],
            "truncated": forge(4, b"\x91\x04", payload_len=100),
            "unknown kind": forge(99, b"\x91\x04"),
        }[what]
        await scripted.send_bytes(data)
        if what == "truncated":
            scripted.close()
        await b.until("a", DOWN)
        assert link.why
        scripted.close()
        assert b.link("c").state is UP
        again = await dial(identity(tmp_path, "a"), "b", b.peers.port)
        await again.greet("a")
        await b.until("a", UP)
        again.close()


async def test_plain_frames_to_a_tls_port_and_tls_to_a_plain_port(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    async with node(tmp_path, "a", tls=False) as a, node(tmp_path, "b") as b:
        (tmp_path / "a" / PEERS).mkdir(exist_ok=True)
        link = await a.know(b)
        await until(lambda: b.peers.connections_refused > 0)
        assert link.state is not UP
    certify(tmp_path / "2", "a", "b")
    async with node(tmp_path / "2", "a") as a, node(tmp_path / "2", "b", tls=False) as b:
        link = await a.know(b)
        await until(lambda: b.peers.connections_refused > 0)
        assert link.state is not UP
        assert link.why


async def test_a_listener_that_accepts_and_says_nothing(tmp_path: Path) -> None:
    """`b` has TCP only: the handshake times out; `c` has TLS too: the Hello does."""
    certify(tmp_path, "a", "b", "c")
    async with node(tmp_path, "a") as a:
        mute = socket.create_server(("127.0.0.1", 0))
        quiet = ScriptedListener(identity(tmp_path, "c"))
        adding = asyncio.create_task(a.add("c", quiet.port))
        scripted = await quiet.accept()
        b, c = await a.add("b", mute.getsockname()[1]), await adding
        await until(lambda: c.state is LinkState.GREETING)
        await asyncio.gather(
            until(lambda: "no answer within 3 s" in b.why),
            until(lambda: c.state is DOWN and "nothing was heard" in c.why, 8),
        )
        scripted.close()
        mute.close()
        quiet.close()
