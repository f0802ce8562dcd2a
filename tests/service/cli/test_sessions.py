"""The commands about sessions and the store: output, lookup, refusals and exit codes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from batchengine.config import ApiKey
from batchengine.core import BatchEngineError, GenerationRequest
from batchengine.engine.turns.journal import PARKED
from batchengine.session import State
from service import operations
from service.admin.socket import AdminSocket
from service.cli import main, render
from service.cli.sessions import SessionState
from service.session_ids import session_key
from tests.support.fake_engine import FakeEngine, fake_config, serving

TALE = session_key("", "tale")
SESSION_COMMANDS = ("show", "why", "park", "fork", "rm")
OTHER = "be_" + "a" * 32
TWIN = "be_" + "a" * 31 + "b"


class Asked:
    """Commands against one daemon: exit code, stdout, stderr."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.capsys = path, capsys

    async def __call__(self, *arguments: str) -> tuple[int, str, str]:
        given = [*arguments, "--admin-socket", str(self.path)]
        code = await asyncio.to_thread(main.run, given)
        out, err = self.capsys.readouterr()
        assert "Traceback" not in err
        assert err.count("\n") <= 1
        return code, out, err


def with_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: Any) -> FakeEngine:
    """Runs `scenario(ask, engine)` against an admin socket around a fake engine."""
    engine = FakeEngine()
    engine.lane_names = ["fast", "bulk"]
    for tenant, name in (("", TALE), ("", OTHER), ("", TWIN), ("alpha", "be_" + "c" * 32)):
        request = GenerationRequest("req_" + name[-4:], (1, 2, 3), 4, tenant=tenant)
        engine.known[tenant, name] = replace(request, session_id=name)

    async def work() -> None:
        keys = (ApiKey("alpha", "alpha-key-123"),)
        async with serving(engine, replace(fake_config(), auth=keys)) as served:
            control = AdminSocket(tmp_path / "a.sock", served.service, lambda: None)
            await control.open()
            try:
                await scenario(Asked(tmp_path / "a.sock", capsys), engine)
            finally:
                await control.close()

    asyncio.run(work())
    return engine


def test_sessions_are_found_by_id_name_or_part_of_the_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        for name in (TALE, "tale", TALE[:12], TALE[3:12]):
            code, out, _ = await ask("promote", name, "--to", "fast")
            assert code == 0, name
            assert out.startswith(
                TALE + "  bulk -> fast: 300 tokens, 1 pages by reference, 44 rows"
            )
            assert "1.5 ms between two tokens" in out
        assert engine.calls == [("promote", "", TALE, "fast")] * 4
        code, _, err = await ask("promote", OTHER[:20])
        assert code == 1
        assert "BE3002" in err
        assert OTHER in err
        assert TWIN in err
        assert (await ask("demote", OTHER))[0] == 0  # a complete id is never ambiguous
        code, _, err = await ask("promote", "nothing")
        assert (code, "BE2403" in err, "sessions --all" in err) == (1, True, True)
        assert (await ask("promote", "be_cccc"))[0] == 0
        assert engine.calls[-1][1] == "alpha"
        assert (await ask("promote", "be_cccc", "--key-name", "beta"))[0] == 1
        assert (await ask("promote", "tal"))[0] == 1  # no prefix of an id
        code, _, err = await ask("promote", "tale", "--to", "gpu9")
        assert (code, "fast or bulk" in err) == (1, True)
        engine.asleep = [("", TALE)]  # no longer in memory: found in the ledger
        for name in ("tale", TALE[:12]):
            assert (await ask("sessions", "why", name))[0] == 0
            code, _, err = await ask("promote", name)
            assert (code, "BE1732" in err) == (1, True)

    with_daemon(tmp_path, capsys, scenario)


def test_a_session_dropped_since_it_was_found_is_reported_as_the_operator_named_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = operations.find

    async def found_and_dropped(engine: Any, *arguments: Any) -> Any:
        found = await real(engine, *arguments)
        await engine.drop(*found)
        return found

    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        request = engine.known["", TALE]
        for command in (*(("sessions", name) for name in SESSION_COMMANDS), ("explain",)):
            engine.known["", TALE] = request
            code, _, err = await ask(*command, "tale")
            assert (code, "BE2403" in err, "no session tale" in err) == (1, True, True), err
            assert "another key" not in err

    monkeypatch.setattr(operations, "find", found_and_dropped)
    with_daemon(tmp_path, capsys, scenario)


