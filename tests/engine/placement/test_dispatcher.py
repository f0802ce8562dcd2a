"""The dispatcher on plain data: admission, decisions and their log, automatic migrations."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchengine import errors
from batchengine.config import ApiKey, ClassConfig, LaneConfig, RouterConfig, load
from batchengine.core import BatchEngineError, GenerationRequest, Kind, Sla, SlaClass
from batchengine.engine import report
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.decision_log import DecisionLog, DecisionRecord
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.migration import Migrator
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.state import EngineState
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.policy.cost import CostModel, StepCost, StepWork
from batchengine.policy.router import Reason
from batchengine.session import Session, State

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
        self.seats = SimpleNamespace(
            raise_priority=lambda turn, *given: self.raised.append((turn, *given))
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


def dispatcher_scene(monkeypatch: pytest.MonkeyPatch, **router: Any) -> DispatcherScene:
    config = dataclasses.replace(
        load(None, {"server.admin_socket": "/tmp/unused.sock"}), router=RouterConfig(**router)
    )
    tables = EngineState(config)
    spawned: list[Coroutine[Any, Any, None]] = []
    fast, bulk = FakeLoop("gpu", "fast", FAST), FakeLoop("cpu", "bulk")
    tables.lanes[:] = cast("list[LaneLoop]", [fast, bulk])
    migrator = SimpleNamespace()
    dispatch = Dispatcher(tables, cast("Migrator", migrator), lambda work, _: spawned.append(work))
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


def test_a_decision_is_logged_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    fresh = h.session("s1")
    assert h.dispatch.choose(fresh, h.generation(fresh, request_id="req-1")) is h.bulk
    record = h.record("req-1")
    assert (record.lane, record.decision.reason) == ("cpu", Reason.SHORT)
    assert samples(h.tables, "route_decisions_total") == {("cpu", "short"): 1}
    assert samples(h.tables, "ttft_predicted_seconds_count") == {("standard", "cpu"): 1}
    shown = h.dispatch.explain("req-1")
    assert (shown["kind"], shown["lane"], shown["reason_id"]) == ("request", "cpu", "short")
    assert shown["predicted"]["ttft_ms"] > 0
    assert {c["lane"] for c in shown["candidates"]} == {"gpu", "cpu"}
    assert shown["happened"] is None
    assert shown["request"]["ttlt_ms"] is None  # JSON has no infinity
    json.dumps(shown, allow_nan=False)


def test_pages_of_the_store_are_not_predicted_to_be_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork of a long session is a short request, whose first token comes soon."""
    ttft_ms: list[float] = []
    for stored, reason in ((0, Reason.LONG), (2816, Reason.SHORT)):
        h = dispatcher_scene(monkeypatch)
        for loop in h.tables.lanes:
            monkeypatch.setattr(
                loop.kv.prefix, "stored_tokens", lambda prompt, salt, stored=stored: stored
            )
        fresh = h.session("s1", tokens=3000)
        h.dispatch.choose(fresh, h.generation(fresh, request_id="req-1"))
        record = h.record("req-1")
        assert record.decision.reason is reason
        times = {one.lane: one.ttft_ms for one in record.decision.candidates}
        ttft_ms.append(times["cpu"])
    assert ttft_ms[1] < ttft_ms[0] / 5


def test_the_outcome_is_compared_with_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s1")
    turn = h.turn(session, request_id="req-1", tokens_max=10)
    loop = h.dispatch.choose(session, turn.generation)
    generation = turn.generation
    generation.lane = loop.lane.name
    generation.completion_tokens, generation.resumed_tokens = 25, 20
    generation.first_token_ms = h.now_ms + 600.0
    generation.last_token_ms = h.now_ms + 700.0
    h.dispatch.ended(turn, "stop")
    happened = h.dispatch.explain("req-1")["happened"]
    assert (happened["ttft_ms"], happened["tpot_ms"], happened["finish"]) == (600.0, 25.0, "stop")
    predicted = h.record("req-1").decision.predicted
    assert predicted is not None
    assert happened["ttft_ratio"] == pytest.approx(600.0 / predicted.ttft_ms, rel=1e-3)
    assert samples(h.tables, "prediction_ratio_count") == {("ttft", "cpu"): 1, ("tpot", "cpu"): 1}


