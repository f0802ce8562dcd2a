"""A dispatcher over two fake lanes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchengine.config import LaneConfig, RouterConfig, load
from batchengine.core import BatchEngineError, GenerationRequest, Sla, SlaClass
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.stage_queue import StageQueue
from batchengine.engine.linked.pipelines.queue import PipelineQueue
from batchengine.engine.placement.decision_log import DecisionLog, DecisionRecord
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.migration import Migrator
from batchengine.engine.placement.move_report import MoveCause, MoveReport
from batchengine.engine.placement.plans import PeerPlans
from batchengine.engine.state import EngineState
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.policy.cost import CostModel, StepCost
from batchengine.policy.router import RouteState
from batchengine.session import Session

FAST = StepCost(2.0, 0.1, 0.2, 1e-4, 1e-6)
SLOW = StepCost(8.0, 1.4, 2.0, 5e-4, 1e-5)


@dataclass
class FakeLoop:
    """The part of a lane that the dispatcher reads."""

    name: str
    tier: str = "any"
    step_cost: StepCost = SLOW
    queue_max: int = 0
    n_seats: int = 8
    alive: bool = True
    running: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, Any] = field(default_factory=dict)
    assigned: int = 0
    context_max: int = 100_000
    meter: Any = field(default_factory=lambda: SimpleNamespace(steps=0, overhead_ms=0.0))
    draining: str = ""
    stopping: bool = False
    outage: Any = field(default_factory=lambda: SimpleNamespace(failed_starts=0))
    kv: Any = field(
        default_factory=lambda: SimpleNamespace(
            slots=SimpleNamespace(is_attached=True),
            prefix=SimpleNamespace(stored_tokens=lambda prompt, salt: 0),
        )
    )
    raised: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lane = SimpleNamespace(name=self.name, alive=self.alive)
        self.config = LaneConfig(
            name=self.name, tier=self.tier, entries_max=self.n_seats, queue_max=self.queue_max
        )
        self.cost = CostModel(self.step_cost)
        self.stages = StageQueue(self.config)
        self.seats = SimpleNamespace(
            raise_priority=lambda turn, *given: self.raised.append((turn, *given)),
            turn_of=lambda session: self.running.get(session.key) or self.waiting.get(session.key),
        )

    def __hash__(self) -> int:
        return id(self)

    @property
    def up(self) -> bool:
        return self.lane.alive


@dataclass
class DispatcherScene:
    """A dispatcher over two fake lanes, a clock that the test sets, and migrations that succeed."""

    tables: EngineState
    dispatch: Dispatcher
    fast: FakeLoop
    bulk: FakeLoop
    spawned: list[Coroutine[Any, Any, None]]
    now_ms: float = 1_000_000.0
    moves: list[tuple[str, str, str]] = field(default_factory=list)
    refusal: BatchEngineError | None = None

    async def move(self, session: Session, to: LaneLoop, cause: MoveCause) -> MoveReport:
        if self.refusal is not None:
            raise self.refusal
        source = self.tables.home[session.key].lane.name
        self.tables.home[session.key] = to
        self.moves.append((source, to.lane.name, cause))
        return MoveReport(
            session.session_id, source, to.lane.name, cause, tokens=300, rows_copied=44,
            gap_ms=4.0, total_ms=30.0,
        )  # fmt: skip

    def run_spawned(self) -> None:
        for work in self.spawned:
            asyncio.run(cast("Coroutine[Any, Any, None]", work))
        self.spawned.clear()

    def session(self, name: str, home: FakeLoop | None = None, tokens: int = 300) -> Session:
        session = Session(len(self.tables.sessions) + 1, name, "")
        session.tokens = list(range(tokens))
        session.frontier = tokens
        self.tables.sessions["", name] = session
        if home is not None:
            self.tables.home[session.key] = cast("LaneLoop", home)
        return session

    def generation(self, session: Session, sla: str = "standard", **given: Any) -> Generation:
        request = GenerationRequest(
            request_id=given.pop("request_id", f"r-{session.session_id}-{sla}"),
            prompt=tuple(given.pop("prompt", [*session.tokens, 7])),
            tokens_max=given.pop("tokens_max", 100),
            sla=Sla(SlaClass(sla)),
            session_id=session.session_id,
            **given,
        )
        nothing: Any = lambda _: None  # noqa: E731
        return Generation(
            request, session.session_id, lambda: cast("Any", None), self.now_ms, nothing, nothing
        )

    def turn(self, session: Session, sla: str = "standard", **given: Any) -> Turn:
        return Turn(
            session,
            self.generation(session, sla, **given),
            horizon_ms=0.0,
            tpot_ms=100.0,
            now_ms=self.now_ms,
        )

    def occupy(
        self,
        loop: FakeLoop,
        n: int,
        *,
        waiting: bool = False,
        tokens: int = 100,
        tenant: str = "",
    ) -> None:
        for _ in range(n):
            key = 10_000 + len(loop.running) + len(loop.waiting)
            session = Session(key, f"busy{key}", tenant)
            session.tokens, session.frontier = list(range(tokens)), 0 if waiting else tokens - 1
            (loop.waiting if waiting else loop.running)[key] = self.turn(session)
        loop.meter.steps += 1

    def record(self, request_id: str) -> DecisionRecord:
        found = self.dispatch.log.of_request(request_id)
        assert found is not None
        return found


class NoPeers:
    """Plans of a daemon without peers."""

    def with_peers(self, state: RouteState, *_: object, **__: object) -> RouteState:
        return state

    def held(self, *_: object) -> tuple[tuple[()], float]:
        return (), 0.0

    def peer_names(self) -> list[str]:
        return []

    def expect(self, *_: object) -> bool:
        return False

    def gather(self, session: Session) -> None:
        return None


def dispatcher_scene(monkeypatch: pytest.MonkeyPatch, **router: Any) -> DispatcherScene:
    config = dataclasses.replace(
        load(None, {"server.admin_socket": "/tmp/unused.sock"}), router=RouterConfig(**router)
    )
    tables = EngineState(config)
    spawned: list[Coroutine[Any, Any, None]] = []
    fast, bulk = FakeLoop("gpu", "fast", FAST), FakeLoop("cpu", "bulk")
    tables.lanes[:] = cast("list[LaneLoop]", [fast, bulk])
    migrator = SimpleNamespace()
    dispatch = Dispatcher(
        tables,
        cast("Migrator", migrator),
        cast("PeerPlans", NoPeers()),
        DecisionLog(),
        PipelineQueue(),
        lambda work, _: spawned.append(work),
    )
    built = DispatcherScene(tables, dispatch, fast, bulk, spawned)
    monkeypatch.setattr(tables, "now_ms", lambda: built.now_ms)
    migrator.move = built.move
    return built


def samples(tables: EngineState, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in tables.metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"batchengine_{name}"
    }


# ---- decisions ----
