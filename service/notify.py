"""The service manager: messages to it (sd_notify: readiness, status, watchdog, stopping), and
listening sockets from it.

Does nothing outside systemd. One datagram per message; a lost one is no error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, MutableMapping

EXTEND_SECONDS = 120  # progress extends the start-up time by so much (TimeoutStartSec)
EXTEND_EVERY_S = 1.0
_EXTEND = f"EXTEND_TIMEOUT_USEC={EXTEND_SECONDS * 1_000_000}"


def passed_sockets(env: MutableMapping[str, str], first: int = 3) -> list[socket.socket]:
    """The sockets on which the manager listens for this process, which are taken out of `env`;
    `first` is the number of the first descriptor."""
    count, pid = env.pop("LISTEN_FDS", ""), env.pop("LISTEN_PID", "")
    env.pop("LISTEN_FDNAMES", None)
    if not count.isdecimal() or pid != str(os.getpid()):
        return []
    found: list[socket.socket] = []
    for number in range(first, first + int(count)):
        os.set_inheritable(number, False)
        found.append(socket.socket(fileno=number))
    return found


class Notifier:
    """The service manager named by $NOTIFY_SOCKET, if any."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        env = os.environ if environment is None else environment
        name = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        self.watchdog_s = self._watchdog_seconds(env)

    @staticmethod
    def _watchdog_seconds(env: Mapping[str, str]) -> float:
        """The watchdog's interval in seconds; 0 = no watchdog, or one meant for another process."""
        pid = env.get("WATCHDOG_PID", "")
        usec = env.get("WATCHDOG_USEC", "")
        if not usec.isdecimal() or (pid and pid != str(os.getpid())):
            return 0.0
        return int(usec) / 1e6

    def __repr__(self) -> str:
        return f"<Notifier {'systemd' if self._socket else 'off'} watchdog={self.watchdog_s:g}s>"

    def send(self, *lines: str) -> None:
        """Sends assignments such as `READY=1` in one datagram."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._socket.sendto("\n".join(lines).encode(), self._address)

    def stage(self, text: str) -> None:
        """Sends the progress of a start that is still under way."""
        self.send(f"STATUS={text}", _EXTEND)

    async def extend_start(self, progress: Callable[[], float]) -> None:
        """Extends the start-up time after every second in which `progress` has changed."""
        before = progress()
        while True:
            await asyncio.sleep(EXTEND_EVERY_S)
            if (now := progress()) != before:
                before = now
                self.send(_EXTEND)

    def ready(self, text: str) -> None:
        self.send("READY=1", f"STATUS={text}")

    def stopping(self, text: str, seconds: float) -> None:
        self.send("STOPPING=1", f"STATUS={text}", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    async def feed_watchdog(self, alive: Callable[[], bool]) -> None:
        """Pings at a third of the watchdog's interval while `alive`; returns if there is none."""
        if not self.watchdog_s:
            return
        while True:
            if alive():
                self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
