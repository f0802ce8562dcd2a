"""One daemon of a seed: a configuration, faults, runs of the engine, and its invariants.

    safety     with faults: workers die, hang and compute wrongly; disks fill; the engine is killed
    liveness   without faults: every client must end
    baseline   without clients: every slot, pin and seat is released

Every decision goes into one hash, which is the same for every run of a seed. `linked` has seeds of
several daemons.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from batchengine.config import Config, LaneConfig, load
from batchengine.core import BatchEngineError, GenerationRequest, Kind
from batchengine.engine import Engine, Generation
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.recompute import KEY as RECOMPUTE
from batchengine.engine.placement.migration import OnPoint
from batchengine.session import Session, State
from batchengine.session_kv import pages_for
from batchengine.wire import lane as wire
from bench.processes.store_check import check_integrity
from tests.simulation import faults
from tests.simulation.clock import OWNER
from tests.simulation.lanes import POINTS, TRAVEL_S, Plan, SimLane
from tests.simulation.people import Broken, Person, Record
from tests.simulation.seams import (
    SimFiles,
    StoreSeam,
    Tape,
    Threads,
    starter_uses,
)
from tests.simulation.seed import Ground, Outcome, Seed, run_seed

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "pocket" / "pocket-q4_0.gguf"
PAGE_BYTES = 65_536  # of HashLM
LIVENESS_S = 900.0  # after the last fault, until every client has ended
QUIET_S = 60.0  # after that, until everything is released


class EngineRun:
    """One run of the engine, from its start to its crash or end."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.host = world.name
        self.number = number
        self.dead = False
        self.waiters: set[asyncio.Task[Any]] = set()
        self.threads = Threads(world.loop, world.store_delay)
        self.files = SimFiles(world.disk_fault)
        self.seam = StoreSeam(self.threads, self.files, world.ledger_fault)
        self.engine = Engine(world.config, on_point=world.at_point)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; Broken if the engine dies before."""
        if self.dead:
            work.close()
            raise Broken
        with self.owning():
            task = asyncio.ensure_future(work)
        self.waiters.add(task)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await asyncio.wait([task])
        finally:
            self.waiters.discard(task)
        if task.cancelled():
            raise Broken
        return task.result()

    def submit(self, request: GenerationRequest) -> Generation:
        """As the engine's."""
        with self.owning():
            return self.engine.submit(request)

    @contextlib.contextmanager
    def owning(self) -> Iterator[None]:
        """The tasks that are made inside belong to this run."""
        token = OWNER.set(self)
        try:
            yield
        finally:
            OWNER.reset(token)

    @property
    def loops(self) -> list[LaneLoop]:
        return self.engine.state.lanes

    def crash(self, linger_s: float) -> None:
        """SIGKILL: no code of this run executes any more; files stay as they are."""
        self.dead = True
        self.threads.kill()
        engine, store = self.engine, self.seam.opened
        assert store is not None
        names = [store.ledger.path, store.ledger.path + "-wal"]
        before = {name: Path(name).read_bytes() for name in names if os.path.exists(name)}
        store.ledger._db.close()  # would checkpoint the log; a crash does not
        for name, data in before.items():
            Path(name).write_bytes(data)
        store._closed = True
        store.core.extents.close()
        store.orphaned.close()
        os.close(store._lock_fd)
        for loop in engine.state.lanes:
            pages = loop.kv
            for arena in (*pages.arenas.dead, *([pages.slots.arena] if pages.slots.arena else [])):
                os.close(arena.fd)
                arena.close = _nothing  # type: ignore[method-assign]
            assert isinstance(loop.lane, SimLane)
            loop.lane.drop_pending(linger_s)
        engine._phase = "stopped"
        for task in self.world.loop.tasks_of(self):
            if task not in self.world.tasks:
                task.cancel()


def _nothing(*, delete: bool) -> None:
    """Replaces a close that the dead process cannot do."""


