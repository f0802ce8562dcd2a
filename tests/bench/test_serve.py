"""The benches of many clients: the load on a HashLM daemon, and what the clients' proxy says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import serve
from bench.clients import proxy
from bench.clients.proxy import Exchange, Script


def test_streams_beside_idle_connections_all_end(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--streams", "6", "--idle", "12", "--seconds", "1.5", "--tokens", "8", "--no-trace"]
    assert serve.main(argv) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.rpartition("RESULT ")[2])
    assert result["streams"] == 6
    assert result["errors"] == 0
    assert result["lag_p99_ms"] > 0


SCRIPT = Script("USETOOL", "MARKER", call="CALL", text="pong")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [{}], "messages": [{"content": "USETOOL"}]}, "CALL"),
        ({"tools": [{}], "messages": [{"content": "USETOOL"}, {"content": "MARKER"}]}, "pong"),
        ({"tools": [], "messages": [{"content": "USETOOL"}]}, "pong"),  # such as a title
        ({"tools": [{}], "messages": [{"content": "Say pong."}]}, "pong"),
    ],
)
def test_a_call_is_made_once_and_only_with_tools(body: dict[str, Any], said: str) -> None:
    assert SCRIPT.answer(body) == said


CACHED = {"cached_tokens": 30}


@pytest.mark.parametrize(
    "answer",
    [
        {"usage": {"prompt_tokens": 40, "prompt_tokens_details": CACHED}},
        {"response": {"usage": {"input_tokens": 40, "input_tokens_details": CACHED}}},
        {"message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 30}}},
    ],
)
def test_usage_of_every_protocol_is_understood(answer: dict[str, Any]) -> None:
    for data in (json.dumps(answer), f"event: x\ndata: {json.dumps(answer)}\n\ndata: [DONE]\n"):
        exchange = Exchange("/v1/x", {}, 200)
        proxy.note(exchange, data.encode())
        assert (exchange.prompt_tokens, exchange.cached_tokens) == (40, 30)


def test_errors_in_a_stream_are_noted() -> None:
    exchange = Exchange("/v1/x", {}, 200)
    proxy.note(exchange, b'event: error\ndata: {"error": {"message": "no"}}\n')
    assert "no" in exchange.error
