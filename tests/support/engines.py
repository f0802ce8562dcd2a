"""Helpers of engine tests: an engine on a scratch store, requests, and reference answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchengine.config import Config, LaneConfig, load
from batchengine.core import (
    PAGE_TOKENS,
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    Sampling,
    Sla,
    SlaClass,
    TokenEvent,
)
from batchengine.engine import Engine, Generation
from batchengine.engine.placement.migration import OnPoint, pass_point
from batchengine.engine.turns.stream import EVENTS_MAX
from batchengine.lanes.worker_process import WORKER
from bench.models.local_runner import LocalRunner, LocalSequence

# Of the lane of `running_engine`: a second one waits in a loop for most of a step of so small a
# model. Tests with the fixture `own_threads` have those that a daemon would have.
THREADS = 1


@dataclass(frozen=True, slots=True)
class Site:
    """The files of one test: its model, the folder of its store, the cache of packed weights."""

    model: Path
    folder: Path
    cache_dir: Path

    def at(self, folder: str | Path) -> Site:
        """The same model in another folder."""
        return Site(self.model, self.folder / folder, self.cache_dir)


class WatchedEngine(Engine):
    """An engine whose migrations call a function of the test at each of their points."""

    def __init__(self, config: Config, worker_command: tuple[str, ...], reader: str) -> None:
        super().__init__(config, worker_command=worker_command, reader=reader, on_point=self._at)
        self._planted: OnPoint = pass_point

    def plant(self, planted: OnPoint) -> None:
        """Call this at each point from now on, instead of the earlier function."""
        self._planted = planted

    def _at(self, point: str) -> Awaitable[None] | None:
        return self._planted(point)


@contextlib.asynccontextmanager
async def running_engine(
    site: Site,
    worker_command: tuple[str, ...] = WORKER,
    lanes: tuple[LaneConfig, ...] = (),
    *,
    require: str = "",
    reader: str = "",
    **overrides: object,
) -> AsyncIterator[WatchedEngine]:
    """A started engine; keys of `overrides` are dotted with __ (store__budget_bytes=...)."""
    config = load(
        None,
        {
            "model.path": str(site.model),
            "store.dir": str(site.folder / "kv"),
            "store.allow_volatile": True,
            "store.budget_bytes": 192 << 20,
            "store.free_floor_bytes": 1 << 20,  # a test caches on any disk that it fits on
            "server.admin_socket": "/tmp/unused.sock",
            "lane.threads": THREADS,
            **{name.replace("__", "."): value for name, value in overrides.items()},
        },
    )
    config = dataclasses.replace(
        config, cache_dir=str(site.cache_dir), lanes=lanes or config.lanes, require=require
    )
    engine = WatchedEngine(config, worker_command, reader)
    await engine.start(lambda _: None)
    try:
        yield engine
    finally:
        await engine.stop(0.0)
        for loop in engine.state.lanes:  # checked at the end of every test
            for session in loop.sessions.values():
                session.check()


def hold_restarts(engine: Engine) -> asyncio.Event:
    """Delay restarts of workers until the event is set."""
    supervisor = engine.running.supervisor
    may_start, restart = asyncio.Event(), supervisor.restart

    async def later(*given: Any) -> None:
        await may_start.wait()
        await restart(*given)

    supervisor.restart = later  # type: ignore[method-assign]
    return may_start


@dataclass(slots=True)
class Answer:
    """A generation read to its end."""

    tokens: list[int]
    text: str
    done: DoneEvent | None
    error: BatchEngineError | None
    events: list[Any]

    @property
    def reason(self) -> str:
        return self.done.finish_reason if self.done else "error"


async def read(generation: Generation) -> Answer:
    """Every event until the last."""
    answer = Answer([], "", None, None, [])
    async for event in generation:
        answer.events.append(event)
        match event:
            case TokenEvent():
                answer.tokens.append(event.token)
                answer.text += event.text
            case DoneEvent():
                assert answer.done is None
                assert answer.error is None
                answer.done = event
                answer.text += event.text
            case ErrorEvent():
                answer.error = event.error
            case _:
                pass
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition of the engine; the test fails after two minutes."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110  the engine has no event for every fact
            await asyncio.sleep(0.002)


def suspend(pid: int) -> None:
    """SIGSTOP; returns once every thread has stopped: until then one of them may still answer."""

    def states() -> set[str]:
        stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30.0
    while not states() <= {"T", "Z"}:
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


async def started(
    engine: Engine, asked: GenerationRequest, tokens: int
) -> tuple[Generation, asyncio.Future[Answer]]:
    """A stream with more than `tokens` tokens, and the task that reads it to its end."""
    generation = engine.submit(asked)
    reader = asyncio.ensure_future(read(generation))
    await until(lambda: generation.completion_tokens > tokens)
    return generation, reader


async def unread(engine: Engine, asked: GenerationRequest, tokens: int) -> Generation:
    """A stream with more than `tokens` tokens, which runs until it is read or cancelled.

    However fast the machine is: the turn pauses when EVENTS_MAX tokens are not read.
    """
    assert tokens < EVENTS_MAX <= asked.tokens_max // 2
    generation = engine.submit(asked)
    await until(lambda: generation.completion_tokens > tokens)
    return generation


_count = 0


def request(
    prompt: Sequence[int],
    tokens_max: int = 32,
    *,
    session: str | None = None,
    sla: str = "standard",
    sampling: Sampling | None = None,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = True,
    tenant: str = "",
) -> GenerationRequest:
    """A request with a fresh id."""
    global _count
    _count += 1
    return GenerationRequest(
        request_id=f"req-{_count}",
        prompt=tuple(prompt),
        tokens_max=tokens_max,
        sampling=sampling or Sampling(),
        stop=stop,
        ignore_eos=ignore_eos,
        sla=Sla(SlaClass(sla)),
        session_id=session,
        tenant=tenant,
    )


class Reference:
    """Reference answers: one timeline at a time, no engine. Whole pages that a prompt shares with
    an earlier one are not computed again, unless the model has recurrent state."""

    KEPT = 64  # pages of earlier prompts

    def __init__(self, model: Path, cache_dir: Path) -> None:
        self.model = model
        pages = 4 * self.KEPT  # a copy is made beside the original
        self.runner = LocalRunner(model, threads=1, cache_dir=cache_dir, n_pages=pages)
        self._known: dict[tuple[str, ...], list[int]] = {}  # many tests ask for the same answer
        self._prompts: list[LocalSequence] = []  # the latest one last; none has tokens of answers

    def tokens(self, prompt: Sequence[int], n: int, sampling: Sampling | None = None) -> list[int]:
        key = (repr(prompt), repr(sampling))
        known = self._known.get(key, [])
        if len(known) < n:
            known = self._known[key] = self._generate(list(prompt), n, sampling)
        return known[:n]

    def _generate(self, prompt: list[int], n: int, sampling: Sampling | None) -> list[int]:
        runner = self.runner
        if runner.model.states is not None:
            return runner.generate([prompt], n, sampling=sampling)[0]
        timeline, shared = LocalSequence(), 0
        for earlier in self._prompts:
            pairs = zip(earlier.tokens, prompt[:-1], strict=False)
            found = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if found >= shared + PAGE_TOKENS:
                shared = found // PAGE_TOKENS * PAGE_TOKENS
                runner.release(timeline)
                timeline = runner.fork(earlier, shared)
        answer = runner.generate([prompt], n, sampling=sampling, begun=[timeline])[0]
        self._prompts.append(runner.fork(timeline, len(prompt)))
        runner.release(timeline)
        while sum(len(kept.pages) for kept in self._prompts) > self.KEPT:
            runner.release(self._prompts.pop(0))
        return answer

    def close(self) -> None:
        self.runner.close()


def words(seed: int, n: int, vocab: int = 1800) -> list[int]:
    """A prompt of ordinary tokens; a pure function of its arguments."""
    value, out = seed * 2654435761 + 12345, list[int]()
    for _ in range(n):
        value = (value * 6364136223846793005 + 1442695040888963407) & ((1 << 64) - 1)
        out.append(20 + (value >> 33) % (vocab - 20))
    return out
