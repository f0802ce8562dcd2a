"""Networks between the engines of a cluster: loopback, limited namespaces, a slow relay.

`Namespaces` gives every engine a network namespace of its own on one bridge; the kernel's token
bucket limits what each sends. It needs root and the programs of iproute2. `Relays` need neither:
connections pass through this process, which delays what it forwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from service.cli.local.cluster import free_ports

LOOPBACK = "127.0.0.1"
SUBNET = "10.213.77"
PORT = 7700  # of every engine in a namespace
BURST_BYTES = 256 << 10  # of the token bucket: what a burst sends at full speed
QUEUE_MS = 50
RELAY_BYTES = 1 << 16


class Network(Protocol):
    """Where engines listen, where others reach them, and how a process gets in."""

    @abstractmethod
    def opened(self, names: Sequence[str]) -> AbstractAsyncContextManager[None]:
        """The network of these engines, while the context lasts."""

    @abstractmethod
    def listens(self, name: str) -> str:
        """host:port on which an engine listens."""

    @abstractmethod
    def reached(self, name: str) -> str:
        """host:port at which other engines reach it."""

    @abstractmethod
    def prefix(self, name: str) -> tuple[str, ...]:
        """Words of the command line before those of the engine's process."""


class Loopback:
    """All engines on loopback; a killed one has its port again."""

    def __init__(self) -> None:
        self._ports: dict[str, int] = {}

    @asynccontextmanager
    async def opened(self, names: Sequence[str]) -> AsyncGenerator[None]:
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        yield

    def listens(self, name: str) -> str:
        return f"{LOOPBACK}:{self._ports[name]}"

    def reached(self, name: str) -> str:
        return self.listens(name)

    def prefix(self, name: str) -> tuple[str, ...]:
        return ()


class Relays:
    """Loopback, where connections to each engine go through a relay with a delay."""

    def __init__(self, delay_ms: float) -> None:
        self._delay_s = delay_ms / 1000
        self._inner = Loopback()
        self._ports: dict[str, int] = {}
        self._tasks = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def opened(self, names: Sequence[str]) -> AsyncGenerator[None]:
        async with self._inner.opened(names), contextlib.AsyncExitStack() as stack:
            for name in names:
                server = await asyncio.start_server(self._accepted(name), LOOPBACK, 0)
                stack.callback(server.close)
                self._ports[name] = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def listens(self, name: str) -> str:
        return self._inner.listens(name)

    def reached(self, name: str) -> str:
        return f"{LOOPBACK}:{self._ports[name]}"

    def prefix(self, name: str) -> tuple[str, ...]:
        return ()

    def _accepted(self, name: str) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._relay(name, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accepted

    async def _relay(
        self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward both directions until either ends."""
        host, port = self._inner.listens(name).split(":")
        with contextlib.suppress(OSError), contextlib.closing(writer):
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            with contextlib.closing(far_writer):
                ways = {
                    asyncio.ensure_future(self._forward(reader, far_writer)),
                    asyncio.ensure_future(self._forward(far_reader, writer)),
                }
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write what was read, each piece after the delay; reading goes on meanwhile."""
        pieces = asyncio.Queue[tuple[float, bytes]](1024)
        loop = asyncio.get_running_loop()

        async def write() -> None:
            while True:
                due, piece = await pieces.get()
                await asyncio.sleep(due - loop.time())
                if not piece:
                    return
                writer.write(piece)
                await writer.drain()

        writing = asyncio.ensure_future(write())
        try:
            while piece := await reader.read(RELAY_BYTES):
                await pieces.put((loop.time() + self._delay_s, piece))
            await pieces.put((loop.time() + self._delay_s, b""))
            await writing
        finally:
            writing.cancel()


def namespaces_work() -> bool:
    """Whether this process may make namespaces whose links have a limited rate."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        return False
    probe = (
        "ip link add be0 type veth peer name be1 &&"
        " tc qdisc add dev be0 root tbf rate 1gbit burst 256kb latency 50ms"
    )
    return subprocess.run(["unshare", "-n", "sh", "-c", probe], capture_output=True).returncode == 0


class Namespaces:
    """One namespace per engine, all on a bridge; what each sends is limited to `rate_mbit`."""

    def __init__(self, rate_mbit: float) -> None:
        self.rate_mbit = rate_mbit
        self._hosts: dict[str, str] = {}

    @asynccontextmanager
    async def opened(self, names: Sequence[str]) -> AsyncGenerator[None]:
        """Raises RuntimeError if a command fails."""
        with contextlib.ExitStack() as stack:
            hub = stack.enter_context(_namespace(f"be{os.getpid()}-hub"))
            _in(hub, "ip link add hub type bridge")
            _in(hub, "ip link set hub up")
            for number, name in enumerate(names, 1):
                space = stack.enter_context(_namespace(self._space(name)))
                self._hosts[name] = f"{SUBNET}.{number}"
                _run(f"ip -n {space} link add eth type veth peer name port{number} netns {hub}")
                _in(hub, f"ip link set port{number} master hub up")
                _in(space, f"ip addr add {self._hosts[name]}/24 dev eth")
                _in(space, "ip link set eth up")
                _in(space, "ip link set lo up")
                rate = f"rate {round(1000 * self.rate_mbit)}kbit burst {BURST_BYTES}"
                _in(space, f"tc qdisc add dev eth root tbf {rate} latency {QUEUE_MS}ms")
            yield

    def listens(self, name: str) -> str:
        return f"{self._hosts[name]}:{PORT}"

    def reached(self, name: str) -> str:
        return self.listens(name)

    def prefix(self, name: str) -> tuple[str, ...]:
        return ("nsenter", f"--net=/run/netns/{self._space(name)}")

    def bytes_sent(self, name: str) -> int:
        """Bytes that an engine has sent to others, with all headers."""
        path = "/sys/class/net/eth/statistics/tx_bytes"
        return int(_in(self._space(name), f"cat {path}"))

    def _space(self, name: str) -> str:
        return f"be{os.getpid()}-{name}"


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run(f"ip netns add {name}")
    try:
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def _in(space: str, command: str) -> str:
    return _run(f"ip netns exec {space} {command}")


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout
