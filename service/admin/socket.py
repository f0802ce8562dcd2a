"""The admin socket: one JSON line in, one JSON line out, for the user who runs the daemon.

Owns the commands and the fields that each takes; those about one session come from
`service.operations`. Refuses other users twice: by the mode of the socket (0600) and by the peer's
uid. Nothing here is reachable over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

import batchengine
from batchengine import errors
from batchengine.core import BatchEngineError
from service import operations
from service.admin.client import ADMIN_LINE_BYTES_MAX
from service.engine_api import check_serving
from service.http.admission import Service
from service.operations import OPERATIONS, Operation
from service.protocols.openai.envelope import error_object
from service.session_ids import printable

log = logging.getLogger("batchengine.service")

TEXT_CHARS_MAX = 4096

LABELS = {  # field -> what it names, and where to find one
    "session": ("session", "see `batchengine sessions` for their ids"),
    "id": ("request or session", "see `batchengine ps` and `batchengine sessions` for ids"),
    "request_id": ("request", "see `batchengine ps` for their ids"),
    "tenant": ("key name", "leave --key-name out, or name an API key of the configuration"),
    **{one.name: (one.label, one.hint) for row in OPERATIONS for one in row.arguments},
}
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_CHARS_MAX)]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of status, requests and stop: none."""


