"""Hostile and broken requests: each is answered by a 4xx with a code, a parameter and a fix."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from batchengine import errors
from batchengine.config import ApiKey, Config
from batchengine.core import BatchEngineError, ErrorEvent, SlaClass
from batchengine.text.frontend import TextFrontend
from service.http import app
from service.http.access import address_of
from service.protocols import reading
from tests.service.least import least
from tests.support.fake_engine import (
    CONTEXT_TOKENS,
    VOCAB_SIZE,
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
)

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def with_keys() -> Config:
    keys = (
        ApiKey(name="alpha", key="alpha-key-123"),
        ApiKey(name="beta", key="beta-key-4567", sla_class=SlaClass.BACKGROUND),
    )
    return replace(fake_config(), auth=keys)


# route, body, status, code, param
Refused = tuple[str, dict[str, Any], int, str, str | None]
BAD_FIELDS: list[Refused] = [
    (CHAT, {}, 400, "missing_field", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": "hi"}, 400, "invalid_value", "messages"),
    (CHAT, {"messages": [1]}, 400, "invalid_value", "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "boss", "content": "x"}]},
     400, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": "x"}]},
     400, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": "x"}]},
     400, "invalid_value", "messages[0].tool_calls"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]},
     400, "invalid_value", "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     400, "invalid_value", "messages[0].content[0].type"),
    (CHAT, {"messages": MESSAGES, "n": 0}, 400, "invalid_value", "n"),
    (CHAT, {"messages": MESSAGES, "n": 10**30}, 400, "invalid_value", "n"),
    (CHAT, {"messages": MESSAGES, "n": 1.5}, 400, "invalid_value", "n"),
    (CHAT, {"messages": MESSAGES, "n": True}, 400, "invalid_value", "n"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_tokens": -2}, 400, "invalid_value", "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 1 << 40}, 400, "invalid_value",
     "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "temperature": -0.1}, 400, "invalid_value", "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": 2.1}, 400, "invalid_value", "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, 400, "invalid_value", "temperature"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "invalid_value", "top_p"),
    (CHAT, {"messages": MESSAGES, "top_p": 1.01}, 400, "invalid_value", "top_p"),
    (CHAT, {"messages": MESSAGES, "top_k": -2}, 400, "invalid_value", "top_k"),
    (CHAT, {"messages": MESSAGES, "min_p": 1.5}, 400, "invalid_value", "min_p"),
    (CHAT, {"messages": MESSAGES, "repetition_penalty": 0},
     400, "invalid_value", "repetition_penalty"),
    (CHAT, {"messages": MESSAGES, "repetition_penalty": 1e-60},  # zero as a binary32
     400, "invalid_value", "repetition_penalty"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": 2.5},
     400, "invalid_value", "presence_penalty"),
    (CHAT, {"messages": MESSAGES, "frequency_penalty": -3},
     400, "invalid_value", "frequency_penalty"),
    (CHAT, {"messages": MESSAGES, "seed": 1 << 70}, 400, "invalid_value", "seed"),
    (CHAT, {"messages": MESSAGES, "stop": ["a"] * 65}, 400, "invalid_value", "stop"),
    (CHAT, {"messages": MESSAGES, "stop": [""]}, 400, "invalid_value", "stop[0]"),
    (CHAT, {"messages": MESSAGES, "stop": 7}, 400, "invalid_value", "stop"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"x": 1}}, 400, "invalid_value", "logit_bias"),
    (CHAT, {"messages": MESSAGES, "logit_bias": {"3": 101}}, 400, "invalid_value", "logit_bias"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 21, "logprobs": True},
     400, "invalid_value", "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "stream": "yes"}, 400, "invalid_value", "stream"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": 1}}, 400, "invalid_value",
     "stream_options.include_usage"),
    (CHAT, {"messages": MESSAGES, "service_tier": "gold"}, 400, "invalid_value", "service_tier"),
    (CHAT, {"messages": MESSAGES, "batchengine": {"class": "vip"}}, 400, "invalid_value",
     "batchengine.class"),
    (CHAT, {"messages": MESSAGES, "batchengine": {"ttft_ms": 0}}, 400, "invalid_value",
     "batchengine.ttft_ms"),
    (CHAT, {"messages": MESSAGES, "batchengine": {"ttlt_ms": 1e-60}}, 400, "invalid_value",
     "batchengine.ttlt_ms"),
    (CHAT, {"messages": MESSAGES, "batchengine": {"clas": "batch"}}, 400, "unknown_parameter",
     "batchengine.clas"),
    (CHAT, {"messages": MESSAGES, "session_id": "a\u0000b"}, 400, "invalid_value", "session_id"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]},
     400, "invalid_value", "tools[0]"),
    (CHAT, {"messages": MESSAGES, "grammar": 1}, 400, "invalid_value", "grammar"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"template": "x"}}, 400, "invalid_value",
     "chat_template_kwargs.template"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, 400, "invalid_value",
     "chat_template_kwargs.messages"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": 1}}, 400,
     "invalid_value", "chat_template_kwargs.enable_thinking"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "{{ evil }}"}, 400, "invalid_value",
     "reasoning_effort"),
    (CHAT, {"messages": MESSAGES, "model": "gpt-4"}, 404, "model_not_found", "model"),
    (CHAT, {"messages": MESSAGES, "model": "fake:vip"}, 404, "model_not_found", "model"),
    (TEXT, {}, 400, "missing_field", "prompt"),
    (TEXT, {"prompt": ""}, 400, "invalid_value", "prompt"),
    (TEXT, {"prompt": []}, 400, "invalid_value", "prompt"),
    (TEXT, {"prompt": [1, "a"]}, 400, "invalid_value", "prompt"),
    (TEXT, {"prompt": [True, False]}, 400, "invalid_value", "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "invalid_value", "prompt[0]"),
    (TEXT, {"prompt": ["x"] * 33}, 400, "invalid_value", "prompt"),
    (TEXT, {"prompt": ["x"] * 5, "n": 8}, 400, "invalid_value", "n"),
    (TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, 400, "unsupported_parameter", "echo"),
    (TEXT, {"prompt": "x", "suffix": "y"}, 400, "unsupported_parameter", "suffix"),
    (TEXT, {"prompt": "x", "n": 3, "best_of": 2}, 400, "invalid_value", "best_of"),
    (TEXT, {"prompt": "x", "logprobs": True}, 400, "invalid_value", "logprobs"),
    (TEXT, {"prompt": "x", "logprobs": 99}, 400, "invalid_value", "logprobs"),
]  # fmt: skip


def bad_requests(vocab: int, context: int) -> list[Refused]:
    """Requests that a model of so many tokens and such a context refuses."""

    def said(text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}

    biases = {"messages": MESSAGES, "logit_bias": {str(vocab): 1}}
    whole = {"max_tokens": context - 1}
    return [
        *BAD_FIELDS,
        (CHAT, biases, 400, "invalid_value", "logit_bias"),
        (TEXT, {"prompt": [1, vocab]}, 400, "invalid_value", "prompt[1]"),
        (CHAT, said("a b c " * context), 400, "context_length_exceeded", "messages"),
        (CHAT, said("x" * 130 * context), 400, "context_length_exceeded", "messages"),
        (CHAT, {"messages": MESSAGES, **whole}, 400, "context_length_exceeded", "messages"),
        (TEXT, {"prompt": "xy", **whole}, 400, "context_length_exceeded", "prompt"),
    ]


async def test_wrong_fields_are_named_in_the_error() -> None:
    async with serving() as served:
        for path, body, status, code, param in bad_requests(VOCAB_SIZE, CONTEXT_TOKENS):
            for stream in (False, True):  # streaming must not turn errors into events
                sent = body if "stream" in body else {**body, "stream": stream}
                got, reply, headers = await post(served, path, sent)
                error = reply["error"]
                label = json.dumps(body)[:100]
                assert (got, error["code"], error["param"]) == (status, code, param), label
                assert error["message"], label
                assert error["what"], label
                assert error["type"] == "invalid_request_error", label
                lower = {name.lower() for name in headers}
                assert "x-request-id" in lower, label
        assert served.engine.generations == []


async def test_context_errors_give_both_lengths_and_never_truncate() -> None:
    async with serving() as served:
        _, reply, _ = await post(served, TEXT, {"prompt": "x" * 2048})
        assert reply["error"]["n_prompt_tokens"] == 2048
        assert reply["error"]["n_ctx"] == 2048
        assert "--ctx" in reply["error"]["fix"]
        status, reply, _ = await post(served, TEXT, {"prompt": "x" * 2047})
        assert status == 200  # the default of 16 tokens shrinks instead of refusing
        assert reply["usage"]["prompt_tokens"] == 2047
        assert served.engine.generations[0].request.tokens_max == 1


# body bytes, param
BAD_BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"null", None),
    (b'{"messages": [], }', None),
    (b'\xff\xfe{"messages": []}', None),
    (b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}', None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages"),
    (b'{"messages": [{"role": "user", "con\\udc00tent": "x"}]}', "messages"),
    (b'{"temperature": NaN, "messages": []}', "temperature"),
    (b'{"temperature": -Infinity, "messages": []}', "temperature"),
    (b'{"temperature": 1e999, "messages": []}', "temperature"),
    (b'{"n": 1, "n": 2, "messages": []}', "n"),
    (b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "role"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None),
    (b'{"tools": ' + b"[" * 70 + b"]" * 70 + b"}", "tools"),
    (b'{"tools": ' + b'{"a":' * 70 + b"1" + b"}" * 71, "tools"),
    (b"[" * 100_000, None),
    (b'{"a":' * 100_000, None),
]


async def test_bodies_that_are_not_json_are_refused() -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        for body, param in BAD_BODIES:
            for path in (CHAT, TEXT):
                async with client.post(
                    path, data=body, headers={"Content-Type": "application/json"}
                ) as reply:
                    error = (await reply.json())["error"]
                seen = (reply.status, error["code"], error["param"])
                assert seen == (400, "invalid_json", param), body[:60]


def worst_bodies(size: int = 4 << 20) -> list[tuple[str, str, bytes]]:
    """(name, path, body) of bodies that cost most to parse, check, render or tokenise."""

    def body(**fields: object) -> bytes:
        return json.dumps(fields).encode()

    def said(text: str) -> bytes:
        return body(messages=[{"role": "user", "content": text}])

    return [
        ("empty lists", CHAT, b'{"messages": [' + b"[]," * (size // 3) + b"[]]}"),
        ("empty objects", CHAT, b'{"metadata": [' + b"{}," * (size // 3) + b"{}]}"),
        ("a list of numbers", TEXT, b'{"prompt": [' + b"1," * (size // 2) + b"1]}"),
        ("escapes", CHAT, b'{"messages": "' + b"\\ud83d\\ude00" * (size // 12) + b'"}'),
        ("control tokens begun", CHAT, said("<|im" * (size // 4))),
        ("control tokens", CHAT, said("<|im_end|>" * (size // 10))),
        ("one character", CHAT, said("a" * size)),
        ("spaces", TEXT, body(prompt=" " * size)),
        ("many messages", CHAT, body(messages=[{"role": "user", "content": "x"}] * (size // 42))),
        ("biases", CHAT, body(messages=[], logit_bias={str(i): 1.0 for i in range(size // 21)})),
        ("fields", CHAT, body(**{f"field{i}": 1 for i in range(size // 21)})),
        ("tools", CHAT, body(messages=[], tools=[{"a": {"b": 1}}] * (size // 21))),
        ("depth", CHAT, b'{"messages": ' + b"[" * (size // 2) + b"]" * (size // 2) + b"}"),
        ("digits", CHAT, b'{"seed": ' + b"1" * size + b"}"),
    ]


async def longest_hold_ms(done: asyncio.Event) -> float:
    """The most processor time that this process spent between two turns of the event loop."""
    worst = 0.0
    while not done.is_set():
        began = time.process_time()
        await asyncio.sleep(0.0005)
        worst = max(worst, time.process_time() - began)
    return 1000 * worst


@pytest.mark.alone
async def test_no_body_holds_the_event_loop(pocket_path: Path) -> None:
    """R16: bodies are read in another process; this one only passes their bytes on."""
    engine = FakeEngine()
    text = await TextFrontend.open(pocket_path, reader=reading.READER)
    engine.text = text  # type: ignore[assignment]
    engine.info = replace(engine.info, context_tokens=32_768, vocab_size=text.tokenizer.vocab_size)
    try:
        async with serving(engine) as served:
            assert (await post(served, CHAT, chat()))[0] == 200
            for name, path, body in worst_bodies():
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\nContent-Type: application/json\r\n\r\n"
                )
                request = head.encode() + body

                async def hold_ms(request: bytes = request, name: str = name) -> float:
                    done = asyncio.Event()
                    probe = asyncio.create_task(longest_hold_ms(done))
                    answer = await served.raw(request, timeout_s=30)
                    done.set()
                    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 ")), (name, answer)
                    return await probe

                assert await least(hold_ms, 20.0) < 20.0, name
            answer = await served.raw(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000000\r\n"
                "Content-Type: application/json\r\n\r\n".encode()
            )
            assert answer.startswith(b"HTTP/1.1 413 ")  # over 32,768 tokens: refused unread
    finally:
        await text.close()


async def test_a_bad_request_does_not_affect_others() -> None:
    engine = FakeEngine(reply=["x"] * 50, delay_s=0.01)
    async with serving(engine) as served:
        stream = asyncio.create_task(post(served, CHAT, chat()))
        await asyncio.sleep(0.05)
        async with aiohttp.ClientSession(served.base) as client:
            for body, _ in BAD_BODIES:
                async with client.post(
                    CHAT, data=body, headers={"Content-Type": "application/json"}
                ):
                    pass
        status, reply, _ = await stream
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == "x" * 50


async def test_content_type_and_encoding_are_checked() -> None:
    body = json.dumps(chat()).encode()
    cases: list[tuple[dict[str, str], int]] = [
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "Application/JSON"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json; charset=latin-1"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "br, gzip"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "identity"}, 200),
    ]
    async with serving() as served:
        for headers, status in cases:
            head = "".join(f"{n}: {v}\r\n" for n, v in headers.items())
            answer = await served.raw(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                f"Content-Length: {len(body)}\r\n{head}\r\n".encode()
                + body
            )
            assert answer.startswith(f"HTTP/1.1 {status} ".encode()), (headers, answer[:200])
        answer = await served.raw(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert answer.startswith(b"HTTP/1.1 415 ")


async def test_a_body_too_large_is_413_with_and_without_a_length() -> None:
    config = fake_config(body_bytes_max=10_000)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with serving(config=config) as served:
        answer = await served.raw(f"{head}Content-Length: 100000000000\r\n\r\n{{".encode())
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"request_too_large" in answer
        chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
        answer = await served.raw(
            f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 5 + b"0\r\n\r\n"
        )
        assert answer.startswith(b"HTTP/1.1 413 ")


HOSTS: list[tuple[str, int]] = [
    ("Host: localhost", 200),
    ("Host: localhost:7717", 200),
    ("Host: 127.0.0.1:1", 200),
    ("Host: [::1]:80", 200),
    ("Host: LOCALHOST.", 200),
    ("Host: evil.example", 403),
    ("Host: localhost.evil.example", 403),
    ("Host: 127.0.0.1.evil.example", 403),
    ("Host: 0.0.0.0", 403),
    ("Host: evil.example#localhost", 403),
    ("Host:", 400),
    ("X-No-Host: 1", 400),
    ("Host: localhost\r\nHost: evil.example", 400),
    ("Host: localhost\r\nOrigin: http://evil.example", 403),
    ("Host: localhost\r\nOrigin: null", 403),
    ("Host: localhost:7717\r\nOrigin: http://localhost:7717", 200),
    ("Host: localhost:7717\r\nOrigin: http://localhost:9999", 403),
    ("Host: [::1]:7717", 200),
    ("Host: [::1]evil.example", 403),
    ("Host: localhost:http", 403),
    ("Host: user@localhost", 403),
]


async def test_host_and_origin_are_checked() -> None:
    async with serving() as served:
        for lines, status in HOSTS:
            for path in ("/health", "/nothing"):
                wanted = 404 if status == 200 and path == "/nothing" else status
                answer = await served.raw(
                    f"GET {path} HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\r\n".encode()
                )
                assert answer[8:13] == f" {wanted} ".encode(), (lines, answer[:120])
                assert b"Access-Control" not in answer


MALFORMED: list[bytes] = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100 + b"\r\n\r\n",  # TLS hello
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 10_000 + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\n{}   ",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
]


async def test_malformed_http_is_refused_and_the_daemon_continues() -> None:
    async with serving() as served:
        for data in MALFORMED:
            answer = await served.raw(data, timeout_s=2)
            assert answer[:5] == b"HTTP/", data[:80]
            assert answer[9:10] == b"4", (data[:80], answer[:200])
            assert b"Traceback" not in answer
            assert b"aiohttp" not in answer
        assert (await post(served, CHAT, chat()))[0] == 200


async def test_expect_is_answered_like_other_headers() -> None:
    """aiohttp handles Expect before any middleware of the service."""

    def head(*lines: str) -> bytes:
        fixed = (f"POST {CHAT} HTTP/1.1", "Content-Type: application/json", "Content-Length: 9")
        return "\r\n".join((*fixed, *lines, "", "")).encode()

    async with serving(config=with_keys()) as served:
        known = ("Host: localhost", "Authorization: Bearer alpha-key-123")
        cases = (
            ((*known, "Expect: 100-continue", "Connection: close"), b"100"),
            ((*known, "Expect: <script>", "Connection: close"), b"417"),
            (("Host: evil", "Expect: 100-continue"), b"403"),
            (("Host: evil", "Expect: <script>"), b"403"),
            (("Host: localhost", "Expect: 100-continue"), b"401"),
            (("Host: localhost", "Expect: <script>"), b"401"),
        )
        sent = (head(*lines) + b'{"n": 0} ' for lines, _ in cases)
        answers = await asyncio.gather(*(served.raw(data, timeout_s=2) for data in sent))
        for (lines, status), answer in zip(cases, answers, strict=True):
            assert answer[9:12] == status, (lines, answer[:200])
            assert b"<script>" not in answer
            if status == b"100":
                assert b"HTTP/1.1 400 " in answer
            assert b'"error"' in answer


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as served:
        one = b"GET /v1/models/fake HTTP/1.1\r\nHost: localhost\r\n\r\n"
        last = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await served.raw(one * 500 + last, timeout_s=10)
        assert answer.count(b"HTTP/1.1 200 OK") == 500
        assert answer.count(b"HTTP/1.1 404 ") == 1


async def test_a_wrong_method_and_a_wrong_route_are_refused() -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        for method, path, status, code in (
            ("GET", CHAT, 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("GET", "/nowhere", 404, "route_not_found"),
            ("POST", "/v1/nothing", 404, "route_not_found"),
            ("GET", "/v1/models/none", 404, "model_not_found"),
            ("POST", "/v1/embeddings", 404, "not_supported"),
            ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ):
            async with client.request(method, path) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["code"]) == (status, code), path
                assert error["fix"]


async def test_unknown_fields_are_counted_or_refused() -> None:
    async with serving() as served:
        body = chat(best_friend=1, mirostat=2)
        status, _, _ = await post(served, CHAT, body)
        assert status == 200
        text = served.engine.metrics.render()[0].decode()
        assert 'field="mirostat"' in text
        status, reply, _ = await post(served, CHAT + "?strict=1", body)
        assert (status, reply["error"]["code"]) == (400, "unknown_parameter")
        assert reply["error"]["param"] == "best_friend"
    async with serving(config=fake_config(strict_fields=True)) as served:
        assert (await post(served, CHAT, body))[0] == 400
        assert (await post(served, CHAT, chat()))[0] == 200


def all_routes(served: Served) -> list[tuple[str, str]]:
    """Every method and path that the application routes, but those that need no key."""
    free = {row.path for row in app.ROUTES if not row.needs_key}
    found: list[tuple[str, str]] = []
    for route in app.build(served.service).router.routes():
        path = (route.resource.canonical if route.resource else "/").replace("{model}", "fake")
        method = "POST" if route.method == "*" else route.method
        if path not in free:
            found.append((method, path.replace("{rest}", "x")))
    return found


async def test_every_route_needs_the_key() -> None:
    async with serving(config=with_keys()) as served:
        routes = [*all_routes(served), ("GET", "/nothing"), ("DELETE", "/health")]
        assert len(routes) > 20
        wrong: list[dict[str, str]] = [
            {},
            {"Authorization": "Bearer wrong-key-0"},
            {"Authorization": "Bearer "},
            {"Authorization": "Basic alpha-key-123"},
            {"Authorization": "alpha-key-123"},
            {"x-api-key": "alpha-key-12"},
            {"Authorization": "Bearer alpha-key-123\xff"},
        ]
        async with aiohttp.ClientSession(served.base) as client:

            async def refused(method: str, path: str, headers: dict[str, str]) -> None:
                async with client.request(method, path, headers=headers) as reply:
                    assert reply.status == 401, (method, path, headers)
                    if method != "HEAD":
                        assert (await reply.json())["error"]["type"] == "authentication_error"

            keyless = served.service.config.server.keyless_routes
            await asyncio.gather(
                *(refused(*r, h) for r in routes for h in wrong if h or r[1] not in keyless)
            )
            right = {"Authorization": "Bearer alpha-key-123"}
            for method, path in routes:
                async with client.request(method, path, headers=right) as reply:
                    assert reply.status != 401, (method, path)


async def test_keys_have_a_tenant_and_a_class() -> None:
    async with serving(config=with_keys()) as served:
        seen: list[tuple[str, str | None, SlaClass]] = []
        for headers in (
            {"Authorization": "Bearer alpha-key-123"},
            {"Authorization": "bearer alpha-key-123"},
            {"x-api-key": "beta-key-4567"},
        ):
            status, _, _ = await post(served, CHAT, chat(session_id="shared"), headers=headers)
            assert status == 200
            request = served.engine.generations[-1].request
            seen.append((request.tenant, request.session_id, request.sla.sla_class))
        assert [s[0] for s in seen] == ["alpha", "alpha", "beta"]
        assert seen[0][1] == seen[1][1] != seen[2][1]  # one name, two tenants, two sessions
        assert [s[2] for s in seen] == ["standard", "standard", "background"]

        # another tenant's session id is only a name for this one
        foreign, mine = seen[0][1], {"x-api-key": "beta-key-4567"}
        assert foreign is not None
        await post(served, CHAT, chat(session_id=foreign), headers=mine)
        assert served.engine.generations[-1].request.session_id != foreign


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (ApiKey("a", "key-of-a-1234"), "standard"),
        (ApiKey("a", "key-of-a-1234", sla_class=SlaClass.BACKGROUND), "background"),
        (
            ApiKey(
                "a",
                "key-of-a-1234",
                sla_class=SlaClass.BACKGROUND,
                class_max=SlaClass.INTERACTIVE,
            ),
            "interactive",
        ),
    ],
)
async def test_a_class_above_that_of_the_key_is_served_as_that(key: ApiKey, expected: str) -> None:
    other = ApiKey("b", "key-of-b-1234")
    async with serving(config=replace(fake_config(), auth=(key, other))) as served:
        asked = chat(batchengine={"class": "interactive", "ttft_ms": 0.001})
        status, _, headers = await post(served, CHAT, asked, headers={"x-api-key": key.key})
        assert (status, headers["x-batchengine-class"]) == (200, expected)
        assert served.engine.generations[-1].request.sla.sla_class == expected
        lower = chat(batchengine={"class": "batch"})
        _, _, headers = await post(served, CHAT, lower, headers={"x-api-key": key.key})
        assert headers["x-batchengine-class"] == "batch"


async def test_no_answer_repeats_a_key_or_a_path(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="batchengine")
    async with serving(config=with_keys()) as served:
        marker = "marker-of-a-prompt"
        for headers in ({}, {"x-api-key": "alpha-key-124"}, {"x-api-key": "alpha-key-123"}):
            _, reply, _ = await post(served, CHAT, chat(marker), headers=headers)
            text = json.dumps(reply)
            assert "alpha-key" not in text
            assert "/somewhere" not in text
    logged = caplog.text + "".join(str(getattr(one, "facts", "")) for one in caplog.records)
    assert marker not in logged
    assert "alpha-key" not in logged
    assert "'class': 'standard'" in logged  # the log is not empty


async def test_an_unexpected_exception_is_a_500_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeEngine()

    def broken(request: Any) -> Any:
        raise RuntimeError("secret /etc/passwd 0x7f00")

    engine.submit = broken
    async with serving(engine) as served:
        status, reply, _ = await post(served, CHAT, chat())
        assert (status, reply["error"]["code"]) == (500, "internal_error")
        assert "secret" not in json.dumps(reply)
        assert reply["error"]["what"].split()[-1].startswith("req_")
        assert (await post(served, "/v1/chat/completions", {"messages": []}))[0] == 400
    assert "secret" in caplog.text  # the details are in the log


async def test_admitted_choices_are_cancelled_when_another_one_is_refused() -> None:
    engine = FakeEngine()
    real = engine.submit

    def third_refused(request: Any) -> Any:
        if len(engine.generations) == 2:
            raise errors.OVERLOADED(waiting=9)
        return real(request)

    engine.submit = third_refused  # type: ignore[method-assign]
    async with serving(engine) as served:
        status, _, _ = await post(served, CHAT, chat(n=4))
        assert status == 503
        assert [g.cancelled.is_set() for g in engine.generations] == [True, True]


BROWSER = "User-Agent: Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/130.0\r\n"


@pytest.mark.parametrize(
    ("lines", "is_page"),
    [
        (BROWSER + "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: image\r\n", True),
        (BROWSER + "Sec-Fetch-Site: same-site\r\n", True),
        ("Sec-Fetch-Site: cross-site\r\nx-batchengine-session-id: s\r\n", True),
        (BROWSER + "Referer: http://evil/\r\n", True),  # on plain HTTP there is no Sec-Fetch-Site
        (BROWSER, True),
        ("Referer: http://evil/\r\n", True),
        (BROWSER + "Sec-Fetch-Site: same-origin\r\n", False),
        (BROWSER + "x-batchengine-session-id: s\r\n", False),
        ("User-Agent: curl/8.5.0\r\n", False),
        ("", False),
    ],
)
async def test_a_web_page_cannot_take_a_running_answer_over(lines: str, is_page: bool) -> None:
    """An image on any page sends a GET without Origin to a daemon without keys."""
    engine = FakeEngine(["tok"] * 400, delay_s=0.01)
    async with serving(engine) as served, aiohttp.ClientSession(served.base) as client:
        async with client.post(CHAT, json=chat(session_id="s", stream=True)) as reply:
            await reply.content.readline()
            answer = await served.raw(
                f"GET /v1/stream?session_id=s HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n".encode(),
                timeout_s=0.3,
            )
        assert answer.startswith(b"HTTP/1.1 403 " if is_page else b"HTTP/1.1 200 ")
        assert len(engine.generations) == (1 if is_page else 2)


async def test_a_page_of_another_site_gets_nothing_at_all() -> None:
    async with serving() as served:
        for path in ("/health", "/v1/models", "/v1/sessions", "/metrics"):
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            answer = await served.raw(f"{head}Sec-Fetch-Site: cross-site\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 403 ")
            answer = await served.raw(f"{head}Sec-Fetch-Site: none\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_addresses_of_one_ipv6_network_count_as_one_client() -> None:
    hosts = ("2001:db8::1", "2001:db8::2:3", "2001:db8::a:b:c:d", "2001:db8:0:0:1::")
    assert len({address_of((host, 40_000, 0, 0)) for host in hosts}) == 1
    assert address_of(("fe80::1:2:3:4%eth0", 1, 0, 2)) == address_of(("fe80::9", 2, 0, 2))
    assert address_of(("2001:db8:0:1::1", 1, 0, 0)) != address_of((hosts[0], 1, 0, 0))
    assert address_of(("192.0.2.1", 1)) != address_of(("192.0.2.2", 1))
    mapped = {address_of((f"::ffff:192.0.2.{number}", 1, 0, 0)) for number in range(3)}
    assert mapped == {"192.0.2.0", "192.0.2.1", "192.0.2.2"}  # of a socket for both protocols
    assert address_of(None) == ""


@pytest.mark.alone
async def test_wrong_keys_wait_and_lock_no_client_out() -> None:
    """After ten of them from one address, attempts wait; a key that was right there does not."""
    keys = (ApiKey("old", "old-key-12345"), ApiKey("new", "new-key-12345"))
    config = replace(fake_config(), auth=keys)
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:

        async def seconds(key: str, status: int) -> float:
            began = time.monotonic()
            async with client.get("/health", headers={"Authorization": f"Bearer {key}"}) as reply:
                assert reply.status == status
            return time.monotonic() - began

        await seconds("old-key-12345", 200)
        await asyncio.gather(*(seconds(f"guess-{i}", 401) for i in range(10)))
        slow = [seconds(f"guess-{i}", 401) for i in range(10, 40)]
        waiting = asyncio.gather(*slow)
        await asyncio.sleep(0.02)
        known_s = await least(lambda: seconds("old-key-12345", 200), 0.5)
        guess_s = await seconds("new-key-12345", 200)
        right_s = await least(lambda: seconds("new-key-12345", 200), 0.5)
        assert max(known_s, right_s) < 0.5 < guess_s  # a guess that is right waits like others
        assert sum(await waiting) > 30
        answer = await served.raw(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
            b"Authorization: Bearer guess\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
        )
        assert answer.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_names_a_folder_of_this_machine(stream: bool) -> None:
    """Errors of the disk have paths in their texts; callers get the name of the file."""
    config = fake_config()
    config = replace(
        config,
        model=replace(config.model, path="/secret/models/fake.gguf"),
        store=replace(config.store, dir="/var/secret/kv"),
    )
    engine = FakeEngine()
    why = "[Errno 5] /var/secret/kv/ledger.db and /secret/models/fake.gguf"
    async with serving(engine, config) as served, aiohttp.ClientSession(served.base) as client:
        engine.stats = lambda: {"troubles": [why]}  # type: ignore[method-assign]
        engine.script = _failing(errors.NOT_DURABLE(why=why))  # type: ignore[method-assign]
        async with client.get("/health") as reply:
            health = await reply.text()
        async with client.post(CHAT, json=chat(stream=stream)) as reply:
            answer = await reply.text()
    for text in (health, answer):
        assert "ledger.db and fake.gguf" in text
        assert "secret" not in text


def _failing(error: BatchEngineError) -> Any:
    async def script(_: object) -> Any:
        yield ErrorEvent(error)

    return script
