"""The owner of a session during a migration: every crash at every point, in a model and in real
code.

The model is a plain state machine of the protocol P0-P7, searched breadth first with up to three
faults; its rules of states and epochs are the product's own table and the ledger's own records. The
real code then runs every (point, fault, kind of session) in the simulation.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sqlite3
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from batchengine.core import BatchEngineError
from batchengine.session import TRANSITIONS, Event, State
from kv_store.ledger import writes
from tests.simulation.stage import Stage, play, words

POINTS = [f"P{i}" for i in range(8)]
FAULTS = ["none", "kill source", "kill target", "kill both", "crash", "cancel"]
SOURCE, TARGET = "source", "target"
NAME = "\x1fs"


# ------------------------------------------------------------------------------------ the model


class Model(NamedTuple):
    """One state. `runs` is the computing lane; `epoch` and `owner` are the ledger's."""

    point: int = 0  # count of completed steps of the protocol
    state: State = State.RUNNING
    runs: str = SOURCE
    owner: str = SOURCE
    epoch: int = 1
    source_up: bool = True
    target_up: bool = True
    engine_up: bool = True
    moving: bool = True
    cancelled: bool = False
    faults: int = 0


class Protocol:
    """What each step does; a subclass with another order is another protocol."""

    commit_at = 5

    def step(self, now: Model) -> Model | None:
        """The next step of the protocol; None if it is over."""
        if not (now.moving and now.engine_up):
            return None
        point = now.point + 1
        if point == 2:
            return now._replace(point=2, state=after(now.state, Event.FREEZE), runs="")
        if now.point < self.commit_at and (not now.target_up or now.cancelled):
            return self.abort(now)
        if point == self.commit_at:
            now = now._replace(owner=TARGET, epoch=ledger_epoch(now.epoch, now.epoch + 1))
        if point == 6:
            state = after(after(now.state, Event.THAW), Event.START)
            return now._replace(point=6, state=state, runs=TARGET if now.target_up else "")
        return now._replace(point=point, moving=point < 7)

    def abort(self, now: Model) -> Model:
        """End a migration before its commit, as if it had not been requested."""
        state = now.state
        if state is State.FROZEN:
            state = after(after(state, Event.THAW), Event.START)
        return now._replace(
            state=state, runs=SOURCE if now.source_up else "", moving=False, owner=now.owner
        )


def after(state: State, event: Event) -> State:
    """The next state by the product's table; a missing entry is a defect of the protocol."""
    return TRANSITIONS[state][event]


@functools.cache
def ledger_epoch(before: int, asked: int) -> int:
    """The epoch after the product's record, which decides whether it may follow."""
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for statement in writes.SCHEMA.split(";"):
            if statement.strip():
                db.execute(statement)
        db.execute("INSERT INTO store VALUES (1, ?, 0, 1, '', 0, 1, 0)", (bytes(16),))
        writes.OpenSession(NAME, "", bytes(32), before, "{}").write(db)
        writes.SetOwner(NAME, asked, 1, TARGET).write(db)
    finally:
        db.close()
    return asked


def faults(now: Model) -> Iterator[Model]:
    if now.faults >= 3 or not now.engine_up:
        return
    hit = now._replace(faults=now.faults + 1)
    if now.source_up:
        yield hit._replace(source_up=False, runs="" if now.runs == SOURCE else now.runs)
    if now.target_up:
        yield hit._replace(target_up=False, runs="" if now.runs == TARGET else now.runs)
    yield hit._replace(engine_up=False, source_up=False, target_up=False, runs="", moving=False)
    if not now.cancelled:
        yield hit._replace(cancelled=True)


def recoveries(now: Model) -> Iterator[Model]:
    """Workers start again; an engine starts again and reads the ledger; the owner continues."""
    if not now.engine_up:
        epoch = ledger_epoch(now.epoch, now.epoch + 1)
        yield now._replace(
            engine_up=True, source_up=True, target_up=True, state=State.IDLE, epoch=epoch, point=7
        )
        return
    if not now.source_up:
        yield now._replace(source_up=True)
    if not now.target_up:
        yield now._replace(target_up=True)
    up = now.source_up if now.owner == SOURCE else now.target_up
    frozen = now.state is State.FROZEN
    if not now.runs and up and not frozen:
        yield now._replace(runs=now.owner)


def explore(protocol: Protocol) -> tuple[int, list[str]]:
    """(states, violations in any of them)."""
    start = Model()
    seen, todo, wrong = {start}, deque([start]), list[str]()
    while todo:
        now = todo.popleft()
        if now.runs and now.runs != now.owner:
            wrong.append(f"{now.runs} computes what {now.owner} owns: {now}")
        step = protocol.step(now)
        following = [*faults(now), *recoveries(now), *([step] if step else [])]
        if not following and not now.runs:
            wrong.append(f"no lane will ever compute it: {now}")
        for later in following:
            if later.epoch < now.epoch:
                wrong.append(f"an epoch went back: {now}")
            if later not in seen:
                seen.add(later)
                todo.append(later)
    return len(seen), wrong