class Listing(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of sessions: `stored` also lists those that are on disk only."""

    stored: bool = False


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of cancel."""

    request_id: Text


class StoreOp(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of store."""

    op: Literal["stat", "verify", "gc"] = "stat"


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of drain: `show` changes nothing."""

    action: Literal["begin", "undo", "show"] = "begin"


class PeersStatus(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of peers: `bandwidth` measures it first."""

    bandwidth: bool = False


Method = Callable[[Any], Awaitable[dict[str, object]]]


def _arguments_of(operation: Operation) -> type[msgspec.Struct]:
    """The fields of one operation: its subject, `tenant` (the name of an API key; None = any), and
    its own arguments."""
    text: Any = Text
    fields: list[tuple[str, Any, Any] | tuple[str, Any]] = [
        (operation.subject, Text),
        ("tenant", str | None, None),
        *((one.name, text | None, None) for one in operation.arguments),
    ]
    return msgspec.defstruct(operation.name, fields, forbid_unknown_fields=True)


class AdminSocket:
    """The admin socket of one daemon."""

    def __init__(self, path: Path, service: Service, stop: Callable[[], None]) -> None:
        self._path = path
        self._service = service
        self._stop = stop
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._commands: dict[str, tuple[type[msgspec.Struct], Method]] = {
            "status": (Nothing, self._status),
            "sessions": (Listing, self._sessions),
            "requests": (Nothing, self._requests),
            "cancel": (Request, self._cancel),
            "drain": (Drain, self._drain),
            "stop": (Nothing, self._start_stop),
            **{row.name: (_arguments_of(row), partial(self._operate, row)) for row in OPERATIONS},
            "store": (StoreOp, self._store),
            "peers": (PeersStatus, self._peers),
        }

    async def open(self) -> None:
        """Listens with mode 0600; raises ADMIN_SOCKET when another daemon answers there."""
        path = self._path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clear_stale()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            old_mask = os.umask(0o177)  # the socket is made with mode 0600
            try:
                sock.bind(str(path))
            finally:
                os.umask(old_mask)
        except OSError as error:
            raise _socket_error(path, error.strerror or str(error)) from None
        self._server = await asyncio.start_unix_server(
            self._accept, sock=sock, limit=ADMIN_LINE_BYTES_MAX
        )

    def _clear_stale(self) -> None:
        """Removes a socket without a listener; anything else in the way is an error."""
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

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Registers a connection before its task runs, so that `close` finds every one."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections[task] = writer
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an admin connection failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            ConnectionError, ValueError
        ):  # ValueError: a line beyond the limit
            if _peer_uid(writer) not in (0, os.getuid()):
                return
            while line := await reader.readline():
                writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
                await writer.drain()

    async def _answer(self, line: bytes) -> dict[str, object]:
        try:
            return {"ok": True, **await self._run(line)}
        except BatchEngineError as error:
            return {"ok": False, **error_object(error)}
        except Exception:
            log.exception("an admin command failed")
            return {"ok": False, **error_object(errors.INTERNAL_ERROR(request_id="admin"))}

    async def _run(self, line: bytes) -> dict[str, object]:
        """Runs the command of one line; raises BatchEngineError for wrong fields."""
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise errors.INVALID_JSON(why='expected {"command": "status"}') from None
        command = fields.pop("command", None)
        known = self._commands.get(command) if isinstance(command, str) else None
        if known is None:
            fix = "use " + ", ".join(self._commands)
            raise errors.INVALID_FIELD(param="command", what="unknown command", fix=fix)
        kind, method = known
        try:
            asked = msgspec.convert(fields, kind, strict=True)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(command), kind, fields, str(error)) from None
        return await method(asked)

    # ---- one method per command ----

    async def _status(self, _: Nothing) -> dict[str, object]:
        service = self._service
        engine = service.engine
        loading = engine.phase == "loading"
        status: dict[str, object] = {
            "state": engine.phase,
            "progress": engine.progress,
            "pid": os.getpid(),
            "version": batchengine.__version__,
            "address": service.config.server.address,
            "model": None if loading else engine.info.model_id,
            "context_tokens": None if loading else engine.info.context_tokens,
            "http_requests": len(service.live),
            "lanes": [dict(lane) for lane in engine.lanes()],
            "stats": dict(engine.stats()),
        }
        return {"status": status}

    async def _sessions(self, asked: Listing) -> dict[str, object]:
        rows = await operations.listing(self._service.engine, stored=asked.stored)
        return {"sessions": [dict(row) for row in rows]}

    async def _requests(self, _: Nothing) -> dict[str, object]:
        engine = self._service.engine
        rows: list[dict[str, Any]] = []
        for row in engine.requests():
            predicted = engine.predicted(str(row["request_id"])) or {}
            named = {f"predicted_{k}": predicted.get(k) for k in ("ttft_ms", "tpot_ms")}
            rows.append({**row, **named})
        return {"requests": rows}

    async def _cancel(self, asked: Request) -> dict[str, object]:
        if not self._service.cancel(asked.request_id):
            what, fix = "no such request is running", "see `batchengine ps`"
            raise errors.INVALID_FIELD(param="request_id", what=what, fix=fix)
        return {"cancelled": asked.request_id}

    async def _drain(self, asked: Drain) -> dict[str, object]:
        engine = self._service.engine
        check_serving(engine)
        if asked.action != "show":
            engine.leave(undo=asked.action == "undo")
        return {"drain": dict(engine.remains())}

    async def _start_stop(self, _: Nothing) -> dict[str, object]:
        self._stop()
        return {"stopping": True}

    async def _operate(self, operation: Operation, asked: Any) -> dict[str, object]:
        """One row of the table of operations, on the session or request that `asked` names."""
        engine = self._service.engine
        check_serving(engine)
        subject = await operations.find_subject(
            operation,
            engine,
            [key.name for key in self._service.config.auth],
            getattr(asked, operation.subject),
            asked.tenant,
        )
        arguments = {one.name: getattr(asked, one.name) for one in operation.arguments}
        found = await operations.perform(operation, engine, subject, arguments)
        return {operation.answer: dict(found)}

    async def _store(self, asked: StoreOp) -> dict[str, object]:
        check_serving(self._service.engine)
        return {"store": dict(await self._service.engine.store_op(asked.op))}

    async def _peers(self, asked: PeersStatus) -> dict[str, object]:
        check_serving(self._service.engine)
        return {"peers": dict(await self._service.engine.peers(measure=asked.bandwidth))}

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            connections = dict(self._connections)
            for task, writer in connections.items():
                task.cancel()
                writer.transport.abort()  # answers that are not read by now are lost
            await asyncio.gather(*connections, return_exceptions=True)
            self.unlink()

    def unlink(self) -> None:
        """Removes the socket this daemon made; another daemon's is never touched."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _wrong_field(
    command: str, kind: type[msgspec.Struct], fields: dict[str, Any], why: str
) -> BatchEngineError:
    """The error of an argument, in the words of the command line where it has any."""
    for name, (label, fix) in LABELS.items():
        value = fields.get(name)
        if name not in kind.__struct_fields__ or not isinstance(value, str):
            continue
        if not value:
            what = f"{command} was given an empty name instead of a {label}"
            return errors.INVALID_FIELD(param=name, what=what, fix=fix)
        if len(value) > TEXT_CHARS_MAX:
            what = f"{command} was given something too long to be a {label}"
            why = f"it has {len(value):,} characters, the longest may have {TEXT_CHARS_MAX:,}"
            return errors.INVALID_FIELD(param=name, what=what, why=why, fix=fix)
    return errors.INVALID_FIELD(
        param=command,
        what=f"the command {command} was given something else",
        why=printable(why.replace("`", "")),
        fix="fields: " + (", ".join(kind.__struct_fields__) or "none"),
    )


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock = cast("socket.socket", writer.get_extra_info("socket"))
    size = struct.calcsize("3i")
    creds = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return struct.unpack("3i", creds)[1]


def _socket_error(path: Path, why: str) -> BatchEngineError:
    return errors.ADMIN_SOCKET(path=path, why=why.lower())
