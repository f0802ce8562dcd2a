"""What all daemons of one seed have in common, and how a seed is run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

from tests.simulation.clock import VirtualLoop
from tests.simulation.seams import FutureSeam, Tape, store_futures, virtual_time


class Ground:
    """What all daemons of one seed have in common: the clock, the trace, and what went wrong."""

    def __init__(self, seed: int, lines_kept: int) -> None:
        self.seed = seed
        tape = Tape(seed)
        self.loop = VirtualLoop(lambda: tape("blocking").uniform(0.0, 0.02))
        self.loop.set_exception_handler(self._unhandled)
        self.counts: Counter[str] = Counter()
        self.wrongs: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.stopping = False
        self.futures = FutureSeam()
        self.patches = contextlib.ExitStack()
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: deque[str] = deque(maxlen=lines_kept)

    def trace(self, *what: object) -> None:
        """Record one decision of the product or of the tape, with its time."""
        line = f"{self.loop.time():.6f} " + " ".join(map(str, what))
        self._digest.update(line.encode())
        self._lines.append(line)

    def wrong(self, what: str) -> None:
        """Record a violation; the seed fails at its end, or at the next check."""
        self.trace("WRONG", what)
        self.wrongs.append(what)

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised, or a task whose exception nothing has awaited was collected."""
        self.wrong(f"{context['message']}: {context.get('exception')!r}")

    def own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that outlives the engine."""
        task = self.loop.create_task(work)
        self.tasks.add(task)
        return task

    async def gather(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for all, or for the first failure, also of a check in another task."""
        pending: set[asyncio.Task[None]] = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=5.0)
            for task in done:
                task.result()
            if self.wrongs:
                raise AssertionError("; ".join(self.wrongs))

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()

    @property
    def lines(self) -> list[str]:
        return list(self._lines)


class _Listener(logging.Handler):
    """Fails the seed for log records that must not occur."""

    BAD = ("the ledger refused a record", " ended: ", "differs", "two contents")

    def __init__(self, ground: Ground, may_be_full: bool) -> None:
        super().__init__(logging.WARNING)
        self.ground = ground
        self.may_be_full = may_be_full

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.ground.trace("log", record.levelname, record.name)
        full = "disk is full" in text and self.may_be_full
        bad = record.levelno >= logging.CRITICAL or any(bad in text for bad in self.BAD)
        if bad and not full:
            self.ground.wrong(f"logged: {text}")


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed. `error` is empty when every check passed."""

    seed: int
    hash: str
    counts: Counter[str]
    seconds: float  # of virtual time
    error: str = ""
    lines: tuple[str, ...] = ()


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A folder in memory if possible: a seed writes a few megabytes and syncs them often."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = tempfile.mkdtemp(prefix="simulation-", dir=base)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Seed(Protocol):
    """A world of one seed, of one daemon or of several."""

    ground: Ground

    def has(self, fault: str) -> bool:
        """Whether the seed has faults of this kind."""
        ...

    async def run(self) -> None:
        """Run all phases."""
        ...


def run_seed(seed: int, world: Callable[[int, str], Seed]) -> Outcome:
    """Run one seed to its end. A failure is in the outcome."""
    logger = logging.getLogger("batchengine")
    with _folder() as folder, contextlib.ExitStack() as patches:
        made = world(seed, folder)
        ground = made.ground
        ground.futures = patches.enter_context(store_futures())
        ground.patches = patches
        listener = _Listener(ground, made.has("ledger"))
        before = logger.propagate, logger.level
        logger.addHandler(listener)
        logger.propagate = False
        patches.enter_context(virtual_time(ground.loop))
        error = ""
        try:
            ground.loop.run_until_complete(ground.own(made.run()))
        except Exception as failure:
            error = "".join(traceback.format_exception(failure, limit=-4))
            error = "\n".join([error, *ground.wrongs])
        finally:
            logger.removeHandler(listener)
            logger.propagate, logger.level = before
            _end_loop(ground.loop)
        seconds = ground.loop.time() - 1000.0
        return Outcome(seed, ground.hash, ground.counts, seconds, error, tuple(ground.lines))


def _end_loop(loop: VirtualLoop) -> None:
    """End every task and resource of a seed."""
    for task in loop.tasks():
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        task.cancel()
    with contextlib.suppress(Exception):
        loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
