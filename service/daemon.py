"""The daemon process: start-up, banner, signals and drain.

Owns start-up order (socket first, so that a port in use costs nothing; then HTTP, which answers
503 while the engine loads; then the engine; on a socket of the service manager HTTP comes last),
signals, notifications and the drain. A banner line states only what is known when it is printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

import batchengine
from batchengine import config as configuration
from batchengine.child import guard
from batchengine.config import Config, LaneConfig
from batchengine.core import Stage
from batchengine.gguf import model_paths
from service import notify
from service.admin.socket import AdminSocket
from service.engine_api import EngineApi
from service.http import app
from service.http.listener import Listener, bind, take
from service.log import start_logging
from service.notify import Notifier
from service.protocols.reading import READER

log = logging.getLogger("batchengine.service")

EXIT_OK = 0
EXIT_FORCED = 130  # second signal
# The signal of a parent's exit can arrive once per thread, a terminal's once per process.
SIGNAL_TWINS_S = 0.3
EXIT_ENGINE_LOST = 75  # the engine stopped by itself: start again (EX_TEMPFAIL)
CONNECTIONS_SPARE = 64  # health checks and metrics still get in when every stream is taken
OPEN_FILES = 65_536
FILES_KEPT = 192  # extents, ledger, worker sockets, logs
SWITCH_INTERVAL_S = 0.0001  # a thread waits so long for the interpreter, e.g. at each SQL statement
MIB = 1 << 20
GIB = 1 << 30
PROGRESS_S = 5.0  # between two lines about a load that takes longer


def run(config: Config, make_engine: Callable[[Config], EngineApi] | None = None) -> int:
    """Serves until a signal; returns the exit code. Raises BatchEngineError before it serves."""
    if not config.debug:  # then py-spy and gdb may be attached by the daemon's own user
        guard.keep_private()
    start_logging(config)
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    passed = take(notify.passed_sockets(os.environ), config.server.host, config.server.port)
    sock = passed or bind(config.server.host, config.server.port)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop, debug=config.debug) as runner:
            return runner.run(
                Daemon(config, make_engine or _real_engine, is_passed=sock is passed).serve(sock)
            )
    finally:
        sock.close()


def _real_engine(config: Config) -> EngineApi:
    from batchengine.engine import Engine  # loads the tokenizer: not for `version`

    return Engine(config, reader=READER)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _connections_max(config: Config) -> int:
    """Streams and CONNECTIONS_SPARE, bounded so that FILES_KEPT descriptors stay for the engine."""
    wanted = config.limits.streams_max + CONNECTIONS_SPARE
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if files < 0 else max(1, min(wanted, files - FILES_KEPT))


def say(line: str) -> None:
    """Prints one banner line; the daemon goes on when its terminal is closed."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