def test_the_seat_of_a_paused_turn_counts_as_free_once(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s1")
    asked = h.generation(session).request
    h.occupy(h.bulk, h.bulk.n_seats)
    alone_ms = h.dispatch.wait_ms(asked, cast("LaneLoop", h.bulk))
    assert alone_ms > 0.0  # every seat computes
    h.occupy(h.bulk, 1)
    next(reversed(h.bulk.running.values())).paused = True
    h.bulk.meter.steps += 1
    assert h.dispatch.wait_ms(asked, cast("LaneLoop", h.bulk)) == pytest.approx(alone_ms)
    next(iter(h.bulk.running.values())).paused = True
    h.bulk.meter.steps += 1
    assert h.dispatch.wait_ms(asked, cast("LaneLoop", h.bulk)) == 0.0


def test_the_target_per_token_is_the_requests_or_that_of_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    asked, loop = h.generation(h.session("s1")).request, cast("LaneLoop", h.bulk)
    assert h.dispatch.pace(loop, asked) == (2_000.0, 100.0)
    tight = dataclasses.replace(asked, sla=Sla(ttft_ms=300.0, tpot_ms=7.0))
    assert h.dispatch.pace(loop, tight) == (300.0, 7.0)


def test_the_usual_answer_length_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    for index in range(200):
        session = h.session(f"s{index}")
        turn = h.turn(session, tokens_max=1000)
        h.dispatch.choose(session, turn.generation)
        turn.generation.completion_tokens = 100
        h.dispatch.ended(turn, "stop")
    session = h.session("last")
    h.dispatch.choose(session, h.generation(session, tokens_max=1000, request_id="req-l"))
    assert 90 < h.record("req-l").request.tokens_out < 150
    hinted = h.generation(session, tokens_max=1000, request_id="r2", expected_output_tokens=40)
    h.dispatch.choose(session, hinted)
    assert h.record("r2").request.tokens_out == 40


def test_a_long_queue_is_estimated_between_two_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue is not read row by row for every request, which would be quadratic."""
    h = dispatcher_scene(monkeypatch)
    h.occupy(h.bulk, 400, waiting=True)
    looks = 0
    look = h.dispatch._lanes._count

    def counted(loop: LaneLoop, *given: Any) -> Any:
        nonlocal looks
        looks += loop.lane.name == "cpu"
        return look(loop, *given)

    monkeypatch.setattr(h.dispatch._lanes, "_count", counted)
    waits: list[float] = []
    for index in range(100):
        session = h.session(f"b{index}", tokens=50)
        generation = h.generation(session, "batch", request_id=f"b{index}")
        assert h.dispatch.choose(session, generation) is h.bulk
        h.bulk.meter.steps += 1
        waits.append(h.dispatch.wait_ms(generation.request, cast("LaneLoop", h.bulk)))
    assert looks == 1
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]
    h.now_ms += 50.0
    h.dispatch.state()
    assert looks == 2


def test_a_long_queue_of_one_tenant_is_not_read_for_every_request_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    keys = (ApiKey("a"), ApiKey("b"))
    h.tables.config = dataclasses.replace(h.tables.config, auth=keys)
    h.occupy(h.bulk, 8, tenant="a")
    h.occupy(h.bulk, 400, waiting=True, tenant="a")
    looks = 0
    rows = h.dispatch._lanes._rows

    def counted(loop: LaneLoop) -> Any:
        nonlocal looks
        looks += loop.lane.name == "cpu"
        return rows(loop)

    monkeypatch.setattr(h.dispatch._lanes, "_rows", counted)
    cpu, waits = cast("LaneLoop", h.bulk), list[float]()
    for index in range(100):
        asked = h.generation(h.session(f"b{index}"), tenant="b").request
        waits.append(h.dispatch.wait_ms(asked, cpu))
        h.dispatch._lanes.joined(cpu, "b", 1, 0, 300)
    assert looks == 1
    assert waits == sorted(waits)
    flooded = h.generation(h.session("a1"), tenant="a").request
    assert 0.0 <= waits[0] < waits[-1] < h.dispatch.wait_ms(flooded, cpu)


def test_requests_wait_when_no_lane_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait on the session's lane, or on the lane with the least assigned work."""
    h = dispatcher_scene(monkeypatch)
    h.fast.lane.alive = h.bulk.lane.alive = False
    h.fast.assigned = 3
    fresh, at_home = h.session("a"), h.session("b", h.fast)
    h.dispatch.admit(h.generation(fresh).request)
    assert h.dispatch.choose(fresh, h.generation(fresh)) is h.bulk
    assert h.dispatch.choose(at_home, h.generation(at_home)) is h.fast
    assert h.record("r-a-standard").decision.reason is Reason.NO_LANE


# ---- admission ----


def test_a_request_beyond_its_patience_is_shed_with_a_retry_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    impatient = dataclasses.replace(
        h.tables.config.sla, standard=ClassConfig(2000.0, 100.0, patience_s=1.0)
    )
    h.tables.config = dataclasses.replace(h.tables.config, sla=impatient)
    session = h.session("s")
    for loop in (h.fast, h.bulk):
        h.occupy(loop, 8, tokens=200)
        h.occupy(loop, 30, waiting=True, tokens=4000)
    with pytest.raises(BatchEngineError) as caught:
        h.dispatch.admit(h.generation(session).request)
    error = caught.value
    assert (error.code, error.kind) == ("BE1208", Kind.UNAVAILABLE)
    assert error.retry_ms is not None
    wait_ms = h.dispatch.wait_ms(h.generation(session).request)
    assert error.retry_ms == pytest.approx(min(60_000, wait_ms - 1000.0), abs=1)
    assert samples(h.tables, "shed_total") == {("standard", "patience"): 1}
    batch = h.generation(session, "batch").request
    h.dispatch.admit(batch)  # batch waits without limit
    h.dispatch.admit(dataclasses.replace(batch, patience_ms=1e9))
    with pytest.raises(BatchEngineError, match="stream") as caught:
        h.dispatch.admit(dataclasses.replace(batch, patience_ms=1.0))
    assert (caught.value.code, caught.value.kind) == ("BE1225", Kind.UNAVAILABLE)
    h.dispatch.admit(h.generation(session, "interactive").request)  # and this one overtakes
    h.fast.waiting.clear()
    h.fast.running.clear()
    h.fast.meter.steps += 1
    h.dispatch.admit(h.generation(session).request)


def test_requests_avoid_full_queues_and_are_shed_when_all_are_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    h.bulk.config = dataclasses.replace(h.bulk.config, queue_max=2)
    h.occupy(h.bulk, 2, waiting=True)
    session = h.session("s")
    h.dispatch.admit(h.generation(session).request)
    assert h.dispatch.choose(session, h.generation(session)) is h.fast
    assert h.record("r-s-standard").decision.candidates[1].excluded == "its queue is full"
    h.fast.config = dataclasses.replace(h.fast.config, queue_max=1)
    h.occupy(h.fast, 1, waiting=True)
    with pytest.raises(BatchEngineError) as caught:
        h.dispatch.admit(h.generation(session).request)
    assert (caught.value.code, caught.value.kind) == ("BE1204", Kind.UNAVAILABLE)
    assert samples(h.tables, "shed_total") == {("standard", "queue_full"): 1}


# ---- promotion and demotion ----


def test_an_interactive_request_starts_a_promotion(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.bulk)
    to = h.dispatch.choose(session, h.generation(session, "interactive", request_id="r1"))
    assert to is h.fast
    moved = asyncio.run(h.dispatch.move(session, to, MoveCause.PROMOTION))
    assert moved.outcome is MoveOutcome.MOVED
    assert h.moves == [("cpu", "gpu", "promotion")]
    assert samples(h.tables, "promotions_total") == {("cpu", "gpu", "moved"): 1}
    assert samples(h.tables, "promotion_gap_seconds_count") == {(): 1}
    (shown,) = h.dispatch.explain("r1")["moves"]
    assert (shown["from"], shown["to"], shown["gap_ms"], shown["rows_copied"]) == (
        "cpu",
        "gpu",
        4,
        44,
    )


def test_the_reason_why_a_session_stays_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch, promote_auto=False)
    session = h.session("s", h.bulk)
    assert h.dispatch.choose(session, h.generation(session, "interactive")) is h.bulk
    (note,) = h.dispatch.explain("s")["decisions"][0]["notes"]
    assert note == "it stays on cpu: router.promote_auto is off"


