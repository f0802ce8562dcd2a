"""An engine in a separate process, which a test may kill, and what it had sent until then.

The child reads one JSON command per line and writes one JSON line per event, unbuffered: what the
parent has read was acknowledged. `python -m tests.support.engine_process` with JSON settings as
argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from batchengine.config import load
from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    Sampling,
    TokenEvent,
)
from batchengine.engine import Engine, Generation
from batchengine.lanes.worker_process import WORKER
from tests.support.engines import Site


class EngineProcess:
    """The parent's side. Use `engine_process` below."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = 0
        self._lines: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._reader = asyncio.ensure_future(self._read())
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        while line := await stdout.readline():
            message = json.loads(line)
            if message["id"] == "":
                self.ready.set_result(message)
            else:
                self._lines[message["id"]].put_nowait(message)
        for queue in self._lines.values():
            queue.put_nowait({"gone": True})
        if not self.ready.done():
            self.ready.set_exception(RuntimeError("the engine died before it was ready"))

    def ask(self, op: str, **fields: Any) -> str:
        """Send a command; its answers come under the id returned."""
        self._ids += 1
        name = f"{op}-{os.getpid()}-{id(self)}-{self._ids}"
        self._lines[name] = asyncio.Queue()
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"op": op, "id": name, **fields}).encode() + b"\n")
        return name

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """One command, one answer."""
        return await self._lines[self.ask(op, **fields)].get()

    async def tokens(self, name: str, at_most: int = 1 << 30) -> tuple[list[int], dict[str, Any]]:
        """Tokens sent until the end, the engine's death, or `at_most`; and the last message."""
        seen: list[int] = []
        message: dict[str, Any] = {}
        while len(seen) < at_most:
            message = await self._lines[name].get()
            if "token" not in message:
                break
            seen.append(message["token"])
        return seen, message

    async def kill(self) -> None:
        """SIGKILL, and read everything that was sent before."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        await self._reader

    async def stop(self) -> None:
        """Stop the engine in order."""
        if self._process.returncode is None:
            self.ask("stop")
            await asyncio.wait_for(self._process.wait(), 60)
        await self._reader


@contextlib.asynccontextmanager
async def engine_process(
    site: Site, command: Sequence[str] = (), **overrides: object
) -> AsyncIterator[EngineProcess]:
    """A started engine process; killed at the end unless it has ended before."""
    settings = {
        "model": str(site.model),
        "folder": str(site.folder),
        "cache_dir": str(site.cache_dir),
        "command": list(command),
        "overrides": {name.replace("__", "."): value for name, value in overrides.items()},
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.engine_process", json.dumps(settings),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
    )  # fmt: skip
    made = EngineProcess(process)
    try:
        await asyncio.wait_for(asyncio.shield(made.ready), 60)
        yield made
    finally:
        await made.kill()


class Child:
    """The engine's side."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks: set[asyncio.Task[None]] = set()

    def send(self, name: str, **fields: Any) -> None:
        os.write(1, json.dumps({"id": name, **fields}).encode() + b"\n")

    def start(self, command: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self.run(command))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def run(self, command: dict[str, Any]) -> None:
        name, op = command["id"], command["op"]
        try:
            match op:
                case "submit":
                    await self.stream(name, self.engine.submit(self.request(command)))
                case "resume":
                    session, at = command["session"], command.get("from_token", 0)
                    await self.stream(name, await self.engine.resume("", session, at))
                case "record":
                    ledger = self.engine.running.store.ledger
                    found = await asyncio.wrap_future(
                        ledger.load_session("\x1f" + command["session"])
                    )
                    self.send(
                        name,
                        tokens=None if found is None else found.tokens,
                        turns=[] if found is None else [t.status for t in found.turns],
                    )
                case "sessions":
                    self.send(name, sessions=self.engine.sessions())
                case "computed":
                    loops = self.engine.state.lanes
                    self.send(name, tokens=sum(loop.meter.tokens for loop in loops))
                case _:
                    self.send(name, error=f"no command {op}")
        except BatchEngineError as error:
            self.send(name, error=error.name)

    def request(self, command: dict[str, Any]) -> GenerationRequest:
        return GenerationRequest(
            request_id=command["id"],
            prompt=tuple(command["prompt"]),
            tokens_max=command["n"],
            sampling=Sampling(
                temperature=command.get("temperature", 0.0), seed=command.get("seed", 0)
            ),
            ignore_eos=True,
            session_id=command.get("session"),
        )

    async def stream(self, name: str, generation: Generation) -> None:
        async for event in generation:
            match event:
                case TokenEvent():
                    self.send(name, token=event.token)
                case DoneEvent():
                    usage = dataclasses.asdict(event.usage)
                    self.send(name, done=event.finish_reason, usage=usage)
                case ErrorEvent():
                    self.send(name, error=event.error.name)
                case _:
                    pass


async def child(settings: dict[str, Any]) -> int:
    config = load(
        None,
        {
            "model.path": settings["model"],
            "store.dir": f"{settings['folder']}/kv",
            "store.allow_volatile": True,
            "store.budget_bytes": 192 << 20,
            "server.admin_socket": "/tmp/unused.sock",
            **settings["overrides"],
        },
    )
    config = dataclasses.replace(config, cache_dir=settings["cache_dir"])
    engine = Engine(config, worker_command=tuple(settings["command"]) or WORKER)
    await engine.start(lambda _: None)
    made = Child(engine)
    reader = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    made.send("", ready=True)
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "stop":
            break
        made.start(command)
    await engine.stop(0.0)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(child(json.loads(sys.argv[1]))))
