"""Lines about decisions, the pages of a session, and what a drain waits for."""

from __future__ import annotations

from typing import Any

from service.cli import drain, render
from service.cli.peers import status_lines


def test_where_the_pages_of_a_session_are() -> None:
    assert render.held_lines({"pages": 3}) == {}
    found = {
        "route": [{"peer": "b", "pages": 8}, {"peer": "", "pages": 5}],
        "waits_for": {"b": "its link is down"},
        "pages_lost": 4,
        "page_move": {"source": "", "target": "c", "first": 8, "pages": 4},
    }
    assert render.held_lines(found) == {
        "pages with": "b 8, here 5",
        "waits for": "b: its link is down",
        "computes": "4 pages again, which were lost with a peer",
        "moving": "pages 8 to 11, here -> c",
    }


def test_how_long_something_has_been_over() -> None:
    assert [render.ago(seconds) for seconds in (-3.0, 0.2, 90.0)] == ["now", "now", "1 min ago"]


def test_what_a_drain_waits_for() -> None:
    given = {"peer": "a", "pages": 8, "state": "up", "kv_free_bytes": 1 << 20}
    given |= {"requests_running": 2}
    stage = {"role": "stage", "owner": "c", "tokens": 900, "tokens_computed": 512}
    found = {"requests": [{"request_id": "req_1"}], "given": [given], "stages": [stage]}
    assert drain.waiting_line(found) == (
        "waits for 1 request, a stage computed for c, 8 pages kept for a"
    )
    lines = drain.end_lines({**found, "over": False}, 5.0)
    assert lines[0].startswith("left after 5 s")
    assert "a stage for c: 512 of 900 tokens are computed" in lines
    assert "1.0 MiB of KV free, and runs 2 requests" in lines[-1]
    given["state"] = "suspect"
    assert drain.end_lines({**found, "over": False}, 5.0)[-1].endswith("its link is suspect")


def test_pipelines_under_way_are_lines_of_the_status() -> None:
    head = {"name": "a", "listen": "x:1", "tls": True, "trouble": "", "connections_refused": 0}
    owned = {"role": "owner", "state": "running", "pages": 9, "pages_gathered": 3}
    owned |= {"stages": [["", 0, 2], ["b", 2, 4]]}
    stage = {"role": "stage", "owner": "c", "tokens": 900, "tokens_computed": 512}
    lines = status_lines({**head, "peers": [], "pipelines": [owned, stage]})
    assert lines[-2:] == [
        "pipeline running: 3 of 9 pages; here layers 0 to 1, b layers 2 to 3",
        "a stage for c: 512 of 900 tokens",
    ]


def test_a_decision_tells_prompt_tokens_of_the_store_from_those_of_the_session() -> None:
    """A first try that was cancelled had no token, whatever its limit; the second found pages."""

    def decision(request: str, cached: int, ttft_ms: float | None) -> dict[str, Any]:
        return {
            "request_id": request, "class": "interactive", "age_s": 1.0, "session_id": "s",
            "lane": "fast", "reason": "r", "strategy": {}, "candidates": [], "predicted": None,
            "request": {"prompt_tokens": 12_019, "tokens_out": 64, "ttft_ms": 500.0},
            "session": {"reused_tokens": 0, "open_rows": 0, "lane": "fast"},
            "happened": {"ttft_ms": ttft_ms, "tokens": 0, "lane": "fast", "finish": "cancelled",
                         "cached_tokens": cached},
            "restore": None, "moves": [], "notes": [],
        }  # fmt: skip

    decisions = [decision("first", 0, None), decision("second", 7792, 90.0)]
    found = {"kind": "session", "session_id": "s", "decisions": decisions}
    text = "\n".join(render.explain_lines(found))
    assert "the session had 0 tokens of the prompt on fast" in text
    assert "7,792 of the prompt had KV (7,792 of them in pages of the store)" in text
    assert "first  fast  r  no token came" in text
    assert "no limit" not in text


def test_the_history_of_a_session_shows_calls_and_their_results() -> None:
    call = {"id": "call_0", "type": "function"}
    messages = [
        {"role": "user", "content": "What is in a.txt?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**call, "function": {"name": "read", "arguments": '{"path": "a.txt"}'}}
            ],
        },
        {"role": "tool", "name": "read", "content": "red\x1b[31m", "tool_call_id": "call_0"},
        {"role": "assistant", "content": ""},
    ]
    assert render.message_lines(messages) == [
        "user: What is in a.txt?",
        'assistant calls read({"path": "a.txt"})',
        "tool read: red\N{REPLACEMENT CHARACTER}[31m",
        "assistant: ",
    ]