def test_a_failed_migration_is_counted_and_the_session_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    h.refusal = errors.STEP_MISMATCH()
    session = h.session("s", h.bulk)
    to = h.dispatch.choose(session, h.generation(session, "interactive"))
    moved = asyncio.run(h.dispatch.move(session, to, MoveCause.PROMOTION))
    assert moved.outcome is MoveOutcome.FAILED
    assert samples(h.tables, "promotions_total") == {("cpu", "gpu", "failed"): 1}
    assert not h.dispatch.explain("s")["moving"]


def test_a_reason_to_stay_is_logged_once_until_it_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    h = dispatcher_scene(monkeypatch)
    session, other = h.session("s", h.bulk), h.session("other", h.bulk)
    caplog.set_level("INFO")

    def learn(of: Session, why: str) -> None:
        outcome = MoveOutcome.STAYED if why else MoveOutcome.MOVED
        h.dispatch.learn(
            of, MoveReport(of.session_id, "cpu", "gpu", MoveCause.FASTER, outcome=outcome, why=why)
        )

    for why in ("lane gpu is down", "lane gpu is down", "no room", "no room", "", "no room"):
        learn(session, why)
    learn(other, "no room")
    logged = [line.rpartition(": ")[2] for line in caplog.messages if "stays on cpu" in line]
    assert logged == ["lane gpu is down", "no room", "no room", "no room"]


