"""Hostile and broken bodies: each is answered by a 4xx with a code, a parameter and a fix."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from batchengine.text.frontend import TextFrontend
from service.protocols import reading
from tests.service.http.hostile import CHAT, TEXT
from tests.service.least import least
from tests.support.engines import until
from tests.support.fake_engine import (
    CONTEXT_TOKENS,
    VOCAB_SIZE,
    FakeEngine,
    chat,
    fake_config,
    post,
    serving,
)

MESSAGES = [{"role": "user", "content": "hi"}]


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
    (CHAT, {"messages": MESSAGES, "top_p": -0.1}, 400, "invalid_value", "top_p"),
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
    (CHAT, {"messages": MESSAGES, "min_tokens": -1}, 400, "invalid_value", "min_tokens"),
    (TEXT, {"prompt": "x", "min_tokens": 17}, 400, "invalid_value", "min_tokens"),
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
    (TEXT, {"prompt": "x", "echo": True, "logprobs": 21}, 400, "invalid_value", "logprobs"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "invalid_value", "max_tokens"),
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


async def test_a_byte_order_mark_is_read_over() -> None:
    """Some programs of Windows write one."""
    headers = {"Content-Type": "application/json"}
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        data = b"\xef\xbb\xbf" + json.dumps(chat()).encode()
        async with client.post(CHAT, data=data, headers=headers) as reply:
            assert reply.status == 200
        data = b'{"messages": [{"role": "user", "content": "a\x01"}]}'
        async with client.post(CHAT, data=data, headers=headers) as reply:
            why = (await reply.json())["error"]["why"]
    assert why == "Invalid control character at character 44"


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
                    answer = await served.raw(request, timeout_s=120)
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
        await until(lambda: bool(engine.generations))
        async with aiohttp.ClientSession(served.base) as client:
            for body, _ in BAD_BODIES:
                async with client.post(
                    CHAT, data=body, headers={"Content-Type": "application/json"}
                ):
                    pass
        status, reply, _ = await stream
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == "x" * 50


async def test_a_wrong_value_of_a_template_argument_is_not_called_unknown() -> None:
    body = {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": "yes"}}
    async with serving() as served:
        _, answer, _ = await post(served, CHAT, body)
    assert answer["error"]["what"] == "enable_thinking has a wrong value"
    assert answer["error"]["fix"] == "send true or false"


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
