"""An engine in a process of its own, driven by JSON lines.

A token counts as sent once its line was read.

The child's side (`main`, in a fork of a zygote) runs one command per line; the parent's side
(`EngineProcess`) belongs to an asyncio program that may kill the engine at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any, Protocol

import uvloop

from batchengine.child import process
from batchengine.config import Config, LaneConfig, load
from batchengine.core import (
    BatchEngineError,
    Constraint,
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    QueuedEvent,
    Sampling,
    TokenEvent,
)
from batchengine.engine import Engine, Generation
from batchengine.engine.sessions import recovery as reopen_module
from batchengine.lanes import cpu, worker, worker_process
from bench.models import hashlm
from bench.processes.kill_switch import KillSwitch
from bench.processes.store_check import check_integrity
from bench.processes.zygote import Template, Zygote, serve

LINE_BYTES_MAX = 1 << 24
READY_S = 60.0
PRELOADED = (cpu, worker, hashlm)  # forks have them at once


def engine_zygote() -> Zygote:
    """A zygote whose forks are engine processes."""
    return Zygote("bench.processes.engine_child")


class Spawner(Protocol):
    """What starts and reaps an engine process; `spawn` returns its pid and both ends of pipes."""

    def spawn(self, settings: dict[str, Any]) -> tuple[int, int, int]: ...
    def reap(self, pid: int) -> int: ...


class EngineProcess:
    """The parent's side: commands, streams, workers, and the two ways to end it."""

    def __init__(self, zygote: Spawner, settings: dict[str, Any]) -> None:
        self.pid, self._commands, answers = zygote.spawn(settings)
        self._zygote = zygote
        self._ids = 0
        self._streams: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self._is_over = False
        self.status = 0
        self.workers: dict[int, int] = {}  # lane number -> pid of its newest worker
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reading = asyncio.ensure_future(self._read(answers))

    async def _read(self, answers: int) -> None:
        reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(answers, "rb", 0)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        while line := await reader.readline():
            if line.endswith(b"\n"):  # a line that is torn was not sent
                self._take(json.loads(line))
        transport.close()
        self.status = self._zygote.reap(self.pid)
        os.close(self._commands)
        self._is_over = True
        for stream in self._streams.values():
            stream.put_nowait({"gone": True})
        if not self.ready.done():
            self.ready.set_result(None)

    def _take(self, message: dict[str, Any]) -> None:
        name = message["id"]
        if name:
            self._streams[name].put_nowait(message)
        elif "worker" in message:
            self.workers[message["lane"]] = message["worker"]
        elif not self.ready.done():
            self.ready.set_result(None)

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended and everything it sent is read."""
        return self._is_over

    async def is_ready(self) -> bool:
        """Wait until the engine serves; False if it ended before."""
        await asyncio.wait_for(asyncio.shield(self.ready), READY_S)
        return not self._is_over

    def ask(self, op: str, **fields: Any) -> asyncio.Queue[dict[str, Any]]:
        """Send a command; returns the queue of its answers, of which the last is no token."""
        self._ids += 1
        name = f"{self._ids}"
        stream = self._streams[name] = asyncio.Queue[dict[str, Any]]()
        if self._is_over:
            stream.put_nowait({"gone": True})
            return stream
        data = json.dumps({"op": op, "id": name, **fields}).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._commands, data) :]
        return stream

    async def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer; {"gone": true} if the engine has ended."""
        return await self.ask(op, **fields).get()

    def kill_worker(self, lane_number: int) -> bool:
        """SIGKILL the newest worker of a lane; False if it is dead already."""
        pid = self.workers.get(lane_number, 0)
        return bool(pid) and kill_child(pid, self.pid)

    def kill(self) -> bool:
        """SIGKILL the engine, which ends its workers too; False if it has ended already."""
        if self._is_over:
            return False
        os.kill(self.pid, signal.SIGKILL)  # the zygote reaps it when `_read` asks
        return True

    async def over(self) -> None:
        """Wait until the engine has ended and everything it sent is read."""
        await self._reading

    async def stop(self) -> None:
        """Stop the engine cleanly and wait for its end."""
        self.ask("stop")
        await asyncio.wait_for(asyncio.shield(self._reading), READY_S)


