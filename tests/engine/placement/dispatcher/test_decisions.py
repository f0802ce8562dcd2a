"""Decisions: what they are made of, their log, and who may read it."""

from __future__ import annotations

import json
import math
from typing import Any, cast

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine import report
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.decision_log import DecisionLog, DecisionRecord
from batchengine.engine.state import EngineState
from batchengine.policy.router import Reason
from batchengine.session import Session
from tests.engine.placement.dispatcher.scene import (
    dispatcher_scene,
    samples,
)


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


def test_log_probabilities_of_a_prompt_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the request's own time, and in the wait of the next one."""
    found: list[tuple[float, float]] = []
    for prompt_logprobs in (-1, 0):
        h = dispatcher_scene(monkeypatch)
        fresh = h.session("s1", tokens=100)
        generation = h.generation(fresh, request_id="r", prompt_logprobs=prompt_logprobs)
        assert h.dispatch.choose(fresh, generation) is h.bulk
        times = {one.lane: one.ttft_ms for one in h.record("r").decision.candidates}
        found.append((times["cpu"], h.dispatch.wait_ms(generation.request, h.bulk)))
    (plain, behind_plain), (scored, behind_scored) = found
    assert scored > 1.5 * plain
    assert behind_scored > 1.5 * behind_plain


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
