"""Clients of a simulated engine. Each has the expected answers, and what it was sent.

A broken stream is permitted; a token that differs, is sent twice or is missing, and a stream that
does not end, are failures.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    Sampling,
    Sla,
    SlaClass,
    TokenEvent,
)
from batchengine.engine import Generation
from bench.models.hashlm import hashlm_tokens
from tests.support.engines import words

if TYPE_CHECKING:
    from tests.simulation.world import EngineRun, World

CLASSES = ["interactive", "interactive", "standard", "background", "batch"]
TOKENS = [1, 2, 7, 20, 40]
FRESH = [3, 60, 250, 256, 257, 300, 520]
HISTORY_MAX = 900


class Broken(Exception):
    """The engine died while we waited."""


@dataclass(slots=True)
class Attempt:
    """One request: its expected answer, and how much of it the client has."""

    prompt: list[int]
    n: int
    sampling: Sampling
    request_id: str
    answer: list[int] = field(default_factory=list)
    sent: int = 0
    state: str = "open"  # done, cancelled, failed, broken

    def check(self, token: int, where: str) -> None:
        if self.sent >= self.n:
            raise AssertionError(f"{where}: token {self.sent} of {self.n} was sent")
        if token != self.answer[self.sent]:
            raise AssertionError(
                f"{where}: token {self.sent} after a prompt of {len(self.prompt)} is {token},"
                f" it must be {self.answer[self.sent]}"
            )
        self.sent += 1


class Record:
    """What must be in the ledger of a named session."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.is_dropped = False

    def check(self, tokens: list[int] | None, power: bool, where: str) -> None:
        """The ledger has the tokens of the newest attempt that began, with every token sent."""
        if self.is_dropped:
            return
        for attempt in reversed(self.attempts):
            promised = 0
            if attempt.state == "done":
                promised = attempt.n
            elif power:
                promised = attempt.sent
            prompt, length = attempt.prompt, len(attempt.prompt)
            rest = [] if tokens is None else tokens[length:]
            begun = tokens is not None and tokens[:length] == prompt
            if begun and rest == attempt.answer[: len(rest)]:
                if len(rest) < promised:
                    raise AssertionError(
                        f"{where}: {promised} tokens were acknowledged, {len(rest)} are on disk"
                    )
                return
            if begun and rest[: attempt.n] == attempt.answer:
                continue  # it was sent from a longer answer to the same question
            if attempt.state == "done" or attempt.sent:
                found = "nothing" if tokens is None else f"{len(tokens)} tokens"
                raise AssertionError(
                    f"{where}: {attempt.sent} tokens after {length} were sent, on disk is {found}"
                    " else"
                )
        if tokens:
            raise AssertionError(f"{where}: {len(tokens)} tokens on disk that belong to no request")


