"""What a simulated run replaces: clocks, the store's threads, disk calls, text; nothing else.

The store's own loops run unchanged; only the time at which each takes its next intent is set here.
A future that a caller blocks on runs them until it is settled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import queue
import random
import sqlite3
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kv_store.threads
from batchengine.engine import boot, parts
from kv_store import osio
from kv_store.store import Store
from tests.simulation.clock import VirtualLoop

GIB = 1 << 30


class _Drained(BaseException):
    """The simulated thread has taken the intents that it may take now."""


class Threads:
    """The threads of one run of the store. `kill` ends them between two intents."""

    def __init__(self, loop: VirtualLoop, delay: Callable[[str], float]) -> None:
        self.loop = loop
        self.delay = delay
        self.all: list[SimThread] = []
        self.dead = False

    def kill(self) -> None:
        self.dead = True
        for thread in self.all:
            thread.queue.items.clear()


class SimQueue:
    """A SimpleQueue whose reader is stepped by the loop."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.items: deque[Any] = deque()
        self.thread: SimThread | None = None
        self.allowed = 0

    def put(self, item: Any) -> None:
        if self.threads.dead:
            return
        self.items.append(item)
        if self.thread is not None:
            self.thread.soon()

    def get(self, block: bool = True) -> Any:
        if self.items and self.allowed:
            self.allowed -= 1
            return self.items.popleft()
        if block or self.items:
            raise _Drained
        raise queue.Empty

    def get_nowait(self) -> Any:
        if not self.items:
            raise queue.Empty
        return self.items.popleft()

    def qsize(self) -> int:
        return len(self.items)


class SimThread:
    """A thread that runs its target's loop for one intent at a time."""

    def __init__(self, threads: Threads, target: Any, name: str = "", daemon: bool = True) -> None:
        self._threads = threads
        self._target = target
        self.name = name
        self.queue: SimQueue = target.__self__._queue
        self.queue.thread = self
        self._due = False
        self._busy = False
        self._over = False
        threads.all.append(self)

    def start(self) -> None:
        self.soon()

    def is_alive(self) -> bool:
        return not self._over

    def soon(self) -> None:
        if not self._due and not self._threads.dead:
            self._due = True
            self._threads.loop.call_later(self._threads.delay(self.name), self._step)

    def _step(self) -> None:
        self._due = False
        self.run(1)
        if self.queue.items:
            self.soon()

    def run(self, intents: int) -> bool:
        """Execute up to so many intents; False if there was nothing to do."""
        if self._threads.dead or self._over or self._busy or not self.queue.items:
            return False
        self.queue.allowed, self._busy = intents, True
        try:
            self._target()
            self._over = True
        except _Drained:
            pass
        finally:
            self._busy, self.queue.allowed = False, 0
        return True

    def join(self, timeout: float | None = None) -> None:
        while not self._over and self.run(1):
            pass


class SimFuture(Future[Any]):
    """Blocking on it runs the threads it waits for."""

    threads: Threads

    def result(self, timeout: float | None = None) -> Any:
        self._complete()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._complete()
        return super().exception(0)

    def _complete(self) -> None:
        while not self.done():
            ran = [thread.run(1) for thread in list(self.threads.all)]
            if True not in ran:
                raise AssertionError("a thread waits for a future that no thread completes")


