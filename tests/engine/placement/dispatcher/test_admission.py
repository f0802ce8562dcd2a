"""Admission: queues, waits, and what they are predicted to be."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from batchengine.config import ApiKey, ClassConfig
from batchengine.core import BatchEngineError, Kind, Sla
from batchengine.engine.lane.loop import LaneLoop
from batchengine.policy.router import Reason
from tests.engine.placement.dispatcher.scene import (
    dispatcher_scene,
    samples,
)


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
    raised = "queue_max of [[lane]] gpu or queue_max of [[lane]] cpu"
    assert caught.value.fix == f"send it again later, or raise {raised}"
    assert samples(h.tables, "shed_total") == {("standard", "queue_full"): 1}


# ---- promotion and demotion ----