class Person:
    """One client with one conversation; `name` None asks without a session."""

    fresh = FRESH  # lengths of new prompts
    history_max = HISTORY_MAX
    answers = TOKENS

    def __init__(self, world: World, number: int, name: str | None) -> None:
        self.world = world
        self.rng = world.tape(f"person {number}")
        self.number = number
        self.name = name
        self.history: list[int] = []
        self.call = ""  # a tool whose result is awaited
        self.asked = 0

    @property
    def record(self) -> Record:
        if self.name is None:
            return Record()
        return self.world.records.setdefault(self.name, Record())

    async def live(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.05, 0.3, 4.0]) * self.rng.random())
            self.choose_world()
            engine_run = await self.world.engine()
            try:
                await self._turn(engine_run)
            except Broken:
                self.world.count("broken")

    def choose_world(self) -> None:
        """Before a turn: with which daemon it is."""

    async def _turn(self, engine_run: EngineRun) -> None:
        kind = self.rng.random()
        if self.name is not None and self.history and kind < 0.08:
            await self._park(engine_run)
        elif self.name is not None and self.history and kind < 0.14:
            await self._fork(engine_run)
        elif self.name is not None and self.history and kind < 0.17:
            await self._drop(engine_run)
        await self._ask(engine_run)

    # -------------------------------------------------------------------------------- asking

    def _prompt(self) -> list[int]:
        """A continuation, an edit in the middle, or one of few fresh prompts that share pages."""
        rng, kind, history = self.rng, self.rng.random(), self.history
        if history and len(history) < self.history_max and kind < 0.6:
            return history + words(rng.randrange(99), rng.randrange(1, 40))
        if history and kind < 0.8:
            return history[: rng.randrange(1, len(history))] + words(rng.randrange(9), 7)
        return words(rng.randrange(3), rng.choice(self.fresh))

    async def _ask(self, engine_run: EngineRun) -> None:
        if engine_run.dead:
            raise Broken
        rng = self.rng
        prompt, n = self._prompt(), rng.choice(self.answers)
        sampling = Sampling(temperature=1.0, seed=rng.randrange(3))
        self.asked += 1
        request_id = f"{self.name or 'anonymous'}-{self.number}-{self.asked}"
        answer = hashlm_tokens(prompt, n, seed=sampling.seed, n_tokens=self.world.n_tokens)
        attempt = Attempt(prompt, n, sampling, request_id, answer)
        calls = (self.call,) if self.call and rng.random() < 0.7 else ()
        by_call = bool(calls) and rng.random() < 0.5
        request = GenerationRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            tokens_max=n,
            sampling=sampling,
            ignore_eos=True,
            sla=Sla(SlaClass(rng.choice(CLASSES))),
            session_id=None if by_call else self.name,
            tool_call_ids=calls,
            promote=rng.random() < 0.1,
        )
        self.call = ""
        self.record.attempts.append(attempt)
        try:
            generation = engine_run.submit(request)
        except BatchEngineError as error:
            attempt.state = "failed"
            self._refused(error)
            return
        if by_call and generation.session_id != self.name:  # the prompt does not continue it
            self.world.count("other call")
            generation.cancel()
            self.record.attempts.pop()
            return
        self.world.trace("submit", request_id, len(prompt), n)
        await self._follow(engine_run, generation, attempt)
        while attempt.state == "broken" and self.name is not None and rng.random() < 0.7:
            if not await self._resume(attempt):
                break
        if attempt.state == "done":
            self.history = [*prompt, *answer]
        elif attempt.state != "failed":
            self.history = [*prompt, *answer[: attempt.sent]]

    async def _resume(self, attempt: Attempt) -> bool:
        """After a crash: read the rest of the answer, from the first missing token."""
        engine_run = await self.world.engine()
        assert self.name is not None
        try:
            generation = await engine_run.wait(
                engine_run.engine.resume("", self.name, attempt.sent)
            )
        except Broken:
            return True
        except BatchEngineError as error:
            self.world.count(f"not resumed: {error.name}")
            if attempt.sent or error.name not in ("session_not_found", "nothing_to_resume"):
                self._refused(error)
            return False
        asked, sampling = generation.request, attempt.sampling
        same = list(asked.prompt) == attempt.prompt and asked.sampling.seed == sampling.seed
        if not same or asked.tokens_max != attempt.n:
            if attempt.sent and not same:  # else it was sent from a longer answer that existed
                raise AssertionError(f"{attempt.request_id} was sent, but is not in the ledger")
            generation.cancel()  # this attempt never began
            return False
        self.world.trace("resume", attempt.request_id, attempt.sent)
        self.world.count("resumed")
        await self._follow(engine_run, generation, attempt)
        return True

    async def _follow(
        self, engine_run: EngineRun, generation: Generation, attempt: Attempt
    ) -> None:
        """Read to the end, or cancel before it."""
        rng, give_up = self.rng, 1 << 30
        if rng.random() < 0.15:
            give_up = rng.randrange(attempt.n + 1)
        slow_s = rng.choice([0.0] * 8 + [0.01, 0.2])
        attempt.state = "open"
        try:
            await engine_run.wait(self._read(generation, attempt, give_up, slow_s))
        except Broken:
            attempt.state = "broken"
            raise_on = self.name is None
            if raise_on:
                raise

    async def _read(
        self, generation: Generation, attempt: Attempt, give_up: int, slow_s: float
    ) -> None:
        where = f"{attempt.request_id} on {generation.lane or 'no lane'}"
        if attempt.sent >= give_up:
            generation.cancel()
            attempt.state = "cancelled"
            return
        async for event in generation:
            match event:
                case TokenEvent():
                    attempt.check(event.token, where)
                    self.world.trace("token", attempt.request_id, attempt.sent, event.token)
                    if attempt.sent >= give_up:
                        generation.cancel()
                        attempt.state = "cancelled"
                        self.world.count("cancelled")
                        return
                    if slow_s:
                        await asyncio.sleep(slow_s)
                case DoneEvent():
                    self._ended(attempt, event, where)
                case ErrorEvent():
                    attempt.state = "failed"
                    self.world.trace("error", attempt.request_id, event.error.name)
                    if event.error.name == "draining" and self.world.stopping:
                        attempt.state = "cancelled"
                        return
                    self._refused(event.error)
                case _:
                    pass
        if attempt.state == "open":
            raise AssertionError(f"{where}: the stream ended without an end")

    def _ended(self, attempt: Attempt, event: DoneEvent, where: str) -> None:
        self.world.trace("done", attempt.request_id, event.finish_reason, attempt.sent)
        if event.finish_reason == "shutdown" and self.world.stopping:
            attempt.state = "cancelled"
            return
        if event.finish_reason != "length" or attempt.sent != attempt.n:
            raise AssertionError(
                f"{where}: ended with {event.finish_reason} after {attempt.sent} of {attempt.n}"
            )
        attempt.state = "done" if event.usage.durable else "failed"
        self.world.count("answers")

    def _refused(self, error: BatchEngineError) -> None:
        """A named error; the faults of this seed must explain it."""
        self.world.refused(error)
        if error.name in ("session_quarantined", "durability_unavailable"):
            self.name = None if self.name is None else f"{self.name}+"
            self.history = []

    # --------------------------------------------------------------------- other operations

    async def _park(self, engine_run: EngineRun) -> None:
        assert self.name is not None
        call = f"call-{self.number}-{self.asked}"
        with contextlib.suppress(BatchEngineError):
            await engine_run.wait(engine_run.engine.park("", self.name, call))
            self.call = call
            self.world.count("parked")

    async def _fork(self, engine_run: EngineRun) -> None:
        """The fork becomes a separate conversation, and is continued by another client."""
        assert self.name is not None
        fork_name = f"{self.name}f{self.asked}"
        with contextlib.suppress(BatchEngineError):
            await engine_run.wait(engine_run.engine.fork("", self.name, fork_name))
            record = Record()
            record.attempts = list(self.record.attempts)
            self.world.records[fork_name] = record
            self.world.count("forked")
            if self.rng.random() < 0.5:
                self.name = fork_name

    async def _drop(self, engine_run: EngineRun) -> None:
        assert self.name is not None
        self.record.is_dropped = True
        with contextlib.suppress(BatchEngineError):
            await engine_run.wait(engine_run.engine.drop("", self.name))
            self.world.count("dropped")
        self.name, self.history = f"{self.name}'", []