def kill_child(pid: int, parent: int) -> bool:
    """SIGKILL `pid` if it runs and is a child of `parent`; safe against reused numbers."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX" or int(fields[1]) != parent:
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True


# ------------------------------------------------------------------------------- the child's side


class Child:
    """The child's side: runs commands, writes answers as lines."""

    def __init__(self, answers: int, switch: KillSwitch) -> None:
        self._answers = answers
        self.switch = switch
        self._tasks: set[asyncio.Task[None]] = set()
        self.engine: Engine | None = None

    def report(self, name: str, **fields: Any) -> None:
        """Write one line, unbuffered: it counts as sent once it was read."""
        self.switch.point()
        data = json.dumps({"id": name, **fields}).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]

    def start(self, command: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self._run(command))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, command: dict[str, Any]) -> None:
        name, session = command["id"], command.get("session", "")
        tenant = command.get("tenant", "")
        engine = self.engine
        if engine is None:
            raise RuntimeError("no engine")
        try:
            match command["op"]:
                case "submit":
                    await self._stream(name, engine.submit(_request(command)))
                case "resume":
                    generation = await engine.resume(tenant, session, command.get("from_token", 0))
                    await self._stream(name, generation)
                case "record":
                    self.report(name, **await _record(engine, session))
                case "owners":
                    self.report(name, double=_owned_twice(engine))
                case "points":
                    self.report(name, points=self.switch.points, fired=self.switch.fired)
                case "check":
                    store = engine.running.store
                    await asyncio.to_thread(check_integrity, store)
                    self.report(name, done=True)
                case "detail":
                    self.report(name, detail=await engine.session_detail(tenant, session))
                case "sessions":
                    self.report(name, sessions=engine.sessions())
                case "computed":
                    loops = engine.state.lanes
                    self.report(name, tokens=sum(loop.meter.tokens for loop in loops))
                case "peers":
                    self.report(name, status=await engine.peers())
                case "worker":
                    self.report(name, pid=engine.state.lanes[0].lane.pid)
                case "context":
                    loops = engine.state.lanes
                    most = max(loop.context_max for loop in loops)
                    self.report(name, tokens=min(engine.info.context_tokens, most))
                case "held":
                    self.report(name, held=_held(engine))
                case "stats":
                    self.report(name, **engine.stats())
                case "promote" | "park" | "drop" | "fork" as op:
                    self.report(name, done=await _verb(engine, op, command))
                case op:
                    self.report(name, error=f"no command {op}")
        except BatchEngineError as error:
            self.report(name, error=error.name, why=str(error))
        except Exception as error:
            self.report(name, error="exception", why=repr(error))

    async def _stream(self, name: str, generation: Generation) -> None:
        async for event in generation:
            match event:
                case TokenEvent():
                    self.report(name, token=event.token)
                case DoneEvent():
                    usage = dataclasses.asdict(event.usage)
                    self.report(name, done=event.finish_reason, usage=usage)
                case ErrorEvent():
                    self.report(name, error=event.error.name, why=str(event.error))
                case QueuedEvent():
                    continue  # the script waits for tokens


def _request(command: dict[str, Any]) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{os.getpid()}-{command['id']}",
        prompt=tuple(command["prompt"]),
        tokens_max=command["n"],
        sampling=Sampling(temperature=command.get("temperature", 0.0), seed=command.get("seed", 0)),
        ignore_eos=True,
        session_id=command.get("session"),
        park=command.get("park", False),
        tenant=command.get("tenant", ""),
        constraint=Constraint(**command["constraint"]) if "constraint" in command else None,
    )


