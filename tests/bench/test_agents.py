"""`bench agents` runs its trace through our daemon and through a llama-server beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.agents import Trace

ROOT = Path(__file__).resolve().parents[2]
SERVER = '''#!{python}
"""Answers as llama-server does: three texts for every request."""
import sys
from aiohttp import web

async def health(request):
    return web.json_response({{"status": "ok"}})

async def chat(request):
    body = await request.json()
    assert body["stream"] and body["ignore_eos"] and "batchengine" not in body
    with open({asked!r}, "a") as asked:
        asked.write(f"{{len(body['messages'])}} {{body['max_tokens']}}\\n")
    reply = web.StreamResponse()
    await reply.prepare(request)
    for text in ("", "one ", "two ", "three"):
        delta = '{{"choices": [{{"delta": {{"content": "%s"}}}}]}}' % text
        await reply.write(f"data: {{delta}}\\n\\n".encode())
    await reply.write(b"data: [DONE]\\n\\n")
    return reply

app = web.Application()
app.add_routes([web.get("/health", health), web.post("/v1/chat/completions", chat)])
port = int(sys.argv[sys.argv.index("--port") + 1])
web.run_app(app, host="127.0.0.1", port=port, print=None)
'''


def test_a_trace_has_one_system_prompt_and_growing_conversations() -> None:
    trace = Trace(agents=2, turns=3, system_chars=100, message_chars=10, answer_tokens=5)
    first, second = trace.messages(0, 2), trace.messages(1, 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[:4] == trace.messages(0, 1)
    assert [m["role"] for m in first[1:]] == ["user", "assistant"] * 2 + ["user"]
    chars = sum(len(m["content"]) for m in first)
    assert chars == 100 + 3 * 10 + 2 * 5
    assert trace.context >= chars + trace.answer_tokens


def test_the_trace_runs_through_both_servers(tmp_path: Path) -> None:
    asked, program = tmp_path / "asked", tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable, asked=str(asked)))
    program.chmod(0o755)
    pocket = ROOT / "pocket" / "pocket-q4_0.gguf"
    command = [sys.executable, "-m", "bench", "agents", "--quick", "--model", str(pocket)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1].removeprefix("RESULT "))
    assert set(result) == {"turns_per_min", "ttft_p95_ms", "tpot_p50_ms", "ratio"}
    for row in ("turns_per_min", "ttft_p95_ms", "tpot_p50_ms"):
        assert set(result[row]) == {"ours", "llama-server"}
        assert result[row]["ours"] > 0
    assert result["ratio"] > 0
    # A request to wake it up, then two agents with two turns: 2 and 4 messages.
    assert sorted(asked.read_text().split("\n")[1:-1]) == ["2 8", "2 8", "4 8", "4 8"]
