"""The dashboard without a browser: its files, its policy, and the stream of snapshots."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from batchengine.config import ApiKey, Config
from batchengine.core import SlaClass
from service.http.dashboard import page, snapshots
from tests.support.fake_engine import FakeEngine, chat, fake_config, post, serving

OWN = ("index.html", "app.js", "style.css")


def with_keys(*names: str) -> tuple[Config, list[dict[str, str]]]:
    """A configuration with API keys, and the headers of each."""
    auth = tuple(ApiKey(key=f"key-{n}" * 8, name=n, sla_class=SlaClass.STANDARD) for n in names)
    config = dataclasses.replace(fake_config(), auth=auth)
    return config, [{"Authorization": f"Bearer {one.key}"} for one in auth]


async def shown(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in reply.content:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


async def test_the_page_and_its_files_need_no_key_and_are_under_a_policy() -> None:
    config, _ = with_keys("a")
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:
        async with client.get("/") as reply:
            assert (reply.status, reply.content_type) == (200, "text/html")
            text = await reply.text()
        names = set(re.findall(r'(?:src|href)="/static/([^"]+)"', text))
        assert {"app.js", "style.css", "uPlot.iife.min.js"} <= names
        for name in (*names, "uPlot.LICENSE.txt"):
            async with client.get(f"/static/{name}") as reply:
                assert reply.status == 200, name
                policy, tag = reply.headers["Content-Security-Policy"], reply.headers["ETag"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            async with client.get(f"/static/{name}", headers={"If-None-Match": tag}) as reply:
                assert reply.status == 304
        for path in ("/static/none.js", "/static/..%2fapp.py", "/static/"):
            async with client.get(path) as reply:
                assert reply.status in (401, 404)
        for path in ("/api/live", "/v1/sessions", "/static/app.js/more"):
            async with client.get(path) as reply:
                assert reply.status == 401, path
        async with client.get("/", headers={"Host": "evil.example"}) as reply:
            assert reply.status == 403


def test_own_files_have_nothing_inline_and_nothing_from_elsewhere() -> None:
    for path in page.FOLDER.iterdir():
        if path.suffix not in (".html", ".js", ".css") or "uPlot" in path.name:
            continue
        text = path.read_text()
        assert "innerHTML" not in text, path
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text), path
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert (page.FOLDER / name).exists(), name


async def test_a_snapshot_has_the_numbers_and_the_keys_own_sessions() -> None:
    engine = FakeEngine()
    config, (first, second) = with_keys("a", "b")
    async with serving(engine, config) as served, aiohttp.ClientSession(served.base) as client:
        await post(served, "/v1/chat/completions", chat(session_id="secret"), headers=first)
        for headers, count in ((first, 1), (second, 0)):
            async with client.get("/api/live", headers=headers) as reply:
                assert reply.content_type == "text/event-stream"
                found = await anext(shown(reply))
            assert len(found["sessions"]) == count
            assert found["state"] == "ready"
            assert found["lanes"][0]["name"] == "cpu"
            assert "pid" not in json.dumps(found)
            assert "tenant" not in json.dumps(found)


async def test_a_daemon_that_loads_is_shown_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PERIOD_S", 0.05)
    engine = FakeEngine()
    engine.phase, engine.progress = "loading", 0.43
    async with (
        serving(engine) as served,
        aiohttp.ClientSession(served.base) as client,
        client.get("/api/live") as reply,
    ):
        stream = shown(reply)
        assert (await anext(stream))["progress"] == 0.43
        engine.phase = "ready"
        while "lanes" not in await anext(stream):
            pass
        engine.phase = "stopped"  # the stream ends, so that the daemon can
        async with asyncio.timeout(60):
            async for _ in stream:
                pass


async def test_watchers_are_few_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WATCHERS_OF_KEY_MAX", 2)
    config, (first, second) = with_keys("a", "b")
    async with serving(config=config) as served, aiohttp.ClientSession(served.base) as client:
        open_ = [await client.get("/api/live", headers=first) for _ in range(2)]
        assert [reply.status for reply in open_] == [200, 200]
        open_.append(await client.get("/api/live", headers=second))
        assert open_[-1].status == 200
        async with client.get("/api/live", headers=first) as reply:
            assert reply.status == 503
            what = (await reply.json())["error"]["what"]
            assert what == "2 dashboards of this key are open, the limit is 2"
        for reply in open_:
            reply.close()
        async with asyncio.timeout(60):
            while True:
                async with client.get("/api/live", headers=first) as reply:
                    if reply.status == 200:
                        break
                await asyncio.sleep(0.01)


async def test_watchers_of_a_key_share_a_snapshot() -> None:
    made: list[str | None] = []

    class Counting(FakeEngine):
        def sessions(self, tenant: str | None = None, count_max: int | None = None) -> Any:
            made.append(tenant)
            return super().sessions(tenant, count_max)

    async with serving(Counting()) as served, aiohttp.ClientSession(served.base) as client:

        async def watch() -> None:
            async with client.get("/api/live") as reply:
                await anext(shown(reply))

        await watch()
        await asyncio.gather(*(watch() for _ in range(12)))
        assert len(made) <= 3
