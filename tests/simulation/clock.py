"""An event loop in virtual time: the clock jumps to the next timer.

Owns the time of a simulation. Two runs that schedule the same work have the same order of events.
"""

from __future__ import annotations

import asyncio
import selectors
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

IDLE_S_MAX = 3600.0  # a jump beyond this is a wait that never ends
TURNS_MAX = 3_000_000  # of the loop: far more than any seed needs
OWNER: ContextVar[Any] = ContextVar("owner", default=None)  # the run of a daemon that code is of


class Stuck(AssertionError):
    """Nothing is scheduled, yet a coroutine waits: a deadlock."""


class _NoFiles(selectors.BaseSelector):
    """Files are registered and never ready; waiting moves the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stuck("the loop turns without end")
        if timeout is None or timeout > IDLE_S_MAX:
            raise Stuck("nothing will ever happen again")
        if timeout > 0:
            self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time; `work` gives the duration of work on other threads."""

    def __init__(self, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._virtual = _NoFiles()
        super().__init__(self._virtual)
        self._delay = delay
        self._made: weakref.WeakKeyDictionary[asyncio.Task[Any], Any] = weakref.WeakKeyDictionary()
        self.set_task_factory(self._make_task)

    def _make_task(self, _: Any, work: Any, **how: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=self, **how)
        self._made[task] = OWNER.get()
        return task

    def unretrieved(self) -> list[BaseException]:
        """Exceptions of ended tasks that nothing has awaited: no other log has them."""
        failed = [task for task in list(self._made) if task._log_traceback]  # type: ignore[attr-defined]
        return [error for task in failed if (error := task.exception()) is not None]

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Every task that has not ended, oldest first: `asyncio.all_tasks` has no order."""
        return [task for task in list(self._made) if not task.done()]

    def tasks_of(self, owner: Any) -> list[asyncio.Task[Any]]:
        """The tasks that code of `owner` has made, and theirs, oldest first."""
        return [task for task in self.tasks() if self._made[task] is owner]

    def time(self) -> float:
        return self._virtual.now

    @property
    def turns(self) -> int:
        return self._virtual.turns

    def _write_to_self(self) -> None:
        """Nothing to do: no other thread wakes this loop."""

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await sock.connect(address)

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        return await sock.accept()

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        await sock.sendall(bytes(data))

    async def sock_recv(self, sock: Any, n_bytes: int) -> bytes:
        return await sock.recv(n_bytes)

    async def create_connection(self, factory: Any, *, sock: Any) -> Any:  # type: ignore[override]
        """Give a simulated socket to a protocol."""
        return await sock.attach(factory())

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run blocking work after a virtual delay, without a thread."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_later(self._delay(), work)
        return future