class Daemon:
    """The serving process: its start, its wait for a signal, its drain."""

    def __init__(
        self, config: Config, make_engine: Callable[[Config], EngineApi], *, is_passed: bool = False
    ) -> None:
        """`is_passed`: the service manager keeps the socket, so that clients that connect while
        this daemon starts or drains wait until it, or the next one, accepts."""
        self._config = config
        self._is_passed = is_passed
        self._make_engine = make_engine
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self._stop_reason = ""
        self._signal = ""  # the first one
        self._signal_at = 0.0  # loop time
        self._is_json = config.server.log_format == "json"

    def _say(self, line: str) -> None:
        """One line of the banner; with a log in JSON a record of it, so that a reader of both
        outputs gets nothing else."""
        if self._is_json:
            log.info("%s", " ".join(line.split()))
        else:
            say(line)

    def _warn(self, text: str) -> None:
        """A warning, as `_say` does."""
        if self._is_json:
            log.warning("%s", text)
        else:
            say(f"  warning {text}")

    async def serve(self, sock: socket.socket) -> int:
        """Runs the daemon on the running loop, from start to exit code."""
        listens = dataclasses.replace(self._config.server, port=sock.getsockname()[1])  # 0 = any
        config = self._config = dataclasses.replace(self._config, server=listens)
        engine = self._make_engine(config)
        service = app.Service.create(engine, config)
        listener = Listener(app.build(service), sock, _connections_max(config))
        path = Path(config.server.admin_socket)
        admin = AdminSocket(path, service, lambda: self._drain("stop command"))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, number.name, admin)
        watchdog: asyncio.Task[None] | None = None
        try:
            if not self._is_passed:
                await listener.open()
            await admin.open()
            for line in banner(config):
                self._say(line)
            for text in start_warnings(config):
                self._warn(text)
            watchdog = asyncio.create_task(self._notifier.feed_watchdog(lambda: progresses(engine)))
            if not await self._start_engine(engine):
                return EXIT_OK
            gc.collect()
            gc.freeze()  # later collections leave out what the start made: they held the loop 40 ms
            if self._is_passed:
                await listener.open()
            self._announce(engine)
            return await self._wait(engine, service, listener)
        finally:
            if watchdog is not None:
                watchdog.cancel()
            await listener.close()
            await admin.close()
            self._notifier.close()

    async def _start_engine(self, engine: EngineApi) -> bool:
        """True when ready; False when a signal came first."""
        start = asyncio.create_task(engine.start(self._on_stage))
        stop = asyncio.create_task(self._stop.wait())
        extending = asyncio.create_task(self._notifier.extend_start(lambda: engine.progress))
        try:
            said = 0.0
            while not (start.done() or self._stop.is_set()):
                await asyncio.wait(
                    {start, stop}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not start.done() and engine.progress > said:
                    said = engine.progress
                    self._say(f"  ...     weights are loaded and packed, {said:.0%} done")
            if start.done():
                start.result()
                return True
            self._say(f"  stopped while loading ({self._stop_reason})")
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await engine.stop(0.0)
            return False
        except BaseException:
            with contextlib.suppress(Exception):
                await engine.stop(0.0)
            raise
        finally:
            stop.cancel()
            extending.cancel()

    def _on_stage(self, stage: Stage) -> None:
        line = stage_line(stage)
        self._say(line)
        self._notifier.stage(line.strip())

    def _announce(self, engine: EngineApi) -> None:
        base = f"http://{self._config.server.address}/v1"
        info = engine.info
        self._say(
            f"  model   {info.model_id}  {info.arch} {info.quantisation}"
            f"  {info.n_params / 1e6:,.1f} M parameters  {info.n_layer} layers"
            f"  ctx {info.context_tokens:,}"
        )
        if most := self._config.answer_tokens_max:
            self._say(f"  answers {most:,} tokens at most where a request names no limit")
        if self._config.peers.listen:
            self._say(f"  peers   {self._config.peers.listen}   see `batchengine peers status`")
        self._say(f"  ready   {base}   openai chat, completions, responses; anthropic messages")
        self._say(f"  watch   {base.removesuffix('/v1')}/   dashboard")
        self._say(f"  next    batchengine chat --url {base}")
        for note in info.notes:
            self._warn(note)
            if not self._is_json:
                log.warning("%s", note)
        if (phase := engine.phase) in ("degraded", "refusing"):
            self._warn(f"{phase}: see /health")
        self._notifier.ready(f"serving {info.model_id} on {base}")

    async def _wait(self, engine: EngineApi, service: app.Service, listener: Listener) -> int:
        """Waits for a signal, `stop` or the end of the engine, then drains; returns exit code."""
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._stop.wait()
            if engine.fatal is not None or engine.phase == "stopped":
                log.critical("the engine cannot go on (%r): start again", engine.fatal)
                service.accepting = False
                await engine.stop(0.0)  # running requests end with an error event
                return EXIT_ENGINE_LOST
        service.accepting = False
        if self._is_passed:
            listener.stop_accepting()
        drain_s = self._config.server.drain_s
        self._say(f"  drain   {self._stop_reason}: {len(service.live)} requests to finish")
        self._notifier.stopping(f"draining {len(service.live)} requests", drain_s + 30)
        await engine.stop(drain_s)
        for _ in range(50):  # the last events are on their way to the sockets
            if not service.live:
                break
            await asyncio.sleep(0.1)
        self._say("  stopped")
        return EXIT_OK

    def _drain(self, reason: str) -> None:
        if not self._stop.is_set():
            self._stop_reason = reason
            self._stop.set()

    def _on_signal(self, name: str, admin: AdminSocket) -> None:
        """The first signal drains. The second exits at once: all tokens sent are durable already.

        After the `stop` command the first one changes nothing: service managers send it anyway.
        """
        now = asyncio.get_running_loop().time()
        if not self._signal:
            self._signal, self._signal_at = name, now
            self._drain(name)
            return
        if name == self._signal and now - self._signal_at < SIGNAL_TWINS_S:
            return
        self._say(f"  forced  {name} again: leaving at once")
        admin.unlink()
        os._exit(EXIT_FORCED)


def progresses(engine: EngineApi) -> bool:
    """False once engine or lane cannot go on by themselves: systemd then starts a new daemon."""
    return engine.fatal is None and all(lane["state"] != "stuck" for lane in engine.lanes())


def banner(config: Config) -> list[str]:
    """The banner lines, of facts that are known before anything is loaded."""
    path = Path(config.model.path)
    files = model_paths(path)
    is_there = all(file.is_file() for file in files)
    n_bytes = sum(file.stat().st_size for file in files) if is_there else 0
    size = f"{n_bytes / MIB:,.2f} MiB" if is_there else "missing"
    more = f"  {len(files)} files" if len(files) > 1 else ""
    lines = [
        f"batchengine {batchengine.__version__}",
        f"  file    {path.name}  {size}{more}",
        f"  cpu     {os.cpu_count()} logical cores",
        *(lane_line(lane) for lane in config.lanes),
    ]
    disk = configuration.disk_bytes(config.store.dir)
    free = "" if disk is None else f"  ({disk[0] / GIB:,.0f} GiB free)"
    return [
        *lines,
        f"  kv      {config.store.dir}  budget {config.store.budget_bytes / GIB:,.1f} GiB{free}",
        f"  admin   {config.server.admin_socket}",
    ]


def start_warnings(config: Config) -> list[str]:
    """What may surprise an operator of this configuration on this machine."""
    found = configuration.warnings(config) + configuration.disk_warnings(config)
    found += configuration.limit_warnings(config)
    if (room := _connections_max(config)) < config.limits.streams_max:
        found.append(
            f"{room:,} connections at most, for want of open files (ulimit -n, LimitNOFILE):"
            f" limits.streams_max is {config.limits.streams_max:,}"
        )
    return found


def lane_line(lane: LaneConfig) -> str:
    """A lane's line: `  lane    fast  cpu, tier fast, 4 threads on cores 0,1,2,3`"""
    cores = ",".join(map(str, lane.cores))
    tier = "" if lane.tier in ("", "any") else f", tier {lane.tier}"
    threads = "1 thread" if lane.threads == 1 else f"{lane.threads} threads"
    return f"  lane    {lane.name}  {lane.kind}{tier}, {threads} on cores {cores}"


def stage_line(stage: Stage) -> str:
    """A stage's line: `  [2/5] cpu kernels        self-test ok   0.4 s`"""
    return (
        f"  [{stage.index}/{stage.count}] {stage.name:<16} {stage.detail}   {stage.seconds:.1f} s"
    )
