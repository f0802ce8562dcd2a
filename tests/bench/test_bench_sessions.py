"""Benches of kills, migrations and restarts in their quick forms, and proof that they can fail.

`make soak` runs the long forms.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchengine.engine.placement.migration import RECOMPUTE_MAX
from bench import crash, kill_points
from bench.models import hashlm
from bench.processes.engine_child import EngineProcess, engine_zygote
from bench.processes.postmortem import double_slots
from bench.processes.zygote import Zygote
from kv_store.arenas.arena import Arena, ArenaMapping, SlotOwner

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, fails: bool = False, **env: str) -> dict[str, Any]:
    """The RESULT of one bench; `fails`: it must end with an error."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("RESULT "), last
    return json.loads(last.removeprefix("RESULT "))


# ------------------------------------------------------------------------------------- crash


def test_random_kills_lose_and_change_no_token() -> None:
    result = bench("crash", "--quick", "--json", os.devnull)
    assert result.pop("kills") >= 20
    assert result == {"lost_tokens": 0, "wrong_tokens": 0, "double_owners": 0}


@pytest.mark.slow  # the test above kills by the same script; `make soak` has hundreds
def test_random_kills_lose_no_token_of_a_real_model() -> None:
    result = bench("crash", "--model", "pocket", "--kills", "8", "--jobs", "1", "--clients", "4")
    assert result.pop("kills") >= 8
    assert result == {"lost_tokens": 0, "wrong_tokens": 0, "double_owners": 0}


def test_the_crash_bench_detects_a_wrong_token() -> None:
    """Workers run another model than the clients expect."""
    faults = json.dumps({"model": "another"})
    result = bench("crash", "--kills", "1", "--jobs", "1", fails=True, **{hashlm.FAULTS: faults})
    assert result["wrong_tokens"] > 0


def _client(level: str) -> crash.Client:
    rig = SimpleNamespace(name="r", findings=crash.Findings(), level=level, runs=1)

    async def receive(stream: asyncio.Queue[dict[str, Any]], _: object) -> dict[str, Any]:
        return await stream.get()

    rig.hear = receive
    client = crash.Client(cast(crash.Rig, rig), 0)
    client.turn = crash.Turn([1, 2, 3], [4, 5, 6, 7], 0, sent=2)
    return client


@pytest.mark.parametrize(
    ("level", "tokens", "lost", "wrong"),
    [
        ("power", [1, 2, 3, 4, 5], 0, 0),
        ("power", [1, 2, 3, 4, 5, 6], 0, 0),
        ("power", [1, 2, 3, 4], 1, 0),
        ("turn", [1, 2, 3], 0, 0),
        ("turn", [1, 2], 1, 0),
        ("turn", None, 3, 0),
        ("turn", [1, 2, 3, 4, 9], 0, 1),
        ("power", [1, 2, 9, 4, 5], 0, 1),
    ],
)
def test_tokens_that_the_ledger_lacks_are_counted(
    level: str, tokens: list[int] | None, lost: int, wrong: int
) -> None:
    client = _client(level)

    def ask(*_: object, **__: object) -> asyncio.Queue[dict[str, Any]]:
        stream = asyncio.Queue[dict[str, Any]]()
        stream.put_nowait({"tokens": tokens, "turns": ["running"], "epoch": 1})
        return stream

    engine = cast(EngineProcess, SimpleNamespace(ask=ask))
    assert asyncio.run(client.check_ledger(engine))
    assert (client.findings.lost, client.findings.wrong) == (lost, wrong)


def test_an_epoch_that_decreases_is_reported_as_two_owners() -> None:
    client = _client("turn")
    client.epoch = 2

    def ask(*_: object, **__: object) -> asyncio.Queue[dict[str, Any]]:
        stream = asyncio.Queue[dict[str, Any]]()
        stream.put_nowait({"tokens": [1, 2, 3], "turns": [], "epoch": 1})
        return stream

    asyncio.run(client.check_ledger(cast(EngineProcess, SimpleNamespace(ask=ask))))
    assert client.findings.double == 1


def test_two_arenas_with_one_page_are_reported_as_two_owners(tmp_path: Path) -> None:
    """Of the last workers only: arenas of dead workers may hold the same rows."""
    life = 7 * 1_000_000
    for name, owners in {
        f"a.{life + 1}": [SlotOwner(b"s", 3, 0, 1)],
        f"a.{life + 2}": [SlotOwner(b"s", 4, 0, 1), SlotOwner(b"t", 3, 0, 1)],
        f"b.{life + 1}": [SlotOwner(b"s", 3, 0, 1), SlotOwner(b"s", 4, 0, 2)],
    }.items():
        _arena(tmp_path / name, owners)
    assert double_slots(tmp_path, "ab") == []
    _arena(tmp_path / f"b.{life + 2}", [SlotOwner(b"s", 4, 1, 1)])
    assert len(double_slots(tmp_path, "ab")) == 1
    _arena(tmp_path / f"a.{2 * life + 1}", [SlotOwner(b"s", 4, 1, 1)])
    assert double_slots(tmp_path, "ab") == []