def test_a_running_turn_takes_the_priority_of_a_request_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A background turn that an interactive request waits for is promoted while it runs."""
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.bulk)
    turn = h.turn(session, "background")
    h.bulk.running[session.key] = turn
    h.dispatch.waits_behind(session, h.generation(session, "background", request_id="r2"))
    assert (h.bulk.raised, h.spawned) == ([], [])
    h.dispatch.waits_behind(session, h.generation(session, "interactive"))
    assert h.bulk.raised == [(turn, 0, 500.0, 50.0)]
    h.run_spawned()
    assert h.moves == [("cpu", "gpu", "promotion")]


def test_turns_go_to_a_fast_lane_that_comes_up_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One until a step of that lane was measured, urgent ones first; those that need it only."""
    h = dispatcher_scene(monkeypatch)
    h.fast.lane.alive = False
    turns: list[Turn] = []
    for index, sla in enumerate(["standard", *["interactive"] * 6, "background"]):
        session = h.session(f"s{index}", h.bulk)
        turn = h.turn(session, sla, prompt=session.tokens)
        turn.tpot_ms = 30.0 if sla == "standard" else turn.tpot_ms
        turn.generation.first_token_ms = h.now_ms
        assert h.dispatch.choose(session, turn.generation) is h.bulk
        h.bulk.running[session.key] = turn
        turns.append(turn)
    h.dispatch.tick()
    assert h.spawned == []
    h.fast.lane.alive = True
    h.now_ms += 10_000.0

    def tick() -> list[str]:
        """Names of the sessions that move."""
        h.dispatch.tick()
        h.run_spawned()
        gone = [t for t in turns if h.tables.home[t.session.key] is h.fast]
        for turn in gone:
            turns.remove(turn)
            h.fast.running[turn.session.key] = h.bulk.running.pop(turn.session.key)
        h.fast.meter.steps += 1
        h.bulk.meter.steps += 1
        h.now_ms += 1_000.0
        return [turn.session.session_id for turn in gone]

    assert len(tick()) == 1
    h.fast.cost.observe(StepWork(0, 1, 300, 0.0), 2.3)
    assert len(tick()) == 4
    assert tick() == ["s0", "s6"]  # the standard turn, which the CPU was too slow for, is last
    assert tick() == []  # the background one keeps its promise
    assert [cause for *_, cause in h.moves] == [MoveCause.FASTER] * 7
    (note,) = h.dispatch.explain("s1")["decisions"][0]["notes"]
    assert note.startswith("to gpu (latency-sensitive: fast lane): it is predicted to end in ")


def test_a_standard_turn_makes_room_for_one_that_waits_for_the_fast_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.fast)
    turn = h.turn(session, prompt=session.tokens)
    session.frontier -= 1
    h.fast.running[session.key] = turn
    h.fast.meter.steps += 1
    h.dispatch.tick()
    assert h.spawned == []
    h.occupy(h.fast, 1, waiting=True)
    h.dispatch.tick()
    h.run_spawned()
    assert h.moves == [("gpu", "cpu", MoveCause.RELIEF)]


