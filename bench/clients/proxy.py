"""A proxy between a client and the daemon that decides what the model says, and notes what happens.

The bundled model cannot follow an agent's prompt, so the proxy adds one field to each request: the
only text that the answer may have, which the daemon's own decoder then makes the model write. A
client's request is otherwise sent on as it came, and the answer is passed through unchanged.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

GENERATION = ("/chat/completions", "/completions", "/responses", "/messages")
HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
BODY_BYTES_MAX = 64 << 20


@dataclass
class Exchange:
    """One generation request and what its answer said about the prompt."""

    path: str
    body: dict[str, Any]
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    session_id: str = ""
    error: str = ""


@dataclass
class Script:
    """What the model says: a call while `marker` has not been in a request, then `text`."""

    prompt_word: str
    marker: str
    call: str
    text: str

    def answer(self, body: dict[str, Any]) -> str:
        said = json.dumps(body, ensure_ascii=False)
        is_to_call = bool(body.get("tools")) and self.prompt_word in said
        return self.call if is_to_call and self.marker not in said else self.text


@dataclass
class Proxy:
    """Serves on a free port of loopback until it is closed."""

    target: str  # origin of the daemon
    script: Script
    folder: Path | None = None  # gets a file of each request
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    url: str = ""

    async def __aenter__(self) -> Proxy:
        self._session = ClientSession(timeout=ClientTimeout(total=None), auto_decompress=False)
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{rest:.*}", self._pass)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        data, noted = await request.read(), None
        if request.method == "POST" and request.path.endswith(GENERATION):
            body = json.loads(data)
            noted = Exchange(request.path, body)
            self.exchanges.append(noted)
            self._record(request, body)
            said = {"structured_outputs": {"choice": [self.script.answer(body)]}}
            data = json.dumps(body | said).encode()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        sent = self._session.request(
            request.method, self.target + request.path_qs, data=data, headers=headers
        )
        async with sent as reply:
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in HOP}
            answer = web.StreamResponse(status=reply.status, headers=kept)
            received = bytearray()
            if noted is not None:
                noted.status = reply.status
                noted.session_id = reply.headers.get("x-batchengine-session-id", "")
            with contextlib.suppress(ConnectionResetError):  # a client that has read enough
                await answer.prepare(request)
                async for part in reply.content.iter_any():
                    received += part
                    await answer.write(part)
                if noted is not None:
                    note(noted, received)
                await answer.write_eof()
            return answer

    def _record(self, request: web.Request, body: dict[str, Any]) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = {"path": request.path_qs, "headers": dict(request.headers), "body": body}
        path = self.folder / f"{len(self.exchanges):03}.json"
        path.write_text(json.dumps(whole, indent=1, ensure_ascii=False))


def note(exchange: Exchange, data: bytes | bytearray) -> None:
    """Fills in what the whole answer `data` says."""
    if exchange.status != 200:
        exchange.error = bytes(data[:1000]).decode("utf-8", "replace")
        return
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")]
    for item in lines or [bytes(data)]:
        value = json.loads(item)
        for usage in _usages(value):
            _add_usage(exchange, usage)
        if value.get("error"):
            exchange.error = str(value["error"])[:1000]


def _usages(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Every usage object of an answer or an event, in any protocol's place."""
    holders = (value, value.get("response"), value.get("message"))
    found = [holder.get("usage") for holder in holders if isinstance(holder, dict)]
    return [usage for usage in found if isinstance(usage, dict)]


def _add_usage(exchange: Exchange, usage: dict[str, Any]) -> None:
    if "cache_read_input_tokens" in usage:  # input_tokens excludes them
        cached = usage["cache_read_input_tokens"] or 0
        written = usage.get("cache_creation_input_tokens") or 0
        prompt = (usage.get("input_tokens") or 0) + cached + written
    else:
        prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
    if prompt:
        exchange.prompt_tokens, exchange.cached_tokens = prompt, cached