class SimFiles(osio.Files):
    """The store's disk: real files with injected faults. `free` is the reported free space."""

    def __init__(self, fault: Callable[[str], str]) -> None:
        self._fault = fault
        self.free = 64 * GIB

    def _fail(self, name: str) -> None:
        match self._fault(name):
            case "full":
                raise OSError(errno.ENOSPC, "simulated: no space left")
            case "io":
                raise OSError(errno.EIO, "simulated: input/output error")
            case _:
                pass

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._fail("pread")
        return super().pread(fd, into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._fail("pwrite")
        return super().pwrite(fd, data, offset)

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._fail("fallocate")
        super().fallocate(fd, offset, length)

    def free_bytes(self, path: str) -> tuple[int, int]:
        return self.free, 128 * GIB


class SimConnection(sqlite3.Connection):
    """A database that may have no room. Closing it does not checkpoint the log of a crash."""

    fault: Callable[[str], str]

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.fault("commit") == "full":
            error = sqlite3.OperationalError("database or disk is full (simulated)")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        return super().execute(sql, *args)


class SimDetokeniser:
    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


class SimText:
    """Text without a tokenizer: the tokens of HashLM are printed as numbers."""

    trouble = ""
    tokenizer = SimpleNamespace(
        eog=frozenset[int](),
        control=(),
        special_ids=dict[str, int](),
        vocab_size=2048,
        chat_template=None,
        tool_template=None,
        path=Path("no vocabulary"),
    )

    @classmethod
    async def open(cls, path: str, *, reader: str) -> SimText:
        return cls()

    def detokeniser(self, output: object = None) -> SimDetokeniser:
        return SimDetokeniser()

    def piece(self, token: int) -> bytes:
        return b"%d " % token

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def replaced(name: str, real: object, fake: object, *prefixes: str) -> Iterator[None]:
    """Modules below these prefixes that call `real` by this name use `fake`."""
    users = [
        module
        for path, module in sorted(sys.modules.items())
        if path.startswith(prefixes) and getattr(module, name, None) is real
    ]
    try:
        for module in users:
            setattr(module, name, fake)
        yield
    finally:
        for module in users:
            setattr(module, name, real)


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """Every clock of the product shows the loop's time."""

    def sleep(_: float) -> None:
        raise AssertionError("the engine's thread sleeps")

    clock = SimpleNamespace(
        monotonic=loop.time,
        time=loop.time,
        perf_counter=loop.time,
        perf_counter_ns=lambda: int(loop.time() * 1e9),
        sleep=sleep,
    )
    with replaced("time", time, clock, "batchengine.", "kv_store."):
        yield


class StoreSeam:
    """`Store` as the starter sees it: opened over this run's threads and faults."""

    def __init__(self, threads: Threads, files: SimFiles, fault: Callable[[str], str]) -> None:
        self._threads = threads
        self._files = files
        self._fault = fault
        self.opened: Store | None = None
        self.model = 0  # other numbers: its pages are said to be of another model

    def open(self, path: str, descriptor: Any, settings: Any) -> Store:
        def connect(name: str) -> sqlite3.Connection:
            db = sqlite3.connect(
                name, isolation_level=None, check_same_thread=False, factory=SimConnection
            )
            db.fault = self._fault
            return db

        if self.model:
            other = f"{self.model:02x}" + descriptor.model_hash[2:]
            descriptor = dataclasses.replace(descriptor, model_hash=other)
        with _threads_of(self._threads):
            self.opened = Store.open(path, descriptor, settings, files=self._files, connect=connect)
        return self.opened


@contextlib.contextmanager
def _threads_of(threads: Threads) -> Iterator[None]:
    """Threads and queues made inside belong to a simulated run."""
    import kv_store.ledger.ledger

    def thread(target: Any, name: str = "", daemon: bool = True) -> SimThread:
        return SimThread(threads, target, name, daemon)

    fake_threading = SimpleNamespace(Thread=thread, Lock=threading.Lock, RLock=threading.RLock)
    fake_queue = SimpleNamespace(SimpleQueue=lambda: SimQueue(threads), Empty=queue.Empty)
    modules = [kv_store.ledger.ledger, kv_store.threads]
    try:
        for module in modules:
            module.threading, module.queue = fake_threading, fake_queue  # type: ignore[attr-defined]
        yield
    finally:
        for module in modules:
            module.threading, module.queue = threading, queue  # type: ignore[attr-defined]


class FutureSeam:
    """Makes the futures of the store in the current run."""

    threads: Threads

    def new_future(self) -> Future[Any]:
        future = SimFuture()
        future.threads = self.threads
        future.set_running_or_notify_cancel()
        return future


@contextlib.contextmanager
def store_futures() -> Iterator[FutureSeam]:
    """Futures of the store belong to the threads of their run."""
    real, made = kv_store.threads.new_future, FutureSeam()
    with replaced("new_future", real, made.new_future, "kv_store."):
        yield made


@contextlib.contextmanager
def starter_uses(store: StoreSeam, lane: Callable[..., Any]) -> Iterator[None]:
    """The engine builds its next parts from these."""
    names = {"Store": store, "Lane": lane, "TextFrontend": SimText}
    modules = (boot, parts)
    before = [
        (of, name, getattr(of, name)) for of in modules for name in names if hasattr(of, name)
    ]
    try:
        for of, name, _ in before:
            setattr(of, name, names[name])
        yield
    finally:
        for of, name, value in before:
            setattr(of, name, value)


class Tape:
    """Random numbers of one seed, an independent stream per purpose, and per host if named."""

    def __init__(self, seed: int, host: str = "") -> None:
        self._seed = f"{seed}/{host}" if host else f"{seed}"
        self._streams: dict[str, random.Random] = {}

    def __call__(self, name: str) -> random.Random:
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = random.Random(f"{self._seed}/{name}")
        return stream
