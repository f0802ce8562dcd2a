"""Counts the points at which an engine process can be killed, and kills it at a chosen one.

A point is: a file call of the store (writes are split, so that one may be torn), an SQL statement,
a frame to a worker, a phase of a hand-over, a line sent to the client. At the n-th one the engine
is killed, or its workers are and it goes on. Which call has which number may differ between two
runs, as threads race; a whole sweep kills before and after every call.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sqlite3
from collections.abc import Callable
from typing import Any

from batchengine.engine import Engine
from batchengine.engine import boot as start_module
from batchengine.lanes import worker_process
from kv_store import osio
from kv_store.ledger.ledger import lenient_text
from kv_store.store import Store


class KillSwitch:
    """`point()` is called at every point, from any thread; the `number`-th one kills `target`."""

    def __init__(self, number: int, target: str) -> None:
        """`target`: engine or worker. `number` 0 = never."""
        self.number, self.target = number, target
        self.points = 0
        self.fired = False
        self._next = itertools.count(1)  # atomic, unlike +=
        self._workers: Callable[[], list[int]] = list

    def point(self, *_: object) -> None:
        """A point at which the process may be killed."""
        self.points = number = next(self._next)
        if number != self.number:
            return
        self.fired = True
        if self.target == "engine":
            os.kill(os.getpid(), signal.SIGKILL)
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):  # the script has just killed it
                os.kill(pid, signal.SIGKILL)

    def install(self) -> None:
        """Count the calls of store and lanes; call before the engine starts."""
        switch = self

        class CountedStore(Store):
            @classmethod
            def open(cls, *args: Any, **kwargs: Any) -> Store:
                files, connect = _CountedFiles(switch.point), _connect(switch.point)
                return Store.open(*args, files=files, connect=connect, **kwargs)

        start_module.Store = CountedStore
        send = worker_process.Lane._send

        def counted(*args: Any) -> Any:
            switch.point()
            return send(*args)

        worker_process.Lane._send = counted

    def watch(self, engine: Engine) -> None:
        """Make the workers of a started engine known, so that they can be killed."""
        self._workers = lambda: [pid for loop in engine.state.lanes if (pid := loop.lane.pid)]


class _CountedFiles(osio.Files):
    def __init__(self, point: Callable[[], None]) -> None:
        self._point = point

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._point()
        return super().pread(fd, into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._point()
        half = super().pwrite(fd, data[: (len(data) + 1) // 2], offset)
        self._point()  # the caller writes the other half next
        return half

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._point()
        super().fallocate(fd, offset, length)

    def fsync(self, fd: int) -> None:
        self._point()
        super().fsync(fd)


def _connect(point: Callable[[], None]) -> Callable[[str], sqlite3.Connection]:
    class Counted(sqlite3.Connection):
        def execute(self, *args: Any) -> sqlite3.Cursor:
            point()
            return super().execute(*args)

        def executemany(self, *args: Any) -> sqlite3.Cursor:
            point()
            return super().executemany(*args)

    def connect(path: str) -> sqlite3.Connection:
        db = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=Counted, timeout=0
        )
        db.text_factory = lenient_text
        return db

    return connect
