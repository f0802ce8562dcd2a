"""The admin socket: one JSON line in, one JSON line out, for the user who runs the daemon.

Owns the table of commands, each with the fields it takes. Refuses other users twice: by the mode
of the socket (0600) and by the peer's uid. Nothing here is reachable over HTTP (R4).
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
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

import batchengine
from batchengine.core import BatchEngineError
from service import errors, verbs, work
from service.client import ADMIN_LINE_BYTES_MAX
from service.state import Service
from service.strict_json import printable

log = logging.getLogger("batchengine.service")

TEXT_CHARS_MAX = 4096

LABELS = {  # of a field -> what people call it, and where to find one
    "session": ("session", "see `batchengine sessions` for their ids"),
    "id": ("request or session", "see `batchengine ps` and `batchengine sessions` for ids"),
    "request_id": ("request", "see `batchengine ps` for their ids"),
    "to": ("lane", "leave --to out for the best one, or name one that `batchengine ps` shows"),
    "new_id": ("id for the copy", "leave --as out, and one is made"),
    "tool_call_id": ("tool call", "leave --tool-call out, or give the id of the call"),
    "tenant": ("key name", "leave --key-name out, or name an API key of the configuration"),
}
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=TEXT_CHARS_MAX)]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """Of status, requests and drain."""


class Listing(msgspec.Struct, forbid_unknown_fields=True):
    """Of sessions: `stored` also lists those that are on disk only."""

    stored: bool = False


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """Of cancel."""

    request_id: Text


class OneSession(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Of session, why and drop. `tenant` = the name of an API key; None = whoever it is."""

    session: Text
    tenant: str | None = None


class Move(OneSession, forbid_unknown_fields=True, kw_only=True):
    """Of promote and demote."""

    to: Text | None = None


class Fork(OneSession, forbid_unknown_fields=True, kw_only=True):
    """Of fork: `new_id` is a client's own id, under the same key."""

    new_id: Text | None = None


class Park(OneSession, forbid_unknown_fields=True, kw_only=True):
    """Of park."""

    tool_call_id: Text | None = None


class Explain(msgspec.Struct, forbid_unknown_fields=True):
    """Of explain: a request or a session."""

    id: Text
    tenant: str | None = None


class StoreOp(msgspec.Struct, forbid_unknown_fields=True):
    """Of store."""

    op: Literal["stat", "verify", "gc"] = "stat"


Method = Callable[[Any], Awaitable[dict[str, object]]]