def test_a_promotion_that_failed_is_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.bulk)
    turn = h.turn(session, "interactive", prompt=session.tokens)
    turn.generation.first_token_ms = h.now_ms
    h.bulk.running[session.key] = turn
    h.refusal = errors.STEP_MISMATCH()
    for after_ms, n in ((0.0, 1), (1_000.0, 0), (5_000.0, 1)):
        h.now_ms += after_ms
        h.dispatch.tick()
        assert len(h.spawned) == n
        h.run_spawned()
    h.now_ms += 5_000.0
    turn.paused = True
    h.dispatch.tick()
    turn.paused, turn.shared_with = False, "beta"
    h.dispatch.tick()
    assert h.spawned == []


def test_idle_sessions_are_demoted_from_the_fast_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch, demote_idle_s=60.0)
    for index in range(6):
        h.session(f"idle{index}", h.fast)
    busy, slow = h.session("busy", h.fast), h.session("slow", h.bulk)
    busy.state = State.RUNNING
    h.dispatch.tick()
    for session in h.tables.sessions.values():
        h.dispatch._times.of(session)  # used now
    h.now_ms += 59_000.0
    h.dispatch.tick()
    assert h.spawned == []
    h.now_ms += 2_000.0
    h.dispatch.tick()
    assert len(h.spawned) == 4  # not all at once
    h.run_spawned()
    h.dispatch.tick()
    h.run_spawned()
    assert [move[:2] for move in h.moves] == [("gpu", "cpu")] * 6
    assert h.tables.home[busy.key] is h.fast
    assert h.tables.home[slow.key] is h.bulk
    h.dispatch.tick()
    assert h.spawned == []