def test_the_protocol_always_has_exactly_one_owner() -> None:
    states, wrong = explore(Protocol())
    assert not wrong, wrong[:3]
    assert states > 400


def test_the_model_detects_a_commit_after_the_thaw() -> None:
    class LateCommit(Protocol):
        commit_at = 7

    _, wrong = explore(LateCommit())
    assert any("computes what" in text for text in wrong)


def test_the_model_detects_an_abort_without_a_thaw() -> None:
    class AbortWithoutThaw(Protocol):
        def abort(self, now: Model) -> Model:
            return now._replace(moving=False)

    _, wrong = explore(AbortWithoutThaw())
    assert any("no lane" in text for text in wrong)


def test_an_epoch_that_was_used_is_refused_by_the_ledger() -> None:
    for asked in (0, 3, 4):
        with pytest.raises(Exception, match="not a new one"):
            ledger_epoch(4, asked)


# ------------------------------------------------------------------------------- the real code


async def inject(stage: Stage, fault: str, ends: tuple[str, str]) -> None:
    source, target = ends
    if fault in ("kill source", "kill both"):
        stage.process(source).end(-9)
    if fault in ("kill target", "kill both"):
        stage.process(target).end(-9)
    if fault == "cancel":
        for generation in list(stage.up.state.turns):
            generation.cancel()
    if fault == "crash":
        stage._aside(stage.crash())
        await asyncio.get_running_loop().create_future()


def scene(point: str, fault: str, kind: str) -> None:
    """One migration with one fault: the answer is right, and one lane ends with the session."""
    prompt, n = words(3, 300), 60

    async def script(stage: Stage) -> None:
        session = "s" if kind != "anonymous" else None
        if kind == "idle":
            await stage.answer(prompt, n, "s")
            generation, reader = None, None
            name = "s"
        else:
            generation = stage.ask(prompt, n, session)
            reader = stage.start(generation)
            await stage.computed(generation, 9)
            name = generation.session_id
        key = next(k for loop in stage.now.loops for k, s in loop.sessions.items()
                   if s.session_id == name)  # fmt: skip
        source = stage.up.state.home[key].lane.name
        target = "right" if source == "left" else "left"
        injected: list[str] = []

        async def on_point(at: str) -> None:
            if at == point and not injected:
                injected.append(at)
                await inject(stage, fault, (source, target))

        stage.plant(on_point)
        first, result = stage.now, "broken"
        try:
            report = await first.wait(first.engine.promote("", name, to=target))
            result = str(report["result"])
        except BatchEngineError:
            result = "aborted"
        except Exception:
            assert fault == "crash", "only a crash may break it off"
        assert injected
        await check_end(stage, point, fault, kind, result)
        if fault == "crash":
            await stage.until(lambda: stage.engine_run is not first and not stage.engine_run.dead)  # type: ignore[union-attr]
            if kind == "running":
                again = await stage.up.resume("", "s", 0)
                answer = await stage.read(again)
                assert len(answer.tokens) == n
        elif reader is not None:
            answer = await reader
            if fault != "cancel":
                assert len(answer.tokens) == n, answer
        if session is not None:
            await stage.answer([*prompt, *words(4, 9)], 5, "s")
            stage.check_owners(stage.now)
            homes = [loop for loop in stage.now.loops
                     if any(s.session_id == "s" for s in loop.sessions.values())]  # fmt: skip
            assert len(homes) == 1

    play(script)


async def check_end(stage: Stage, point: str, fault: str, kind: str, result: str) -> None:
    """Before P5 the session is on its old lane, from P5 on its new one.

    A death may be noticed before P5 or after it once the migration waits for no frame: from P4 on,
    or from P2 on if the rows were copied while the session decoded.
    """
    waits = POINTS[:4] if kind == "idle" else POINTS[:2]
    if fault == "none":
        assert result == "moved"
    elif fault in ("kill target", "kill both") and point in waits:
        assert result == "aborted"
    elif fault != "crash" and point in POINTS[5:]:
        assert result == "moved"


MATRIX = list(itertools.product(POINTS, FAULTS, ["running", "idle", "anonymous"]))


@pytest.mark.parametrize("point", POINTS)
def test_every_fault_at_every_point_of_a_migration_leaves_one_owner(point: str) -> None:
    for at, fault, kind in MATRIX:
        if at == point:
            try:
                scene(at, fault, kind)
            except AssertionError as error:
                raise AssertionError(f"{fault} at {at}, {kind} session: {error}") from None
