"""A daemon, agents as they send: titles beside turns, tails that move, children, kill -9."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.service.test_daemon_sessions import serving

AGENT = "You are an agent that works in a folder with tools. " * 14
TAIL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive: none\n"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ask(port: int, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    """One whole answer; its headers are under "headers"."""
    headers = {"Content-Type": "application/json", **more.pop("headers", {})}
    body = {"messages": messages, "max_tokens": 12, "seed": 1, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return {**json.load(reply), "headers": {k.lower(): v for k, v in reply.headers.items()}}


def tool(name: str) -> dict[str, Any]:
    path = {"type": "object", "properties": {"path": {"type": "string"}}}
    about = f"{name} a file, whose path is relative to the folder of the project."
    described = {"name": name, "description": about, "parameters": path}
    return {"type": "function", "function": described}


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def show(port: int, session_id: str) -> dict[str, Any]:
    path = f"http://127.0.0.1:{port}/v1/sessions/{session_id}"
    with urllib.request.urlopen(path, timeout=30) as reply:
        return json.load(reply)


def reused(answer: dict[str, Any]) -> tuple[int, int]:
    """Tokens of the prompt that had KV, and all."""
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def leave(port: int, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Read the beginning of a stream, and close the connection; until the daemon knows."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Content-Type": "application/json", **headers}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), headers
    )
    reply = connection.getresponse()
    events = 0
    while events < 8:  # the first one has a role only
        events += b"content" in reply.readline()
    reply.close()
    connection.close()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/queue", timeout=30) as queue:
            if not json.load(queue)["requests"]:
                return
    raise AssertionError("a request without a reader is still in the queue")


def test_a_broken_stream_is_asked_for_again(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """As Claude Code does, without a stream and a count; as SDKs do, with the count."""
    body = {
        "messages": [said("system", AGENT), said("user", "Write.")],
        "max_tokens": 600, "ignore_eos": True, "seed": None,
    }  # fmt: skip
    with serving(pocket_path, tmp_path, cache_dir) as (port, _, _):
        for headers in ({}, {"x-claude-code-session-id": "claude"}):
            leave(port, body, headers)
            again = ask(port, **body, headers=headers)
            assert again["batchengine"]["resumed_tokens"] > 0
            assert again["usage"]["completion_tokens"] == 600
            assert reused(again)[0] >= reused(again)[1] - 1
        leave(port, body, {})
        fresh = ask(port, **body, stream=False, n=1)
        assert "resumed_tokens" not in fresh["batchengine"]  # n: another body


def test_agents_as_they_send(pocket_path: Path, tmp_path: Path, cache_dir: Path) -> None:
    opencode = {"headers": {"x-session-id": "ses_1", "x-session-affinity": "ses_1"}}
    first = [said("system", AGENT), said("user", "List the files.")]
    claw = [said("system", "Claw. " + AGENT * 5), said("user", "Say pong.")]
    with serving(pocket_path, tmp_path, cache_dir) as (port, pid, _):
        running = threading.Thread(target=ask, args=(port, first), kwargs={**opencode})
        running.start()
        title = ask(port, [said("system", "Write titles."), said("user", "T?")], **opencode)
        running.join()
        assert "x-batchengine-warning" not in title["headers"]
        answer = ask(port, first, **opencode)
        names = {one["headers"]["x-batchengine-session-id"] for one in (title, answer)}
        assert len(names) == 2
        assert len({name.partition(".")[0] for name in names}) == 1
        more = [*first, said("assistant", text_of(answer)), said("user", "And now?")]
        second = ask(port, more, **opencode)
        assert second["batchengine"]["timeline"]["use"] == "continued"
        cached, prompt = reused(second)
        assert cached > 0.9 * prompt

        # a tail moves behind the newest message: all before it is found again
        key = {"prompt_cache_key": "claw:0"}
        one = ask(port, [*claw, said("user", TAIL)], **key)
        grown = [*claw, said("assistant", text_of(one)), said("user", "Again."), said("user", TAIL)]
        two = ask(port, grown, **key)
        head = ask(port, [*claw, said("user", "")], prompt_cache_key="other")
        assert two["batchengine"]["timeline"]["use"] == "continued"
        assert reused(two)[0] >= reused(head)[1] - 8
        assert two["batchengine"]["session_id"] == one["batchengine"]["session_id"]

        # a Codex child has the ids of its root, and a thread of its own
        root = {"headers": {"session-id": "root", "thread-id": "root"}}
        started = ask(port, first, **root)
        child = ask(port, [first[0], said("user", "Be a child.")], **{
            "headers": {"session-id": "root", "thread-id": "child",
                        "x-codex-parent-thread-id": "root"}})  # fmt: skip
        assert child["batchengine"]["timeline"]["use"] == "new"
        assert reused(child)[0] > 0.7 * reused(child)[1]
        names = [one["batchengine"]["session_id"] for one in (child, started)]
        found = [show(port, name) for name in names]
        assert [one["parent"] for one in found] == [names[1], None]

        # a tool joins at the end of the list, which this template has before all messages: what is
        # behind the list has to be computed again, the list itself has not
        some = [tool(name) for name in ("read", "write", "delete", "rename")]
        asks = [said("system", "Be brief."), said("user", AGENT)]
        own = {"prompt_cache_key": "grows"}
        alone = ask(port, asks[:1], **own | {"prompt_cache_key": "list"}, tools=some)
        ask(port, asks, **own, tools=some)
        asks += [said("assistant", "Done."), said("user", "And now?")]
        two = ask(port, asks, **own, tools=[*some, tool("move")])
        assert abs(reused(two)[0] - reused(alone)[1]) <= 8
        assert two["batchengine"]["timeline"]["use"] == "forked"
        three = ask(port, [*asks, said("user", "Go on.")], **own, tools=[*some, tool("move")])
        assert reused(three)[0] > 0.9 * reused(two)[1]

        # the newest message alone
        alone = ask(port, [first[0], said("user", "And then?")], **opencode)
        assert alone["headers"]["x-batchengine-warning"] == "history-missing"
        added = ask(port, [said("user", "And then?")], batchengine={"append": True}, **root)
        assert added["batchengine"]["timeline"]["use"] == "appended"
        assert reused(added)[0] > 0.9 * (reused(added)[1] - 16)
        os.kill(pid, signal.SIGKILL)
    with serving(pocket_path, tmp_path, cache_dir) as (port, _, _):
        again = [*more, said("assistant", text_of(second)), said("user", "Thanks.")]
        third = ask(port, again, **opencode)
        assert third["batchengine"]["timeline"]["use"] == "continued"
        assert third["batchengine"]["session_id"] == second["batchengine"]["session_id"]
        cached, prompt = reused(third)
        assert cached > 0.9 * prompt
        found = show(port, third["batchengine"]["session_id"])
        assert len(found["timelines"]) == 3
        assert found["family"] == min(found["timelines"])