def test_sessions_are_listed_shown_parked_forked_and_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "0")  # no terminal: nothing is cut

    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        _, out, _ = await ask("sessions")
        head, *rows = out.splitlines()
        assert head.split() == ["session", "key", "state", "class", "lane", "tokens", "reused"]
        assert rows[0].split() == [TALE, "-", "idle", "standard", "cpu", "3", "1/3"]
        assert len(rows) == 4
        engine.asleep = [("", OTHER)]
        assert OTHER not in (await ask("sessions"))[1]
        assert f"{OTHER}  -      on disk" in (await ask("sessions", "--all"))[1]
        _, out, _ = await ask("sessions", "--all", "--json")
        assert len(json.loads(out)["sessions"]) == 4
        _, out, _ = await ask("sessions", "show", "tale")
        assert "state              idle" in out
        assert "parked" not in out
        engine.parked[OTHER] = (time.time() - 150, "call_7")
        _, out, _ = await ask("sessions", "--all")
        assert out.splitlines()[0].split()[-1] == "parked"
        (row,) = [line for line in out.splitlines() if line.startswith(OTHER)]
        assert "  parked  " in row
        assert row.endswith("2 min, for call_7")
        _, out, _ = await ask("sessions", "show", OTHER)
        assert "parked             2 min, for call_7" in out
        _, out, _ = await ask("sessions", "why", "tale")
        assert out.startswith("cache broke at token 5,812, text: '11:00'\n")
        assert "it was      'Current time: 10:00'" in out
        code, out, _ = await ask("sessions", "park", "tale", "--tool-call", "c9")
        assert (code, engine.calls[-1]) == (0, ("park", "", TALE, "c9"))
        code, out, _ = await ask("sessions", "fork", "tale", "--as", "twin tale")
        assert code == 0
        assert session_key("", "twin tale") in out
        assert "1 pages shared" in out
        code, _, err = await ask("sessions", "fork", "tale", "--as", "twin tale")
        assert (code, "there is a session twin tale already" in err) == (1, True)
        code, out, _ = await ask("sessions", "rm", "tale", OTHER)
        assert (code, out.count("dropped")) == (0, 2)
        assert (await ask("sessions", "rm", "tale"))[0] == 1

    with_daemon(tmp_path, capsys, scenario)


def test_dropped_sessions_are_printed_when_the_next_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        code, out, err = await ask("sessions", "rm", "tale", "nothing", OTHER, "--json")
        assert (code, "BE2403" in err) == (1, True)
        assert [row["session_id"] for row in json.loads(out)["dropped"]] == [TALE]
        assert ("", OTHER) in engine.known  # nothing after the first refusal
        assert (await ask("sessions", "rm", "nothing", "--json"))[1] == ""

    with_daemon(tmp_path, capsys, scenario)


def test_explain_prints_the_decision_of_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        request = GenerationRequest("req_1234", (1, 2), 3, session_id=TALE)
        generation = engine.submit(request)
        for name in ("tale", "req_1234"):
            code, out, _ = await ask("explain", name)
            assert code == 0
            for words in (
                "decision  lane cpu: only this lane can take it", "9 prompt tokens",
                "* cpu        TTFT 6.0 ms, TPOT 2.0 ms, SLA ratio 0.10 (1 of 64 seats, 0 waiting)",
                "predicted TTFT 6.0 ms", "happened  it is not over yet",
            ):  # fmt: skip
                assert words in out, out
        _, out, _ = await ask("explain", "tale", "--json")
        assert json.loads(out)["decisions"][0]["request_id"] == generation.request_id
        code, out, _ = await ask("explain", OTHER)
        assert (code, "none is remembered" in out) == (0, True)
        assert (await ask("explain", "req_9"))[0] == 1

    with_daemon(tmp_path, capsys, scenario)


def test_store_commands_print_their_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        code, out, _ = await ask("store", "stat")
        assert code == 0
        assert "used_bytes                 1.0 MiB" in out
        code, out, _ = await ask("store", "verify")
        assert (code, "1 damaged" in out) == (1, True)
        code, out, _ = await ask("store", "gc", "--json")
        assert (code, json.loads(out)["pages_evicted"]) == (0, 2)
        assert engine.calls == [("store", "stat"), ("store", "verify"), ("store", "gc")]

    with_daemon(tmp_path, capsys, scenario)