class Control:
    """The admin socket of one daemon."""

    def __init__(self, path: Path, service: Service, drain: Callable[[], None]) -> None:
        self._path = path
        self._service = service
        self._drain = drain
        self._server: asyncio.Server | None = None
        self._guests: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._commands: dict[str, tuple[type[msgspec.Struct], Method]] = {
            "status": (Nothing, self._tell_status),
            "sessions": (Listing, self._tell_sessions),
            "requests": (Nothing, self._tell_requests),
            "cancel": (Request, self._cancel),
            "drain": (Nothing, self._start_drain),
            "promote": (Move, self._promote),
            "demote": (Move, self._demote),
            "explain": (Explain, self._explain),
            "session": (OneSession, self._tell_session),
            "why": (OneSession, self._why),
            "fork": (Fork, self._fork),
            "park": (Park, self._park),
            "drop": (OneSession, self._drop_session),
            "store": (StoreOp, self._store),
        }

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
        self._server = await asyncio.start_unix_server(
            self._welcome, sock=sock, limit=ADMIN_LINE_BYTES_MAX
        )

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

    def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Known from its first moment on: `close` finds those that have not begun to run, too."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._guests[task] = writer
        task.add_done_callback(self._farewell)

    def _farewell(self, task: asyncio.Task[None]) -> None:
        self._guests.pop(task).close()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an admin connection failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _peer_uid(writer) not in (0, os.getuid()):
                return
            while line := await reader.readline():
                writer.write(msgspec.json.encode(await self._answer(line)) + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):  # ValueError: a line beyond the limit
            pass

    async def _answer(self, line: bytes) -> dict[str, object]:
        try:
            return {"ok": True, **await self._run(line)}
        except BatchEngineError as error:
            return {"ok": False, **errors.error_object(error)}
        except Exception:
            log.exception("an admin command failed")
            return {"ok": False, **errors.error_object(errors.internal("admin"))}

    async def _run(self, line: bytes) -> dict[str, object]:
        """One line: its command names a method and the fields it takes."""
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise errors.invalid_json('expected {"command": "status"}') from None
        command = fields.pop("command", None)
        known = self._commands.get(command) if isinstance(command, str) else None
        if known is None:
            raise errors.invalid_field(
                "command", "unknown command", fix="use " + ", ".join(self._commands)
            )
        kind, method = known
        try:
            asked = msgspec.convert(fields, kind, strict=True)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(command), kind, fields, str(error)) from None
        try:
            return await method(asked)
        except BatchEngineError as error:
            if error.code != "BE2403":  # for clients; it was dropped since it was looked up
                raise
            given = str(fields.get("session") or fields.get("id", ""))
            raise errors.unknown_session(printable(given), operator=True) from None

    # ---- one method per command ----

    async def _tell_status(self, _: Nothing) -> dict[str, object]:
        return {"status": self._status()}

    async def _tell_sessions(self, asked: Listing) -> dict[str, object]:
        engine = self._service.engine
        rows = [dict(row) for row in engine.sessions()]
        if asked.stored:
            seen = {(row.get("tenant", ""), row["session_id"]) for row in rows}
            for row in await engine.stored_sessions(verbs.STORED_MAX):
                if (row.get("tenant", ""), row["session_id"]) not in seen:
                    rows.append(dict(row))
        return {"sessions": rows}

    async def _tell_requests(self, _: Nothing) -> dict[str, object]:
        engine = self._service.engine
        rows: list[dict[str, Any]] = []
        for row in engine.requests():
            predicted = engine.predicted(str(row["request_id"])) or {}
            named = {f"predicted_{k}": predicted.get(k) for k in ("ttft_ms", "tpot_ms")}
            rows.append({**row, **named})
        return {"requests": rows}

    async def _cancel(self, asked: Request) -> dict[str, object]:
        if not self._service.cancel(asked.request_id):
            raise errors.invalid_field(
                "request_id", "no such request is running", fix="see `batchengine ps`"
            )
        return {"cancelled": asked.request_id}

    async def _start_drain(self, _: Nothing) -> dict[str, object]:
        self._drain()
        return {"draining": True}

    async def _find(self, asked: OneSession) -> tuple[str, str]:
        work.check_serving(self._service.engine)
        return await verbs.find(self._service, asked.session, asked.tenant)

    async def _promote(self, asked: Move) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"move": await verbs.move(self._service, "promote", tenant, session_id, asked.to)}

    async def _demote(self, asked: Move) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"move": await verbs.move(self._service, "demote", tenant, session_id, asked.to)}

    async def _tell_session(self, asked: OneSession) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"session": dict(await self._service.engine.session_detail(tenant, session_id))}

    async def _why(self, asked: OneSession) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"why": dict(await self._service.engine.why(tenant, session_id))}

    async def _drop_session(self, asked: OneSession) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"dropped": dict(await self._service.engine.drop(tenant, session_id))}

    async def _fork(self, asked: Fork) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        return {"fork": await verbs.fork(self._service, tenant, session_id, asked.new_id)}

    async def _park(self, asked: Park) -> dict[str, object]:
        tenant, session_id = await self._find(asked)
        parked = await verbs.park(self._service, tenant, session_id, asked.tool_call_id)
        return {"parked": dict(parked)}

    async def _explain(self, asked: Explain) -> dict[str, object]:
        """A request by its id or the beginning of it, else the session that `id` means."""
        engine = self._service.engine
        work.check_serving(engine)
        given = asked.id
        if given.removeprefix("be_").startswith("req_"):
            return {"explain": dict(engine.explain(given, asked.tenant))}
        tenant, given = await verbs.find(self._service, given, asked.tenant)
        try:
            return {"explain": dict(engine.explain(given, tenant))}
        except BatchEngineError as error:
            if error.http_status != verbs.NOT_FOUND:
                raise
        # it is there, but this daemon has decided nothing about it yet
        detail = await engine.session_detail(tenant, given)
        known = {name: detail.get(name) for name in ("session_id", "tenant", "state", "tokens")}
        return {"explain": {"kind": "session", **known, "decisions": []}}

    async def _store(self, asked: StoreOp) -> dict[str, object]:
        work.check_serving(self._service.engine)
        return {"store": dict(await self._service.engine.store_op(asked.op))}

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
            guests = dict(self._guests)
            for task, writer in guests.items():
                task.cancel()
                writer.transport.abort()  # what is not read by now never will be
            await asyncio.gather(*guests, return_exceptions=True)
            self.unlink()

    def unlink(self) -> None:
        """Removes the socket this daemon made; another daemon's is never touched."""
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _wrong_field(
    command: str, kind: type[msgspec.Struct], fields: dict[str, Any], why: str
) -> BatchEngineError:
    """What is wrong with an argument, in the words of the command line where it has any."""
    for name, (label, fix) in LABELS.items():
        value = fields.get(name)
        if name not in kind.__struct_fields__ or not isinstance(value, str):
            continue
        if not value:
            what = f"{command} was given an empty name instead of a {label}"
            return errors.invalid_field(name, what, fix=fix)
        if len(value) > TEXT_CHARS_MAX:
            what = f"{command} was given something too long to be a {label}"
            why = f"it has {len(value):,} characters, the longest may have {TEXT_CHARS_MAX:,}"
            return errors.invalid_field(name, what, why=why, fix=fix)
    return errors.invalid_field(
        command,
        f"the command {command} was given something else",
        why=printable(why.replace("`", "")),
        fix="fields: " + (", ".join(kind.__struct_fields__) or "none"),
    )


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
