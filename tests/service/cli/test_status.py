"""`ps`, `top`, `sessions` as tables that fit, and errors as objects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import GenerationRequest
from service.cli.status import progress, status_lines
from service.cli.tables import Column, fitted
from service.session_ids import session_key
from tests.service.cli.test_sessions import Asked, with_daemon
from tests.support.fake_engine import FakeEngine

LANE = {
    "name": "fast", "tier": "fast", "state": "ready", "running": 1, "waiting": 0, "seats": 64,
    "tokens_per_s": 108.9, "prefill_per_s": 2.4, "step_ms": 0.7, "threads": 1, "cores": "0",
    "isa": "avx512-vnni", "pid": 8810, "why": "",
}  # fmt: skip
REQUEST = {
    "request_id": "req_f618d8a9aaaaaaaaaaaaaaaa", "session_id": "be_" + "a" * 32, "name": "tale",
    "tenant": "", "class": "interactive", "state": "running", "lane": "fast", "position": None,
    "eta_ms": 61_000.0, "prompt_tokens": 12_000, "computed_tokens": 3_000, "cached_tokens": 0,
    "completion_tokens": 0, "age_ms": 20_000.0, "ttft_ms": None, "tpot_ms": None,
    "predicted_ttft_ms": 81_000.0, "predicted_tpot_ms": 2.0,
}  # fmt: skip
STATUS = {
    "model": "pocket", "state": "ready", "address": "127.0.0.1:7717", "pid": 1, "version": "0",
    "lanes": [LANE, LANE], "stats": {"troubles": ["lane bulk down: it has no memory"]},
}  # fmt: skip


def test_rows_fit_80_columns_and_use_120(monkeypatch: pytest.MonkeyPatch) -> None:
    long = REQUEST | {"name": "a very long name " * 4, "tenant": "a key", "cached_tokens": 7}
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = status_lines(STATUS, [REQUEST, long])
        assert max(map(len, lines)) <= columns, lines
        text = "\n".join(lines)
        for words in ("tokens/s", "prefill/s", "108.9", "prefill 25%", "61.0 s", "lane bulk down"):
            assert words in text, words
        assert ("avx512-vnni" in text) == (columns == 120)
        assert ("81.0 s" in text) == (columns == 120)
    monkeypatch.setenv("COLUMNS", "0")
    assert "a very long name " * 3 in "\n".join(status_lines(STATUS, [long]))


def test_the_state_of_a_request_says_how_far_it_is() -> None:
    assert progress(REQUEST) == "prefill 25%"
    assert progress(REQUEST | {"ttft_ms": 5.0}) == "decode"
    assert progress(REQUEST | {"state": "queued", "position": 3}) == "queued #3"
    assert progress({"request_id": "req_1"}) == "-"


def test_columns_give_way_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = (Column("a"), Column("text", flexible=True), Column("b", 1), Column("c", 2))
    row = {"a": 1, "text": "x" * 30, "b": "bbbbb", "c": "ccccc"}
    for wide, shown in (
        (48, ["1", "x" * 30, "bbbbb", "ccccc"]),
        (30, ["1", "x" * 12 + "…", "bbbbb", "ccccc"]),
        (20, ["1", "x" * 9 + "…", "bbbbb"]),
    ):
        monkeypatch.setenv("COLUMNS", str(wide))
        assert fitted(columns, [row], "")[1].split() == shown
    monkeypatch.setenv("COLUMNS", "0")
    assert fitted(columns, [row | {"c": None}], "")[0].split() == ["a", "text", "b"]
    assert fitted(columns, [], "none") == ["none"]


def test_sessions_have_names_orders_and_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        real = engine.sessions

        def named(tenant: str | None = None) -> Any:
            rows = [dict(row) for row in real(tenant)]
            for number, row in enumerate(rows):
                row |= {"name": f"agent-{number}", "tokens": 10 * number, "used_s": 1000 + number}
            return rows

        engine.sessions = named
        _, out, _ = await ask("sessions")
        rows = out.splitlines()
        assert [row.split()[1] for row in rows[1:]] == ["agent-3", "agent-2", "agent-1", "agent-0"]
        _, out, _ = await ask("sessions", "--sort", "tokens", "--limit", "1", "--match", "agent")
        assert out.splitlines()[1].split()[1] == "agent-3"
        assert out.splitlines()[-1] == "and 3 more: --limit 0 shows all"
        _, out, _ = await ask("sessions", "--match", "agent-2", "--json")
        assert [row["name"] for row in json.loads(out)["sessions"]] == ["agent-2"]
        assert "no session fits these options" in (await ask("sessions", "--state", "parked"))[1]
        code, _, err = await ask("sessions", "--lane", "blub")
        assert (code, "BE3003" in err, "fast or bulk" in err) == (1, True, True)
        assert "no session fits" in (await ask("sessions", "--lane", "bulk"))[1]
        _, out, _ = await ask("sessions", "--key-name", "alpha")
        assert len(out.splitlines()) == 2

    with_daemon(tmp_path, capsys, scenario)


def test_errors_are_objects_where_json_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        code, out, err = await ask("sessions", "show", "nothing", "--json")
        assert (code, out) == (1, "")
        error = json.loads(err)["error"]
        assert (error["batchengine_code"], bool(error["fix"])) == ("BE2403", True)

    with_daemon(tmp_path, capsys, scenario)


def test_top_looks_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        engine.delay_s = 30.0
        request = GenerationRequest("req_1234", (1, 2), 3)
        generation = engine.submit(replace(request, session_id=session_key("", "tale")))
        code, out, _ = await ask("top", "--count", "2", "--seconds", "0.1")
        assert (code, out.count("requests 1,"), out.count("req_1234")) == (0, 2, 2)
        generation.cancel()
        await asyncio.sleep(0)

    with_daemon(tmp_path, capsys, scenario)
