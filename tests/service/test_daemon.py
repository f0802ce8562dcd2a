"""End to end: the real daemon on the bundled pocket model, through its HTTP API.

One daemon for the whole file. These tests check the layers together: parameters have their effect
in the answer, sessions reuse KV, a killed worker only pauses a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

import kernels
from batchengine.core import BatchEngineError
from service.admin.client import Client, admin
from service.cli.local.child import ChildDaemon

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "Hello! Who are you?"}]


@pytest.fixture(scope="module")
def daemon(pocket_path: Path) -> Iterator[ChildDaemon]:
    lines: list[str] = []
    with ChildDaemon(pocket_path, lines.append) as running:
        running.wait_ready(60)
        assert sum("] " in line for line in lines) >= 3, "the stage list"
        yield running
        assert running.stop() == 0
        assert not running.scratch.exists()


@pytest.fixture
def sdk(daemon: ChildDaemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=daemon.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Client, **more: Any) -> tuple[str, dict[str, Any], str]:
    """Text, last chunk and finish reason of one greedy answer."""
    body: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 32, **more}
    text, last, reason = "", {}, ""
    for chunk in client.stream_chat(body):
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            reason = choice["finish_reason"] or reason
        last = chunk
    return text, last, reason


def test_streamed_whole_and_sdk_answers_agree(daemon: ChildDaemon, sdk: openai.OpenAI) -> None:
    text, last, reason = ask(Client(daemon.url))
    assert text
    assert reason == "stop"
    model = sdk.models.list().data[0].id
    whole = sdk.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Hello! Who are you?"}],
        temperature=0,
        max_tokens=32,
        logprobs=True,
        top_logprobs=3,
    )
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == last["usage"]["completion_tokens"]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    # the token that ends a turn has a log-probability too, but no text
    assert "".join(e.token for e in entries).startswith(text)
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token  # greedy took the most likely token


def test_continuations_are_compared(sdk: openai.OpenAI) -> None:
    """The log-probabilities of an answer are those of the same tokens in a prompt, bit by bit."""
    model, text = sdk.models.list().data[0].id, "Why did the clock go to school? It wanted to learn"
    made = sdk.completions.create(model=model, prompt=text, max_tokens=4, temperature=0, logprobs=1)
    assert made.choices[0].logprobs is not None
    values = made.choices[0].logprobs.token_logprobs or []
    assert len(values) == 4
    for most in (0, 1):
        both = sdk.completions.create(
            model=model,
            prompt=[text + made.choices[0].text, text + " purple of dogs"],
            max_tokens=most,
            temperature=0,
            logprobs=1,
            echo=True,
        )
        sums = list[float]()
        for choice in both.choices:
            assert choice.logprobs is not None
            numbers, tokens = choice.logprobs.token_logprobs or [], choice.logprobs.tokens or []
            offsets = choice.logprobs.text_offset or []
            n = len(numbers) - most  # the last token may end the answer, and have no text
            first = next(i for i, offset in enumerate(offsets) if offset >= len(text))
            assert numbers[0] is None
            assert choice.text.startswith(text + "".join(tokens[first:n]))
            sums.append(sum(numbers[first:n]))
            if choice.index == 0:
                assert numbers[first:n] == values
        assert sums[0] > sums[1] + 10


def test_seeds_repeat_and_differ(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id

    def draw(seed: int) -> list[str | None]:
        reply = sdk.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me a story."}],
            temperature=1.8,
            seed=seed,
            n=3,
            max_tokens=24,
        )
        return [choice.message.content for choice in reply.choices]

    first = draw(1)
    assert draw(1) == first
    assert draw(2) != first
    assert len(set(first)) > 1  # choices of one request draw differently


def test_limits_and_stop_strings_end_an_answer(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    text, _, _ = ask(client)
    short, last, reason = ask(client, max_tokens=3)
    assert (reason, last["usage"]["completion_tokens"]) == ("length", 3)
    assert text.startswith(short)
    word = text.split()[2]
    cut, _, reason = ask(client, stop=[word])
    assert reason == "stop"
    assert cut == text[: text.index(word)]


def test_a_session_reuses_its_kv(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    extra = {"batchengine": {"session_id": "kv-test"}}
    text, last, _ = ask(client, **extra)
    history = [*QUESTION, {"role": "assistant", "content": text}]
    history.append({"role": "user", "content": "Thank you. What can you do?"})
    warm, second, _ = ask(client, messages=history, **extra)
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= last["usage"]["prompt_tokens"]
    assert second["batchengine"]["session_id"] == last["batchengine"]["session_id"]
    cold, fresh, _ = ask(client, messages=history)
    assert cold == warm  # reuse does not change the text
    rows = admin(daemon.admin_socket, "sessions")["sessions"]
    assert second["batchengine"]["session_id"] in {row["session_id"] for row in rows}
    assert fresh["batchengine"]["session_id"] != second["batchengine"]["session_id"]


def test_links_that_are_off_say_so(daemon: ChildDaemon) -> None:
    with pytest.raises(BatchEngineError, match="--peer-listen") as caught:
        admin(daemon.admin_socket, "peers")
    assert caught.value.name == "peers_off"


def test_text_completions_take_text_and_token_ids(sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0].id
    whole = sdk.completions.create(model=model, prompt="Once upon", max_tokens=8, temperature=0)
    parts = sdk.completions.create(
        model=model, prompt=["Once upon", "Once upon"], max_tokens=8, temperature=0, logprobs=2
    )
    assert [c.text for c in parts.choices] == [whole.choices[0].text] * 2
    logprobs = parts.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == 8
    ids = sdk.completions.create(model=model, prompt=[5, 6, 7], max_tokens=1)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_a_prompt_is_never_truncated(daemon: ChildDaemon, sdk: openai.OpenAI) -> None:
    model = sdk.models.list().data[0]
    context: int = model.model_dump()["context_length"]
    text = "word " * (context + 1)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=model.id, prompt=text, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["n_ctx"] == context
    assert caught.value.body["n_prompt_tokens"] > context
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(model=model.id, prompt="hi", max_tokens=context)
    assert caught.value.code == "context_length_exceeded"


def test_special_text_and_unicode_are_returned_unchanged(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    for content in ("<|im_end|><|im_start|>system", "日本語 🚀 \u0301 \u0000", "'" * 500):
        text, _, _ = ask(client, messages=[{"role": "user", "content": content}], max_tokens=8)
        assert "\ufffd\ufffd" not in text


def test_200_concurrent_streams_get_equal_tokens_for_equal_prompts(daemon: ChildDaemon) -> None:
    async def scenario() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

            async def one(number: int) -> str:
                body = {
                    "messages": [{"role": "user", "content": f"Count: {number % 4}"}],
                    "temperature": 0,
                    "max_tokens": 6,
                    "stream": True,
                }
                async with client.post(daemon.url + "/chat/completions", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    blocks = (await reply.read()).decode().split("\n\n")
                assert blocks[-2] == "data: [DONE]"
                chunks = [json.loads(b[6:]) for b in blocks if b.startswith("data: {")]
                return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

            return await asyncio.gather(*(one(i) for i in range(200)))

    texts = asyncio.run(scenario())
    assert all(texts)
    for kind in range(4):
        assert len(set(texts[kind::4])) == 1  # same prompt, same tokens, in every batch


def test_a_killed_worker_only_pauses_the_stream(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    long = {"messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": 600, "ignore_eos": True}  # fmt: skip
    undisturbed, _, _ = ask(client, **long)
    seen: list[str] = []
    killed: list[int] = []

    def kill() -> None:
        while len(seen) < 20:
            time.sleep(0.001)
        lane = admin(daemon.admin_socket, "status")["status"]["lanes"][0]
        os.kill(lane["pid"], signal.SIGKILL)
        killed.append(lane["incarnation"])

    assassin = threading.Thread(target=kill)
    assassin.start()
    body = {**long, "temperature": 0}
    reason = ""
    for chunk in client.stream_chat(body):
        for choice in chunk["choices"]:
            seen.append(choice["delta"].get("content") or "")
            reason = choice["finish_reason"] or reason
    assassin.join()
    assert "".join(seen) == undisturbed
    assert reason == "length"
    assert client.get("/health")["lanes"][0]["incarnation"] > killed[0]


def test_a_client_that_leaves_frees_its_seat(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    stream = client.stream_chat(
        {"messages": QUESTION, "max_tokens": 8000, "ignore_eos": True, "temperature": 0}
    )
    next(stream)
    assert len(admin(daemon.admin_socket, "requests")["requests"]) == 1
    stream.close()
    deadline = time.monotonic() + 60
    while admin(daemon.admin_socket, "requests")["requests"]:
        assert time.monotonic() < deadline, "the generation goes on without a reader"
        time.sleep(0.02)


def test_a_request_is_cancelled_by_its_id(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    stream = client.stream_chat({"messages": QUESTION, "max_tokens": 8000, "ignore_eos": True})
    next(stream)
    rows = admin(daemon.admin_socket, "requests")["requests"]
    admin(daemon.admin_socket, "cancel", request_id=rows[0]["request_id"])
    with contextlib.suppress(BatchEngineError):
        for _ in stream:
            pass
    assert admin(daemon.admin_socket, "requests")["requests"] == []


def test_health_and_metrics_report_lanes_and_requests(daemon: ChildDaemon) -> None:
    client = Client(daemon.url)
    health = client.get("/health")
    assert health["status"] == "ok"
    assert health["lanes"][0]["isa"] in kernels.isa_levels()

    async def scrape() -> str:
        url = daemon.url.removesuffix("/v1") + "/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as reply:
            return await reply.text()

    text = asyncio.run(scrape())
    for name in ("requests_waiting", "requests_running", "kv_usage_ratio", "ttft_seconds_count",
                 "prefix_hit_tokens_total", "slo_requests_total"):  # fmt: skip
        assert f"batchengine_{name}" in text, name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_demo_leaves_no_process_and_no_file(
    number: signal.Signals, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGTERM cleans up; after SIGKILL the kernel signals the child, which drains and ends."""
    scratch = tmp_path_factory.mktemp("s")  # a short path: unix sockets live in it
    demo = subprocess.Popen(
        [sys.executable, "-m", "service.cli.local.demo"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    for line in demo.stdout:
        if "[1/" in line:
            break
    assert list(scratch.iterdir()) != []
    child = psutil.Process(demo.pid).children()[0]
    demo.send_signal(number)
    demo.stdout.read()
    demo.stdout.close()
    assert demo.wait(30) in (130, -signal.SIGKILL)
    gone, _ = psutil.wait_procs([child], timeout=30)
    assert gone
    assert list(scratch.iterdir()) == []


def test_the_demo_prints_every_step() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.local.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("[1/", "ready after", "tokens/s", "prompt tokens cached", "kernels", "stopped"):
        assert words in done.stdout, words
    assert done.stderr == ""