class World:
    """One daemon and its clients. Use `simulate`, or `linked` for several daemons."""

    lines_kept = 60  # of the trace, printed after a failure
    model = ""  # the model of HashLM; another name is another model
    name = ""  # among peers

    def __init__(self, seed: int, folder: str, ground: Ground | None = None) -> None:
        self.seed = seed
        self.folder = folder
        self.ground = ground or Ground(seed, self.lines_kept)
        self.tape = Tape(seed, self.name)
        self.loop = self.ground.loop
        self.counts = self.ground.counts
        self.tasks = self.ground.tasks
        self._wrong = self.ground.wrongs
        self._own = self.ground.own
        self.faulty = False  # not while an engine starts
        self.calm = False  # faults have ended
        self.records: dict[str, Record] = {}
        self.engine_run: EngineRun | None = None
        self.run_count = 0
        self._up = asyncio.Event()
        self._planted: OnPoint = self._on_point
        self._pids = 1000
        self._people: list[Person] = []
        self._is_cold, self._chances = faults.choose(self.tape)
        self.state_bytes = self._choose_state_bytes()
        self.n_tokens = self._choose_n_tokens()
        self.config = self._choose_config()

    # ------------------------------------------------------------------------------- choices

    def _choose_state_bytes(self) -> int:
        """Size of the model's recurrent state; half of the seeds have one."""
        return self.tape("state").choice([0, 4096])

    def _choose_n_tokens(self) -> int:
        """How many different tokens the model samples, 0 = all: of few, drafts are often right."""
        return self.tape("text").choice([0, 3])

    def _choose_config(self) -> Config:
        rng = self.tape("config")
        tiers = rng.choice([("fast", "bulk"), ("any", "any"), ("fast", "bulk", "bulk"), ("any",)])
        lanes = tuple(
            LaneConfig(
                name=f"lane{i}",
                threads=1,
                tier=tier,
                entries_max=rng.choice([2, 4, 8]),
                open_pages=rng.choice([6, 8, 16]),
                chunk_tokens_max=rng.choice([32, 128, 256]),
                tokens_per_step=288,
                steps_in_flight=self.tape(f"ahead{i}").choice([1, 2, 3]),
                draft_tokens_max=self.tape(f"drafts{i}").choice([0, 4, 15]),
            )
            for i, tier in enumerate(tiers)
        )
        config = load(
            None,
            {
                "model.path": str(MODEL),
                "store.dir": f"{self.folder}/kv",
                "store.allow_volatile": True,
                "store.budget_bytes": rng.choice([16, 40, 300]) * PAGE_BYTES,
                "store.durability": rng.choice(["turn", "power"]),
                "store.full_disk": rng.choice(["fail", "finish"]),
                "limits.canary_s": self.tape("canary").choice([0.0, 0.3, 600.0]),
                "router.promote_auto": rng.random() < 0.7,
                "router.dwell_s": rng.choice([0.0, 0.1, 0.5]),
                "router.demote_idle_s": rng.choice([0.5, 5.0]),
                "server.admin_socket": f"{self.folder}/admin.sock",
            },
        )
        return dataclasses.replace(config, cache_dir=self.folder, lanes=lanes)

    def has(self, fault: str) -> bool:
        """Whether the seed has faults of this kind."""
        return fault in self._chances

    def decides(self, kind: str) -> bool:
        """Whether a fault of this kind happens now."""
        chance = self._chances.get(kind, 0.0)
        struck = self.faulty and not self.calm and self.tape(f"fault {kind}").random() < chance
        if struck:
            self.count(f"fault {kind}")
            self.trace("fault", kind)
        return struck

    def store_delay(self, thread: str) -> float:
        """How long until a thread of the store takes its next intent."""
        rng = self.tape(thread)
        if self.decides("stuck"):
            return rng.uniform(0.1, 3.0)
        if "page" in thread and self.decides("disk"):
            return rng.uniform(0.01, 1.0)
        return rng.choice([0.0, 0.0002, 0.002]) + rng.random() * 0.001

    def disk_fault(self, call: str) -> str:
        if call in ("pwrite", "fallocate") and self.decides("full"):
            return "full"
        return "io" if call in ("pwrite", "pread") and self.decides("io") else ""

    def ledger_fault(self, call: str) -> str:
        return "full" if self.decides("ledger") else ""

    def plan_step(self, lane: SimLane, frame: wire.LaneFrame) -> Plan:
        """Draw the duration and the outcome of one step."""
        rng = self.tape("steps")
        step = frame.message
        assert isinstance(step, wire.Step)
        tokens = sum(entry.n_tokens for entry in step.entries)
        duration_s = 0.002 + 0.00005 * tokens + 0.0005 * len(step.import_rows)
        duration_s *= rng.uniform(0.7, 1.5) * (1.0 if lane.name == "lane0" else 2.0)
        if self.decides("slow"):
            duration_s *= 100
        die = rng.choice(POINTS) if self.decides("die") else ""
        if die == "inside_row" and not tokens:
            die = "after_chores"
        by = rng.choice([signal.SIGKILL, signal.SIGSEGV])
        is_recompute = any(entry.session == RECOMPUTE for entry in step.entries)  # NaN there is F46
        nan = not is_recompute and self.decides("nan")
        return Plan(duration_s, die, by, self.decides("hang"), nan)

    def note_s(self) -> float:
        """How long a message to a worker takes that is no request."""
        return TRAVEL_S

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    # --------------------------------------------------------------------------------- notes

    def trace(self, *what: object) -> None:
        """Record one decision, as the ground does."""
        self.ground.trace(*what)

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def wrong(self, what: str) -> None:
        """Record a violation, as the ground does."""
        self.ground.wrong(what)

    @property
    def stopping(self) -> bool:
        return self.ground.stopping

    def refused(self, error: BatchEngineError) -> None:
        """A client was sent an error: a fault of this seed must explain it."""
        code = error.name
        self.count(f"error {code}")
        kinds = faults.EXPLAINED.get(code)
        if kinds is None or (kinds and not any(k in self._chances for k in kinds)):
            raise AssertionError(f"nothing explains the error {code}: {error} {error.why}")

    # ---------------------------------------------------------------------------------- runs

    async def engine(self) -> EngineRun:
        """Wait for a running engine."""
        while self.engine_run is None or self.engine_run.dead:
            await self._up.wait()
        return self.engine_run

    async def boot(self) -> None:
        self.run_count += 1
        engine_run = EngineRun(self, self.run_count)
        self.trace("boot", self.run_count)
        self._use_seams(engine_run)
        with engine_run.owning():
            await engine_run.engine.start(lambda _: None)
        self.plant(self._on_point)
        store = engine_run.seam.opened
        assert store is not None
        self.engine_run = engine_run
        await self._check_ledger(engine_run)
        self._up.set()

    def _use_seams(self, engine_run: EngineRun) -> None:
        """Have the engine of this run build its parts from the simulated ones."""
        self.ground.futures.threads = engine_run.threads
        uses = starter_uses(engine_run.seam, lambda name, command: SimLane(self, name))
        # to the end: an audit may start a fresh worker at any time
        self.ground.patches.enter_context(uses)

    async def crash(self) -> None:
        """The engine is killed; another one starts."""
        engine_run = self.engine_run
        if engine_run is None or engine_run.dead:
            return
        self.count("crashes")
        self.trace("crash")
        faulty, self.faulty = self.faulty, False
        self._up.clear()
        engine_run.crash(self.tape("crash").choice([0.0, 0.0, 0.3, 8.0]))
        await asyncio.sleep(self.tape("crash").uniform(0.01, 1.0))
        await self.boot()
        self.faulty = faulty

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task beside the clients; if it fails, the seed fails."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.wrong(repr(task.exception()))

        self._own(work).add_done_callback(done)

    async def _check_ledger(self, engine_run: EngineRun) -> None:
        """What was acknowledged is on disk."""
        power = self.config.store.durability == "power"
        store = engine_run.seam.opened
        assert store is not None
        for name, record in list(self.records.items()):
            try:
                found = await asyncio.wrap_future(store.ledger.load_session(f"\x1f{name}"))
            except Exception as error:
                raise AssertionError(f"session {name} cannot be read: {error!r}") from error
            tokens = None if found is None else list(found.tokens)
            record.check(tokens, power, f"session {name} in run {self.run_count}")

    # ------------------------------------------------------------------------------- phases

    async def run(self) -> None:
        """Run all phases of the seed."""
        await self.boot()
        people, rest = self.begin()
        try:
            async with asyncio.timeout(LIVENESS_S):
                await self.ground.gather([*people, rest[0]])
        except TimeoutError:
            raise AssertionError(f"a waiter waits for ever: {self.waiting()}") from None
        finally:
            for task in (*people, *rest):
                task.cancel()
        await asyncio.gather(rest[1], return_exceptions=True)
        await self.end()

    def begin(self) -> tuple[list[asyncio.Task[None]], list[asyncio.Task[None]]]:
        """Let clients, and then faults and an operator, act: their tasks."""
        rng = self.tape("people")
        names = self.choose_names(rng)
        self._people = [self.person(i, name) for i, name in enumerate(names)]
        self.faulty = True
        turns = rng.randrange(2, 6)
        people = [self._own(person.live(turns)) for person in self._people]
        strikes = self._own(self._inject_faults(rng.uniform(1.0, 12.0)))
        return people, [strikes, self._own(self._move())]

    def choose_names(self, rng: random.Random) -> list[str | None]:
        """The sessions of the clients; None asks without one."""
        return ["a", "b", "c", "d", None, None][: rng.randrange(3, 7)]

    def person(self, number: int, name: str | None) -> Person:
        return Person(self, number, name)

    async def _inject_faults(self, seconds: float) -> None:
        """Inject faults from outside for a time; then end all kinds of faults."""
        rng = self.tape("strikes")
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            await asyncio.sleep(rng.uniform(0.02, 0.1))
            if rng.random() < 0.06 and self.decides_in(rng, "kill"):
                self._kill_worker()
            if rng.random() < 0.06 and self.decides_in(rng, "crash"):
                await self.crash()
            if rng.random() < 0.06 and self.decides_in(rng, "bad"):
                self._invalidate()
            if rng.random() < 0.06 and self.decides_in(rng, "evict"):
                self._evict()
        self.calm = True
        self.trace("no more faults")

    def decides_in(self, rng: Any, kind: str) -> bool:
        return self.faulty and not self.calm and rng.random() < self._chances.get(kind, 0.0)

    def _kill_worker(self) -> None:
        engine_run = self.engine_run
        if engine_run is None or engine_run.dead:
            return
        loop = self.tape("kill").choice(engine_run.loops)
        assert isinstance(loop.lane, SimLane)
        if loop.lane.process is not None:
            self.count("kills")
            self.trace("kill", loop.lane.name)
            loop.lane.process.end(-signal.SIGKILL)

    def _invalidate(self) -> None:
        """A page that a session has, or is about to match, fails a check."""
        engine_run = self.engine_run
        if engine_run is None or engine_run.dead or engine_run.engine.running.store is None:
            return
        sessions = [*engine_run.engine.state.sessions.values()]
        sessions += [turn.session for turn in engine_run.engine.state.turns.values()]
        tables = [session.kv for session in sessions]
        refs = {ref for kv in tables for ref in kv.sealed}
        held = sorted(refs | {kv.parked.ref for kv in tables if kv.parked is not None})
        if held:
            self.count("condemned")
            ref = self.tape("condemn").choice(held)
            self.trace("condemn", *ref)
            engine_run.engine.running.store.pages.invalidate(ref)
            for loop in engine_run.loops:
                loop.recheck()

    def _evict(self) -> None:
        """Evict pages of idle sessions, as a lane does when the store is full."""
        if self.engine_run is not None and not self.engine_run.dead:
            self.count("evicted")
            for loop in self.engine_run.loops:
                loop.kv.slots.evict_oldest(Session(0, "", ""))

    async def _move(self) -> None:
        """Operator at the admin socket: migrate sessions in both directions while clients ask."""
        rng = self.tape("moves")
        pauses_s = [0.01, 0.03] if self._is_cold else [0.01, 0.1, 1.0]
        while True:
            await asyncio.sleep(rng.choice(pauses_s) * rng.random())
            engine_run = await self.engine()
            live = sorted(
                {s.session_id for s in engine_run.engine.state.sessions.values()}
                | {t.session.session_id for t in engine_run.engine.state.turns.values()}
            )
            if not live or len(engine_run.loops) < 2:
                continue
            session, to = rng.choice(live), rng.choice(engine_run.loops).lane.name
            try:
                report = await engine_run.wait(engine_run.engine.promote("", session, to=to))
            except Broken:
                continue
            except BatchEngineError as error:
                self.count("not moved")
                self.trace("not moved", session, to, error.name)
                continue
            self.count(str(report["result"]))
            self.trace("moved", session, *report.values())

    def plant(self, planted: OnPoint) -> None:
        """Call this at each point of a migration, until the next run begins."""
        self._planted = planted

    def at_point(self, point: str) -> Awaitable[None] | None:
        """A migration in the current run has reached this point."""
        return self._planted(point)

    async def _on_point(self, point: str) -> None:
        """At a point of a migration: a fault may be injected here."""
        self.trace("point", point)
        if not self.decides("point"):
            return
        rng = self.tape("points")
        match rng.choice(["kill", "kill", "delay", "cancel", "crash"]):
            case "kill":
                self._kill_worker()
            case "delay":
                await asyncio.sleep(rng.choice([0.001, 0.05, 0.5, 3.0]))
            case "cancel":
                engine_run = self.engine_run
                if engine_run is not None and engine_run.engine.state.turns:
                    rng.choice(list(engine_run.engine.state.turns)).abort(_client_left())
            case _:
                self._aside(self.crash())
                await asyncio.get_running_loop().create_future()  # this engine was killed

    # --------------------------------------------------------------------------- invariants

    def on_step(self, lane: SimLane, step: wire.Step) -> None:
        """At each frame sent: no other lane has these sessions or slots."""
        entries = " ".join(f"{e.session}@{e.start}+{e.n_tokens}" for e in step.entries)
        chores = (
            len(step.poison), len(step.reserve), len(step.relabel), len(step.import_rows),
            len(step.touch), len(step.digest), len(step.verify),
        )  # fmt: skip
        self.trace("step", lane.name, lane.incarnation, entries, chores)
        self.count("steps")
        self.counts["states saved"] += len(step.save_states)
        self.counts["states loaded"] += len(step.load_states)
        self.counts["drafted"] += sum([entry.drafts for entry in step.entries])
        if any(entry.takes_sample for entry in step.entries):
            self.counts["entries ahead"] += sum([entry.takes_sample for entry in step.entries])
            self.counts["chunks ahead"] += sum([not e.takes_sample for e in step.entries])
            self.counts["pages ahead"] += len(step.reserve)
            self.counts["proofs ahead"] += len(step.verify)
        engine_run = self.engine_run
        if engine_run is None or engine_run.dead or lane.abandoned:
            return
        self.check_owners(engine_run)
        for loop in engine_run.loops:
            if loop.lane is lane:
                continue
            theirs = {entry.session for ahead in loop._in_flight for entry in ahead.step.entries}
            both = theirs & {entry.session for entry in step.entries}
            if both:
                raise AssertionError(f"sessions {both} compute on two lanes at once")

    def on_served(self, lane: SimLane, codes: tuple[int, ...]) -> None:
        """A worker answers a question for pages."""

    def check_owners(self, engine_run: EngineRun) -> None:
        """I3: one owner of every session, one holder of every slot."""
        home = engine_run.engine.state.home
        seen: dict[int, str] = {}
        for loop in engine_run.loops:
            held: dict[Any, Any] = {}
            for session in loop.kv.slots.members.values():
                before = seen.setdefault(session.key, loop.lane.name)
                if before != loop.lane.name:
                    raise AssertionError(f"{session!r} is at home on {before} and {loop.lane.name}")
                if home.get(session.key) is not loop:
                    raise AssertionError(f"{session!r} is a member of {loop.lane.name} only")
                session.check()
                for slot in session.kv.open:
                    if held.setdefault(slot, session) is not session:
                        raise AssertionError(f"{slot} has two owners: {held[slot]!r}, {session!r}")
            for row_import in loop.kv.importing.imports:
                for slot in row_import.slots:
                    if row_import.arena is loop.kv.slots.arena and slot in held:
                        raise AssertionError(f"{slot} is adopted into and owned by {held[slot]!r}")
            for key in (*loop.running, *loop.waiting):
                if home.get(key) is not loop:
                    raise AssertionError(f"session {key} computes on {loop.lane.name}, not at home")

    async def end(self) -> None:
        """After the last client: everything is released, and everything is on disk."""
        await self.rest()
        self.forget()
        await asyncio.sleep(3.0)
        await self.check_empty()
        self.ground.stopping = True
        await self.stop()
        self.check_ended()

    async def rest(self) -> None:
        """Wait for the end of all work, and check what is left."""
        engine_run = await self.engine()
        try:
            async with asyncio.timeout(QUIET_S):
                while self._busy(engine_run):  # noqa: ASYNC110  there is no event for every fact
                    await asyncio.sleep(0.5)
        except TimeoutError:
            raise AssertionError(f"does not come to rest: {self._busy(engine_run)}") from None
        self._check_baseline(engine_run)
        await self._check_ledger(engine_run)

    def forget(self) -> None:
        """Close every session."""
        state = self.up.state
        for session in list(state.sessions.values()):
            state.forget(session)

    async def check_empty(self) -> None:
        """Wait for the end of maintenance; then nothing may be held."""
        engine_run = await self.engine()
        with contextlib.suppress(TimeoutError):  # the check below reports what is still held
            async with asyncio.timeout(QUIET_S):
                while self._is_in_maintenance(engine_run):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        self._check_empty(engine_run)

    async def stop(self) -> None:
        """Stop the engine in order."""
        if (fatal := self.up.fatal) is not None:
            raise AssertionError(f"the daemon must restart: {fatal!r}")
        await self.up.stop(0.0)

    def check_ended(self) -> None:
        """Raise AssertionError if anything has failed unseen."""
        for error in self.loop.unretrieved():
            self.wrong(f"nothing awaited a task that raised {error!r}")
        if self._wrong:
            raise AssertionError("; ".join(self._wrong))

    @property
    def up(self) -> Engine:
        assert self.engine_run is not None
        return self.engine_run.engine

    def waiting(self) -> str:
        engine_run = self.engine_run
        if engine_run is None or engine_run.dead:
            return "no engine is up"
        state = engine_run.engine.state
        waiting = [line.waiting for line in state.lines.values()]
        return f"{list(state.turns.values())} {waiting} {[repr(p) for p in engine_run.loops]}"

    def _busy(self, engine_run: EngineRun) -> str:
        """Names of work that has not ended."""
        engine = engine_run.engine
        if engine.state.requests or engine.state.lines:
            waiting = [line.waiting for line in engine.state.lines.values()]
            return f"turns {list(engine.state.turns.values())}, queues {waiting}"
        if engine.state.moves:
            return "moves"
        for loop in engine_run.loops:
            if not loop.lane.alive or loop.kv.slots.arena is None:
                return f"{loop!r} {loop.kv!r}"
            if self.is_sealing(loop) or loop.kv.importing.imports:
                return f"{loop.kv!r}"
        return ""

    def is_sealing(self, loop: LaneLoop) -> bool:
        """Whether pages are on their way to the store."""
        kv = loop.kv
        return bool(kv.is_busy or kv.is_sealing or kv.sealing.in_flight or kv.sealing.queued)

    def _check_baseline(self, engine_run: EngineRun) -> None:
        for loop in engine_run.loops:
            seats = loop.seats.expected, loop.assigned, len(loop.running), len(loop.waiting)
            if seats != (0, 0, 0, 0):
                raise AssertionError(f"{loop!r}: expected, assigned, running, waiting are {seats}")
            if loop.seats.arrivals or loop._transfers.due:
                raise AssertionError(f"{loop!r}: a waiter waits for an arrival or a freeze")
            pages, arena = loop.kv, loop.kv.slots.arena
            assert arena is not None
            arena.check()
            held = sum(len(session.kv.open) for session in pages.slots.members.values())
            held += sum(seal.session is None for seal in pages.slots.seals.values())
            if arena.n_open != held:
                raise AssertionError(f"{arena!r}: {held} places are held by sessions")
        self.check_owners(engine_run)
        for session in engine_run.engine.state.sessions.values():
            if session.state is not State.IDLE:
                raise AssertionError(f"{session!r} is not idle")
            if session.kv.open and len(session.kv.codes) > pages_for(session.frontier):
                raise AssertionError(f"{session!r} has a page without rows")
        store = engine_run.seam.opened
        assert store is not None
        check_integrity(store)

    def _is_in_maintenance(self, engine_run: EngineRun) -> bool:
        """A canary, a scrub or the restart of a lane is under way; each of them ends."""
        assert engine_run.seam.opened is not None
        reads = any(p.pins or p.writers for p in engine_run.seam.opened.pages.index._pages.values())
        pages = [loop.kv for loop in engine_run.loops]
        return reads or any(one.importing.imports or one.slots.arena is None for one in pages)

    def _check_empty(self, engine_run: EngineRun) -> None:
        """No session is in memory: no slot and no pin is held."""
        store = engine_run.seam.opened
        assert store is not None
        for loop in engine_run.loops:
            pages, arena = loop.kv, loop.kv.slots.arena
            assert arena is not None
            if arena.n_free != loop.config.open_pages or pages.slots.members:
                raise AssertionError(f"{arena!r} after the last session: {pages!r}")
            if pages.arenas or pages.slots.reclaimable or pages.slots.members_pending():
                raise AssertionError(f"{pages!r}: {pages.arenas!r}")
        pinned = [p for p in store.pages.index._pages.values() if p.pins or p.writers]
        if pinned:
            raise AssertionError(f"pages are held without a holder: {pinned}")
        files = set(os.listdir(os.path.join(store.path, "arena"))) - set(store.orphaned.names)
        names = {os.path.basename(loop.kv.slots.arena.path) for loop in engine_run.loops}  # type: ignore
        if files - names - set(store.orphaned.busy):
            raise AssertionError(f"arenas of the dead remain: {files - names}")


def _client_left() -> BatchEngineError:
    return BatchEngineError("BE0000", Kind.INTERNAL, "cancelled_at_a_point", "cancelled at a point")


def simulate(seed: int, *, world: Callable[[int, str], Seed] = World) -> Outcome:
    """Run one seed to its end. A failure is in the outcome."""
    return run_seed(seed, world)


__all__ = ["Outcome", "Seed", "Session", "World", "simulate"]
