"""`ps` and `top`: what the daemon computes now, lane by lane and request by request."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from service.admin.client import admin
from service.cli import render
from service.cli.options import AT_LEAST_0, PAUSE, Debug, Json, Socket, admin_path, show
from service.cli.tables import Column, fitted, watch

REQUESTS_SHOWN = 20  # that `top` shows
ID_CHARS = 12  # of a request in a table: enough for every command
LANES = (
    Column("lane"),
    Column("tier", 6),
    Column("state"),
    Column("running", right=True),
    Column("waiting", right=True),
    Column("seats", 5, right=True),
    Column("tokens/s", right=True),
    Column("prefill/s", right=True),
    Column("ms/step", 3, right=True),
    Column("threads", 7, right=True),
    Column("cores", 8),
    Column("isa", 9),
    Column("pid", 10, right=True),
    Column("why", 4, flexible=True),
)
REQUESTS = (
    Column("request"),
    Column("session", flexible=True),
    Column("key", 5),
    Column("class", 4),
    Column("state"),
    Column("lane"),
    Column("prompt", 3, right=True),
    Column("cached", 7, right=True),
    Column("tokens", right=True),
    Column("tokens/s", 2, right=True),
    Column("ttft", 6, right=True),
    Column("predicted", 8, right=True),
    Column("eta", 1, right=True),
    Column("age", 2, right=True),
    Column("pages with", 9, flexible=True),
    Column("waits for", 9, flexible=True),
)


def ps(*, admin_socket: Socket = None, json: Json = False, debug: Debug = False) -> int:
    """Show what the daemon is computing now: lanes with their speeds, and requests."""
    status, requests = _ask(admin_path(admin_socket))
    show({"status": status, "requests": requests}, json, lambda: status_lines(status, requests))
    return 0


def top(
    *,
    seconds: Annotated[float, Parameter(validator=PAUSE, help="Time between two looks.")] = 1.0,
    count: Annotated[int, Parameter(validator=AT_LEAST_0, help="Looks; 0 = until Ctrl-C.")] = 0,
    admin_socket: Socket = None,
    debug: Debug = False,
) -> int:
    """Watch lanes, speeds, queues and the progress of prompts, until Ctrl-C."""
    path = admin_path(admin_socket)

    def lines() -> list[str]:
        status, requests = _ask(path)
        waiting = sum(row.get("state") == "queued" for row in requests)
        more = len(requests) - REQUESTS_SHOWN
        found = status_lines(status, requests[:REQUESTS_SHOWN])
        found.insert(1, f"requests {len(requests):,}, of these {waiting:,} wait for a lane")
        return [*found, f"and {more:,} more"] if more > 0 else found

    watch(lines, max(0.1, seconds), count)
    return 0


def _ask(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return admin(path, "status")["status"], admin(path, "requests")["requests"]


def status_lines(status: dict[str, Any], requests: list[dict[str, Any]]) -> list[str]:
    """The daemon, its lanes, its store and its requests."""
    stats = status["stats"]
    lines = [
        f"{status['model'] or '(loading)'}  {status['state']}  {status['address']}"
        f"  pid {status['pid']}  batchengine {status['version']}"
    ]
    if status["state"] == "loading":
        lines[0] += f"  {status['progress']:.0%}"
    lines += ["", *fitted(LANES, [_lane(row) for row in status["lanes"]], "no lanes yet"), ""]
    if "kv_tier" in stats:
        kv, ledger, durability = stats["kv_tier"], stats["ledger"], stats["durability"]
        lines.append(f"store  kv={kv}  ledger={ledger}  durability={durability}")
    if stats.get("peers"):
        lines.append(
            f"peers  {stats['peers_up']} of {stats['peers']} up"
            f"  data links={stats['data_links_up']}  pages with them={stats['pages_taken']}"
            f"  pages for them={stats['pages_given']}  moves={stats['page_moves']}"
            f"  pipelines={stats['pipelines']}"
        )
    lines += [f"warning  {trouble}" for trouble in stats.get("troubles", ())]
    return lines + fitted(REQUESTS, [_request(row) for row in requests], "nothing is running")


def _lane(row: dict[str, Any]) -> dict[str, Any]:
    speeds = {"tokens/s": row.get("tokens_per_s"), "prefill/s": row.get("prefill_per_s")}
    return {**row, "lane": row["name"], "ms/step": row.get("step_ms") or None, **speeds}


def _request(row: dict[str, Any]) -> dict[str, Any]:
    """One request: its progress as its state, times with units; where pages are at peers."""
    tpot = row.get("tpot_ms")
    eta, age = row.get("eta_ms"), row.get("age_ms")
    return {
        "request": row["request_id"][:ID_CHARS],
        "session": row.get("name") or row.get("session_id"),
        "key": row.get("tenant"),
        "class": row.get("class"),
        "state": progress(row),
        "lane": row.get("lane"),
        "prompt": row.get("prompt_tokens"),
        "cached": row.get("cached_tokens"),
        "tokens": row.get("completion_tokens"),
        "tokens/s": None if not tpot else f"{1000 / tpot:,.1f}",
        "ttft": None if row.get("ttft_ms") is None else render.ms(row["ttft_ms"]),
        "predicted": None
        if row.get("predicted_ttft_ms") is None
        else render.ms(row["predicted_ttft_ms"]),
        "eta": None if eta is None or row.get("ttft_ms") is not None else render.ms(eta),
        "age": None if age is None else render.ms(age),
        **render.held_lines(row),
    }


def progress(row: dict[str, Any]) -> str:
    """The state of a request: its place in the queue, or how much of its prompt has KV."""
    state, prompt = str(row.get("state") or "-"), row.get("prompt_tokens") or 0
    if row.get("ttft_ms") is not None or state == "paused":
        return "decode" if state == "running" else state
    if row.get("position"):
        return f"queued #{row['position']}"
    computed = row.get("computed_tokens")
    if state == "running" and prompt and computed is not None:
        return f"prefill {computed / prompt:.0%}"
    return state