def test_sessions_do_not_alternate_between_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session used in turn by a user and a timer for ten minutes migrates a few times only."""
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.bulk)
    for turn in range(120):
        h.now_ms += 5_000.0
        h.fast.running.clear()
        h.occupy(h.fast, turn % 8)
        sla = "interactive" if turn % 6 == 0 else "background"
        generation = h.generation(session, sla, request_id=f"r{turn}")
        to = h.dispatch.choose(session, generation)
        if to is not h.tables.home[session.key]:
            asyncio.run(h.dispatch.move(session, to, MoveCause.ROUTER))
        h.dispatch.tick()
        h.run_spawned()
    assert [move[:2] for move in h.moves] == [("cpu", "gpu")]
    shown = h.dispatch.explain("r1")
    assert shown["reason_id"] in ("dwell", "ceiling")
    assert any("left a background model" in note for note in shown["notes"])


def test_explicit_migrations_have_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    slow, quick = h.session("slow", h.bulk), h.session("quick", h.fast)
    assert h.dispatch.lane_for(slow, "fast") is h.fast
    assert h.dispatch.lane_for(quick, "bulk") is h.bulk
    assert h.dispatch.lane_for(quick, "fast") is None
    h.bulk.lane.alive = False
    assert h.dispatch.lane_for(quick, "bulk") is None


# ---- the log ----


def test_the_decision_log_is_a_ring() -> None:
    log = DecisionLog(3)
    records = [cast("Any", DecisionRecord)(f"req-{i}", "s", "", *[None] * 7) for i in range(5)]
    for record in records:
        log.add(record)
    assert list(log) == records[:1:-1]
    assert log.of_request("req-1") is None
    assert log.of_request("req-4") is records[4]
    again = cast("Any", DecisionRecord)("req-4", "s", "", *[None] * 7)
    log.add(again)  # an id may occur twice: clients choose them
    for _ in range(2):
        log.add(cast("Any", DecisionRecord)("other", "s", "", *[None] * 7))
    assert log.of_request("req-4") is again
    assert len(log) == 3


def test_requests_are_found_by_a_unique_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    one, other = h.session("conversation-1"), h.session("conversation-22")
    for session, request_id in ((one, "abcd-1"), (other, "abcd2-1"), (one, "other-1")):
        h.dispatch.choose(session, h.generation(session, request_id=request_id))
    assert h.dispatch.explain("conversation-22")["kind"] == "session"
    assert h.dispatch.explain("abcd-1")["request_id"] == "abcd-1"
    assert h.dispatch.explain("abcd-")["request_id"] == "abcd-1"
    for given, code in (
        ("abc-", "not_found"),
        ("abc", "not_found"),
        ("conversation-2", "not_found"),
    ):
        with pytest.raises(BatchEngineError) as caught:
            h.dispatch.explain(given)
        assert caught.value.name == code, given
    unknown = h.session("quiet-one", h.bulk)  # in memory, but without a recent decision
    shown = h.dispatch.explain(unknown.session_id)
    assert (shown["lane"], shown["decisions"], shown["moved_ago_s"]) == ("cpu", [], None)


def test_requests_of_other_tenants_are_no_matches() -> None:
    """Ids of idempotency keys may be equal for two tenants."""
    log = DecisionLog(4)
    for request_id, session, tenant in (
        ("req-1", "idem_1", "alpha"),
        ("req-1", "idem_1", "beta"),
        ("req-2", "be_req-2", "beta"),
    ):
        log.add(cast("Any", DecisionRecord)(request_id, session, tenant, *[None] * 7))
    alpha, beta = (("session", tenant, "idem_1") for tenant in ("alpha", "beta"))
    assert log.find("idem_1") == [alpha, beta]
    assert log.find("idem_1", (), "alpha") == [alpha]
    assert log.find("idem_1", [("gamma", "idem_1")], "gamma") == [("session", "gamma", "idem_1")]
    assert log.find("req-1", (), "alpha") == [("request", "req-1")]
    found = log.of_request("req-1", "alpha")
    assert found is not None
    assert found.tenant == "alpha"
    assert log.find("req-2", (), "alpha") == []
    assert log.find("idem") == []  # the service searches sessions
    assert log.find("be_r", (), "beta") == []  # three characters of a request are too few
    assert log.find("be_req-2", (), "beta") == [("session", "beta", "be_req-2")]
    assert log.find("be_req-", (), "beta") == [("request", "req-1"), ("request", "req-2")]
    for _ in range(3):
        log.add(cast("Any", DecisionRecord)("other", "s", "", *[None] * 7))
    assert log.find("idem_1") == []  # the ring has overwritten both


def test_only_rows_of_the_tenant_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    for index, tenant in enumerate(("alpha", "beta", "beta")):
        session = Session(index + 1, f"s{index}", tenant)
        h.tables.sessions[tenant, session.session_id] = session
    built: list[Session] = []

    def count(_: EngineState, session: Session) -> dict[str, Any]:
        built.append(session)
        return {}

    monkeypatch.setattr(report, "parked_facts", count)
    assert [row["tenant"] for row in report.session_rows(h.tables, "alpha")] == ["alpha"]
    assert [session.tenant for session in built] == ["alpha"]
    assert len(report.session_rows(h.tables)) == 3


def test_times_of_dropped_sessions_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    h = dispatcher_scene(monkeypatch)
    session = h.session("s", h.bulk)
    h.dispatch.choose(session, h.generation(session))
    assert h.dispatch._times._times
    h.tables.sessions.clear()
    h.dispatch.tick()
    assert h.dispatch._times._times == {}


# ---- load, recompute or share ----


@pytest.mark.parametrize(
    ("rate", "choice"), [(50e6, "recompute"), (5e9, "load"), (0.0, "load"), (math.inf, "load")]
)
def test_restore_follows_the_measured_rate(
    rate: float, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8K tokens at 28 KiB each: 4.6 s from a disk of 50 MB/s, 1.1 s of compute on the GPU."""
    h = dispatcher_scene(monkeypatch)
    monkeypatch.setattr(h.dispatch.restores, "_read_rate", lambda: rate)
    session = h.session("s", h.fast, tokens=8300)
    turn = h.turn(session, request_id="r1")
    h.dispatch.choose(session, turn.generation)
    plan = h.dispatch.restores.plan(turn, cast("LaneLoop", h.fast), 8192, 8192, 8192 * 28 << 10)
    assert plan.choice == choice
    h.dispatch.restores.done(turn, 2 * plan.load_ms if plan.choice == "load" else 900.0)
    shown = h.dispatch.explain("r1")["restore"]
    assert shown["choice"] == choice
    assert shown["recompute_ms"] == pytest.approx(853, rel=0.05)
    assert samples(h.tables, "restores_total") == {(choice,): 1}
    audited = samples(h.tables, "restore_ratio_sum").get((), 0.0)
    assert audited == pytest.approx(2.0 if rate == 5e9 else 0.0)
