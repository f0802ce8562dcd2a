"""Keys, web pages of other sites, and addresses: who gets an answer, and of which class."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import aiohttp
import pytest

from batchengine.config import ApiKey
from batchengine.core import SlaClass
from service.http import access, app
from service.http.access import address_of
from tests.service.http.hostile import CHAT
from tests.service.least import least
from tests.support.fake_engine import (
    FakeEngine,
    Served,
    chat,
    fake_config,
    post,
    serving,
    with_keys,
)


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


async def test_every_route_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "WAIT_SECONDS", 0.0)
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
