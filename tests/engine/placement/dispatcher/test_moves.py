"""Moves that the dispatcher orders, and those that it does not."""

from __future__ import annotations

import asyncio

import pytest

from batchengine import errors
from batchengine.engine.placement.move_report import MoveCause, MoveOutcome, MoveReport
from batchengine.engine.turns.turn import Turn
from batchengine.policy.cost import StepWork
from batchengine.session import Session, State
from tests.engine.placement.dispatcher.scene import (
    dispatcher_scene,
    samples,
)


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
    h.refusal = errors.STEP_MISMATCH(what="digests")
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
    h.refusal = errors.STEP_MISMATCH(what="digests")
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
