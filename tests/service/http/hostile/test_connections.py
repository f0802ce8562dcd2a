"""Hostile heads of requests: hosts, malformed HTTP, methods and routes that are not there."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.service.http.hostile import CHAT
from tests.support.fake_engine import (
    chat,
    post,
    serving,
    with_keys,
)

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