async def _record(engine: Engine, session: str) -> dict[str, Any]:
    found = await asyncio.wrap_future(engine.running.store.ledger.load_session(f"\x1f{session}"))
    if found is None:
        return {"tokens": None, "turns": [], "epoch": 0}
    return {
        "tokens": found.tokens,
        "turns": [turn.status for turn in found.turns],
        "epoch": found.info.epoch,
    }


async def _verb(engine: Engine, op: str, command: dict[str, Any]) -> Any:
    session = command["session"]
    if op == "park":
        return await engine.park("", session, command.get("call"))
    if op == "fork":
        return await engine.fork("", session, command["to"])
    if op == "drop":
        return await engine.drop("", session)
    return await engine.promote("", session, command.get("to"))


def _owned_twice(engine: Engine) -> int:
    """Sessions whose pages two lanes hold at once."""
    owners: Counter[int] = Counter()
    for loop in engine.state.lanes:
        owners.update(key for key, session in loop.sessions.items() if session.kv.open)
    return sum(count > 1 for count in owners.values())


def _held(engine: Engine) -> dict[str, list[tuple[str, int]]]:
    """By session the peers that hold its pages, in order, then ("", pages here)."""
    return {
        session.session_id: [
            *((segment.peer, segment.n_pages) for segment in session.kv.held),
            ("", len(session.kv.codes) - session.kv.n_held),
        ]
        for session in engine.state.known()
    }


def _use_template(template: Template, settings: dict[str, Any]) -> list[int]:
    """Have lanes clone their workers; returns [number of the lane whose worker starts now]."""
    starting = [0]
    order = {config["name"]: number for number, config in enumerate(settings["lanes"])}
    spawn = worker_process.Lane._spawn

    async def sent(self: worker_process.Lane) -> None:
        starting[0] = order[self.name]  # Popen is called before the first await
        await spawn(self)

    worker_process.Lane._spawn = sent
    process.subprocess = types.SimpleNamespace(Popen=template.popen)
    return starting


def config_of(settings: dict[str, Any]) -> Config:
    config = load(
        None,
        {
            "model.path": settings["model"],
            "store.dir": f"{settings['folder']}/kv",
            "store.allow_volatile": True,
            "server.admin_socket": f"{settings['folder']}/admin.sock",
            **settings.get("overrides", {}),
        },
    )
    lanes = tuple(LaneConfig(**fields) for fields in settings.get("lanes", ())) or config.lanes
    return dataclasses.replace(config, cache_dir=settings["cache_dir"], lanes=lanes)


async def live(child: Child, engine: Engine, commands: int) -> int:
    """Run the engine until the command `stop` or the end of commands."""
    child.engine = engine
    await engine.start(lambda _: None)
    child.switch.watch(engine)
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    pipe = os.fdopen(commands, "rb", 0)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    child.report("", ready=True)
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "stop":
            break
        child.start(command)
    await engine.stop(command.get("drain_s", 0.0) if line else 0.0)
    return 0


def main(settings: dict[str, Any], commands: int, answers: int) -> int:
    """One run of an engine.

    `settings`: model, folder, cache_dir, compute, lanes; optionally overrides (of the
    configuration), quiet, no_quarantine, die_at and target (see KillSwitch).
    """
    switch = KillSwitch(settings.get("die_at", 0), settings.get("target", "engine"))
    if switch.number:
        switch.install()
    child = Child(answers, switch)
    starting = [0]

    def on_spawn(pid: int, incarnation: int) -> None:
        child.report("", worker=pid, lane=starting[0], incarnation=incarnation)

    starting = _use_template(Template(settings["compute"], on_spawn), settings)
    if settings.get("no_quarantine"):  # random kills make every session a suspect
        reopen_module.STRIKES_MAX = 1 << 30
    if settings.get("quiet", True):
        logging.disable(logging.CRITICAL)
    else:
        form = "%(process)d %(relativeCreated)d %(name)s %(message)s"
        logging.basicConfig(level=logging.INFO, format=form)
    engine = Engine(config_of(settings), worker_command=("worker",), on_point=switch.point)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live(child, engine, commands))


if __name__ == "__main__":
    serve(int(sys.argv[1]), main)