def test_commands_are_checked_field_by_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from service.admin.client import admin

    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        bad: list[tuple[str, dict[str, object], str]] = [
            ("promote", {}, "session"),
            ("promote", {"session": 7}, "int"),
            ("promote", {"session": ""}, "empty name instead of a session"),
            ("explain", {"id": "x" * 4097}, "4,097 characters, the longest may have 4,096"),
            ("fork", {"session": "tale", "new_id": ""}, "a name for the copy. Fix: leave --as out"),
            ("promote", {"session": "tale", "to": ""}, "leave --to out"),
            ("park", {"session": "tale", "tool_call_id": "a\nb"}, "printable"),
            ("park", {"session": "tale", "tool_call_id": "c" * 257}, "at most 256"),
            ("promote", {"session": "x" * 20_000}, "its session has 20,000 characters"),
            ("sessions", {"session": "\udcff"}, "its session is no valid UTF-8"),
            ("promote", {"session": "tale", "lane": "fast"}, "lane"),
            ("why", {"session": "tale", "to": "fast"}, "to"),
            ("store", {"op": "format"}, "format"),
            ("sessions", {"stored": "yes"}, "str"),
        ]
        for command, fields, word in bad:
            with pytest.raises(BatchEngineError, match=word):
                await asyncio.to_thread(admin, str(ask.path), command, **fields)
        assert engine.calls == []

    with_daemon(tmp_path, capsys, scenario)


def test_arguments_that_name_no_session_are_refused_with_a_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario(ask: Asked, engine: FakeEngine) -> None:
        commands = (
            ["promote"],
            ["demote"],
            ["explain"],
            *(["sessions", v] for v in SESSION_COMMANDS),
        )
        for command in commands:
            for name in ("", "x" * 5000, "x" * 50_000, "\udcff", "nothing", "größe-日本", "be_a"):
                code, out, err = await ask(*command, name)
                assert (code, out) == (1, ""), command
                assert err.startswith(
                    ("batchengine: BE1", "batchengine: BE2403", "batchengine: BE2425")
                ), err
                assert "Fix: " in err, err
                assert not any(word in err for word in ("$.", "str of", "Expected", "JSON")), err
        assert engine.calls == []

    with_daemon(tmp_path, capsys, scenario)


def test_texts_of_aborted_moves_missing_turns_and_units() -> None:
    aborted = {"source": "bulk", "target": "fast", "result": "aborted: the destination died"}
    assert render.move_line(aborted) == "stays on bulk: the destination died"
    assert render.move_line({**aborted, "result": "already there"}) == "is on fast already"
    assert render.why_lines({"last": None, "edit": None}) == ["the session has had no turn"]
    assert [render.ms(v) for v in (None, 3.25, 140.6, 12_345.0)] == [
        "no limit", "3.2 ms", "141 ms", "12.3 s",
    ]  # fmt: skip
    assert [render.size(v) for v in (0, 1023, 1536, 5 << 40)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 TiB",
    ]  # fmt: skip
    assert render.size(1 << 60) == "1,048,576.0 TiB"


def test_fsck_prints_its_findings_and_sets_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_store.store import Store
    from tests.support.kv_workload import descriptor, settings

    path = tmp_path / "kv"
    store = Store.open(str(path), descriptor(), settings())
    assert main.run(["store", "fsck", str(path)]) == 3
    assert "locked" in capsys.readouterr().err
    store.close()
    assert main.run(["store", "fsck", str(path)]) == 0
    assert "sound" in capsys.readouterr().out
    assert main.run(["store", "fsck", str(tmp_path)]) == 2
    assert "holds no store" in capsys.readouterr().err
    (path / "meta.db").write_bytes(b"not a database" * 500)
    assert main.run(["store", "fsck", str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["repaired"]) == (False, False)
    assert found["findings"]
    assert main.run(["store", "fsck", str(path)]) == 1
    assert "--repair" in capsys.readouterr().out


def test_fsck_of_a_store_that_it_cannot_lock_does_not_call_it_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kv_store.store import Store
    from tests.support.kv_workload import descriptor, settings

    path = tmp_path / "kv"
    Store.open(str(path), descriptor(), settings()).close()
    (path / "LOCK").unlink()
    (path / "LOCK").mkdir()  # for root, too, a file that cannot be opened
    assert main.run(["store", "fsck", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("batchengine: BE1602 ")
    assert "cannot be locked" in error
    assert "fix its permissions" in error


def test_sessions_can_be_listed_by_every_state_that_they_have() -> None:
    named = set(get_args(SessionState))
    assert {state.value for state in State} - {"closed"} < named
    assert named >= {PARKED, "interrupted", "on disk"}