def _arena(path: Path, owners: list[SlotOwner]) -> None:
    Arena.create(str(path), hashlm.LAYOUT, 4, 1)
    mapping = ArenaMapping(str(path), hashlm.LAYOUT)
    for slot, owner in enumerate(owners):
        mapping.reserve(slot, owner)
    mapping.close()


# ------------------------------------------------------------------------------- kill points


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = engine_zygote()
    yield made
    made.close()


@pytest.mark.parametrize(("target", "every"), [("engine", 1300), ("worker", 1700)])
def test_deaths_at_some_points_of_the_script_change_no_token(
    zygote: Zygote, target: str, every: int
) -> None:
    played = list(kill_points.sweep(zygote, 1 + every // 3, every, target))
    assert sum(died for _, died in played) >= 2
    assert not played[-1][1], "the sweep ends where the script does"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("target", ["engine", "worker"])
def test_deaths_at_every_point_of_the_script_change_no_token(zygote: Zygote, target: str) -> None:
    assert len(list(kill_points.sweep(zygote, 1, 1, target))) > 500


def test_the_script_reports_the_position_of_a_wrong_token(
    zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill_points, "hashlm_tokens", lambda prompt, n: [5] * n)
    with pytest.raises(kill_points.Failure, match=r"point 100, level \w+, step 0"):
        list(kill_points.sweep(zygote, 100, 100, "engine"))


# --------------------------------------------------------------------------- promote, restart


@pytest.mark.alone
def test_promote_migrates_a_stream_without_changing_it(pocket_path: Path, tmp_path: Path) -> None:
    result = bench(
        "promote", "--quick", "--model", str(pocket_path), "--json", str(tmp_path / "r.json")
    )
    assert result.pop("same_tokens") is True
    assert all(value > 0 for value in result.values()), result
    row = json.loads((tmp_path / "r.json").read_text())["details"]["rows"][0]
    moves, pauses = row["reports"], row["pauses"]
    assert [move["result"] for move in moves] == ["moved"] * 4
    assert [pause["open_rows"] for pause in pauses] == [move["rows_copied"] for move in moves]
    for pause in pauses:
        parts = pause["rows_ms"] + pause["owner_ms"] + pause["rest_ms"]
        assert parts == pytest.approx(pause["gap_ms"], abs=0.1)
    # full pages that are not sealed yet are copied, the others go by reference
    assert all(move["pages_shared"] + move["pages_copied"] >= 4 for move in moves), moves
    assert moves[-1]["pages_shared"] >= 3, moves
    assert all(move["rows_recomputed"] <= RECOMPUTE_MAX for move in moves), moves


@pytest.mark.slow  # tests/engine/placement has moves without a gap
def test_the_gap_of_a_promotion_is_measured_both_ways(pocket_path: Path, tmp_path: Path) -> None:
    result = bench(
        "promote", "--zero-pause", "--quick", "--model", str(pocket_path),
        "--json", str(tmp_path / "r.json"),
    )  # fmt: skip
    assert result["identical"] is True
    assert result["gap_tpot_2k"] > 0
    moves = json.loads((tmp_path / "r.json").read_text())["details"]["moves"]["2048"]
    assert [move["situation"] for move in moves] == ["alone"] * 4 + ["page"] * 2 + [
        "beside others"
    ] * 4
    assert all(move["again"] == 0 for move in moves if move["way"] == "stopped"), moves


@pytest.mark.slow  # tests/engine/sessions/test_durability.py has the mechanism
def test_few_tokens_are_recomputed_after_a_restart(pocket_path: Path) -> None:
    result = bench("restart", "--quick", "--model", str(pocket_path))
    assert result["same_tokens"] is True
    assert 0 <= result["tokens_reprefilled"] <= 256
    assert result["tokens_reprefilled_stop"] == 0
    assert 0 <= result["tokens_reprefilled_worker"] <= 1
    assert result["restart_vs_prefill_1k"] > 0


@pytest.mark.slow  # tests/engine/linked/pipelines has the mechanism
def test_a_pipeline_of_two_daemons_has_the_answers_of_one(pocket_path: Path) -> None:
    result = bench("pipeline", "--quick", "--model", str(pocket_path))
    assert result["identical"] is True
    assert result["speedup_2"] > 0
