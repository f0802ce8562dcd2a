"""The admin socket: one JSON line in, one JSON line out, for the user who runs the daemon.

Owns the commands status, sessions, requests, cancel and drain. Refuses other users twice: by the
mode of the socket (0600) and by the peer's uid. Nothing here is reachable over HTTP (R4).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec

import batchengine
from batchengine.core import BatchEngineError
from service import errors
from service.api import Service

LINE_BYTES_MAX = 16 * 1024
COMMANDS = ("status", "sessions", "requests", "cancel", "drain")


class Command(msgspec.Struct, forbid_unknown_fields=True):
    """One line of input."""

    command: str
    request_id: str = ""


class Control:
    """The admin socket of one daemon."""

    def __init__(self, path: Path, service: Service, drain: Callable[[], None]) -> None:
        self._path = path
        self._service = service
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listens with mode 0600; raises BE1113 when another daemon answers there."""
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clear_stale()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            old_mask = os.umask(0o177)  # born with 0600: no moment in which others may connect
            try:
                sock.bind(str(path))
            finally:
                os.umask(old_mask)
        except OSError as error:
            raise _socket_error(path, error.strerror or str(error)) from None
        self._server = await asyncio.start_unix_server(self._serve, sock=sock, limit=LINE_BYTES_MAX)

    def _clear_stale(self) -> None:
        """Removes a socket nobody answers on; anything else in the way is an error."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise _socket_error(self._path, "something that is not a socket is in the way")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise _socket_error(self._path, "another daemon answers there")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            if _peer_uid(writer) not in (0, os.getuid()):
                return
            while line := await reader.readline():
                writer.write(msgspec.json.encode(self._answer(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):  # ValueError: a line beyond the limit
            pass
        finally:
            if task is not None:
                self._tasks.discard(task)
            writer.close()

    def _answer(self, line: bytes) -> dict[str, object]:
        try:
            command = msgspec.json.decode(line, type=Command)
            return {"ok": True, **self._run(command)}
        except msgspec.MsgspecError:
            error = errors.invalid_json('expected {"command": "' + "|".join(COMMANDS) + '"}')
        except BatchEngineError as raised:
            error = raised
        return {"ok": False, **errors.error_object(error)}

    def _run(self, command: Command) -> dict[str, object]:
        service = self._service
        match command.command:
            case "status":
                return {"status": self._status()}
            case "sessions":
                return {"sessions": [dict(row) for row in service.engine.sessions()]}
            case "requests":
                return {"requests": [dict(row) for row in service.engine.requests()]}
            case "cancel":
                if not service.cancel(command.request_id):
                    raise errors.invalid_field(
                        "request_id", "no such request is running", fix="see `batchengine ps`"
                    )
                return {"cancelled": command.request_id}
            case "drain":
                self._drain()
                return {"draining": True}
            case _:
                raise errors.invalid_field(
                    "command", "unknown command", fix="use " + ", ".join(COMMANDS)
                )

    def _status(self) -> dict[str, object]:
        service = self._service
        engine = service.engine
        loading = engine.state == "loading"
        return {
            "state": engine.state,
            "progress": engine.progress,
            "pid": os.getpid(),
            "version": batchengine.__version__,
            "address": f"{service.config.server.host}:{service.config.server.port}",
            "model": None if loading else engine.info.model_id,
            "context_tokens": None if loading else engine.info.context_tokens,
            "http_requests": len(service.live),
            "lanes": [dict(lane) for lane in engine.lanes()],
            "stats": dict(engine.stats()),
        }

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.unlink()

    def unlink(self) -> None:
        """Removes the socket this daemon made; another daemon's is never touched."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock = cast("socket.socket", writer.get_extra_info("socket"))
    size = struct.calcsize("3i")
    creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return struct.unpack("3i", creds)[1]


def _socket_error(path: Path, why: str) -> BatchEngineError:
    return BatchEngineError(
        "BE1113",
        f"cannot open the admin socket {path}",
        why=why.lower(),
        fix="stop the other daemon, or choose another path with --admin-socket",
    )
