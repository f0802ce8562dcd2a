"""The dashboard in headless Chromium, beside a daemon with two lanes: `make browser`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from batchengine.config import ApiKey
from batchengine.core import SlaClass
from tests.service.http.dashboard.browser import Page, browsing, path_of_chromium
from tests.support.fake_engine import FakeEngine, Served, chat, fake_config, post, serving

PROGRAM = path_of_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
]
NAMES = "[...document.querySelectorAll('.chip')].map((one) => one.dataset.session)"


class Scene(FakeEngine):
    """Two lanes, and sessions that tests place on them."""

    def __init__(self) -> None:
        super().__init__()
        self.lane_names = ["fast", "bulk"]
        self.where: dict[str, str] = {}
        self.computed = 0

    def lanes(self) -> Any:
        self.computed += 50
        return [
            {
                "name": name, "kind": "cpu", "tier": name, "state": "ready", "why": "",
                "running": 1, "waiting": 0, "step_ms": 2.5, "tokens_generated": self.computed,
                "pages": 100, "pages_free": 60,
            }
            for name in self.lane_names
        ]  # fmt: skip

    def sessions(self, tenant: str | None = None, count_max: int | None = None) -> Any:
        rows = super().sessions(tenant, count_max)
        return [{**row, "lane": self.where.get(row["session_id"], "bulk")} for row in rows]

    def stats(self) -> Any:
        return {
            "requests_running": 1, "requests_waiting": 0, "sessions": len(self.known),
            "uptime_s": 75, "outcomes": {"interactive": {"met": 3, "ttft_miss": 1}},
            "prefix_hit_tokens": 1234, "kv_tier": "ok", "troubles": [],
            "store": {"budget_bytes": 1 << 30, "used_bytes": 1 << 28, "pages_total": 7},
        }  # fmt: skip

    def peer_names(self) -> Any:
        return ["host-b"]

    async def peers(self, *, measure: bool = False) -> Any:
        row = {"name": "host-b", "state": "up", "rtt_ms": 0.4, "pages_taken": 31, "why": ""}
        return {"name": "host-a", "peers": [row]}

    def explain(self, given: str, tenant: str | None = None) -> Any:
        route = [{"peer": "host-b", "pages": 31}, {"peer": "", "pages": 2}]
        return {**super().explain(given, tenant), "route": route}

    def _decision(self, generation: Any) -> dict[str, Any]:
        move = {
            "from": "bulk", "to": "fast", "cause": "promotion", "result": "moved", "gap_ms": 1.5,
            "after_ms": 400.0,
        }  # fmt: skip
        done = {"lane": "fast", "tokens": 9, "ttft_ms": 100.0, "tpot_ms": 60.0, "finish": "stop"}
        found = super()._decision(generation)
        return found | {"lane": "fast", "moves": [move], "happened": done, "age_s": 2.0}


async def open_scene(served: Served, page: Page, *names: str) -> list[str]:
    """Sessions of these names, and the page that shows them; returns their ids."""
    ids: list[str] = []
    for name in names:
        body = (await post(served, "/v1/chat/completions", chat(session_id=name)))[1]
        ids.append(body["batchengine"]["session_id"])
    await page.open(served.base + "/")
    await page.until(f"{NAMES}.length >= {min(60, len(names))}")
    return ids


async def test_lanes_sessions_and_a_move_are_shown() -> None:
    assert PROGRAM is not None
    engine = Scene()
    async with serving(engine) as served, browsing(PROGRAM) as page:
        first, second = await open_scene(served, page, "one", "two")
        assert set(await page.value(NAMES)) == {first, second}
        text = "document.body.innerText"
        assert "targets met" in await page.value(text)
        assert await page.until(f"{text}.includes('75.0 %')")
        assert "256.0 MiB of 1.0 GiB" in await page.value(text)
        assert "host-b" in await page.value("document.getElementById('peers').innerText")
        await page.until("!!document.querySelector('#chart canvas')")
        lane = f"document.querySelector('.chip[data-session=\"{first}\"]').dataset.lane"
        assert await page.value(lane) == "bulk"
        engine.where[first] = "fast"
        await page.until(f"{lane} === 'fast'")
        # no script failed, the policy refused nothing, and nothing came from elsewhere
        assert page.problems == []
        assert {url.split("/")[2] for url in page.requested if "//" in url} == {
            served.base.removeprefix("http://")
        }


async def test_a_session_is_opened_and_closed_by_keys() -> None:
    assert PROGRAM is not None
    async with serving(Scene()) as served, browsing(PROGRAM) as page:
        await open_scene(served, page, "one", "two")
        await page.value("document.querySelector('.chip').focus()")
        before = await page.value("document.activeElement.dataset.session")
        await page.press("ArrowRight")
        chosen = await page.value("document.activeElement.dataset.session")
        assert chosen != before
        await page.press("Enter", "\r")
        await page.until("!!document.querySelector('.timeline .dot')")
        text = await page.value("document.getElementById('session').innerText")
        assert "bulk → fast (promotion)" in text
        assert "pages: host-b 31, here 2" in text
        assert "Why fast: only this lane can take it" in text
        label = "document.querySelector('.timeline').getAttribute('aria-label')"
        assert "bulk to fast" in await page.value(label)
        await page.press("Escape")
        await page.until("document.getElementById('session').hidden")
        await page.until(f"document.activeElement.dataset.session === {json.dumps(chosen)}")
        assert page.problems == []


async def test_a_session_is_promoted_and_demoted_by_mouse_and_keys() -> None:
    """What came of it stays to be read, also when the page has been drawn again."""
    assert PROGRAM is not None
    engine = Scene()
    async with serving(engine) as served, browsing(PROGRAM) as page:
        (found,) = await open_scene(served, page, "one")
        moves = [call for call in engine.calls if call[0] in ("promote", "demote")]
        assert moves == []
        await page.value("document.querySelector('.chip').click()")
        button = "document.querySelector('#session [data-focus=\"{}\"]')"
        await page.until("!!" + button.format("Promote"))
        await page.value(button.format("Promote") + ".click()")
        status = "document.querySelector('#session [role=status]')?.textContent"
        await page.until(f"{status} === 'bulk → fast: moved'")
        await page.value(button.format("Promote") + ".focus()")
        await page.press("Tab", code=9)
        await page.until("document.activeElement.dataset.focus === 'Demote'")
        await page.press("Enter", "\r", code=13)
        await page.until(f"{status} === 'bulk → bulk: moved'")
        assert [call[0] for call in engine.calls if call[0] in ("promote", "demote")] == [
            "promote", "demote",
        ]  # fmt: skip
        await page.value("window.drawn = document.querySelector('#session header')")
        await page.until("window.drawn !== document.querySelector('#session header')")
        assert await page.value(status) == "bulk → bulk: moved"
        assert await page.value("document.activeElement.dataset.focus") == "Demote"
        engine.asleep.append(("", found))
        await page.value(button.format("Promote") + ".click()")
        await page.until(f"{status}.includes('BE')")
        await page.value(button.format("Close") + ".click()")
        await page.until("document.getElementById('session').hidden")


async def test_a_thousand_sessions_are_drawn_in_time() -> None:
    """Chips are bounded, and the newest ones are shown."""
    assert PROGRAM is not None
    engine = Scene()
    async with serving(engine) as served, browsing(PROGRAM) as page:
        await open_scene(served, page, *(f"s{i}" for i in range(1000)))
        assert await page.until(f"{NAMES}.length === 60")
        assert "and 940 more" in await page.value("document.getElementById('lanes').innerText")
        assert await page.value("document.documentElement.scrollWidth <= innerWidth")
        assert page.problems == []


async def test_the_key_is_asked_for_and_kept_in_memory_only() -> None:
    assert PROGRAM is not None
    key = "a-secret-key-of-32-characters-xx"
    auth = (ApiKey(key=key, name="a", sla_class=SlaClass.STANDARD),)
    config = dataclasses.replace(fake_config(), auth=auth)
    async with serving(Scene(), config) as served, browsing(PROGRAM) as page:
        headers = {"Authorization": f"Bearer {key}"}
        await post(served, "/v1/chat/completions", chat(session_id="s"), headers=headers)
        await page.open(served.base + "/")

        async def give(text: str) -> None:
            await page.until("document.getElementById('key-dialog').open")
            await page.value(f"document.getElementById('key').value = {json.dumps(text)}")
            await page.value("document.querySelector('#key-form button').click()")

        await give("wrong")
        await page.until("!document.getElementById('key-wrong').hidden")
        await give(key)
        await page.until(f"{NAMES}.length === 1")
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert key not in await page.value(kept)
        assert not any(key in url for url in page.requested)


async def test_hostile_names_stay_text() -> None:
    assert PROGRAM is not None
    engine = Scene()
    async with serving(engine) as served, browsing(PROGRAM) as page:
        (found,) = await open_scene(served, page, "one")
        engine.where[found] = "<img src=x onerror=alert(1)>"
        await page.until("document.body.innerText.includes('<img src=x')")
        assert await page.value("document.images.length") == 0
        assert page.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_narrow_and_dark_pages_are_readable(scheme: str, tmp_path: Path) -> None:
    """At 400 px nothing is wider than the page; text contrasts with what is behind it."""
    assert PROGRAM is not None
    async with serving(Scene()) as served, browsing(PROGRAM) as page:
        await page.size(400, 800)
        await page.scheme(scheme)
        await open_scene(served, page, "one")
        assert await page.value("document.documentElement.scrollWidth") <= 400
        contrast = """(() => {
          const part = (text) => text.match(/[0-9.]+/g).slice(0, 3).map((one) => {
            const share = one / 255;
            return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
          });
          const light = (text) => { const [r, g, b] = part(text); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const behind = (one) => {
            for (let at = one; at; at = at.parentElement) {
              const color = getComputedStyle(at).backgroundColor;
              if (color !== "rgba(0, 0, 0, 0)") return color;
            }
          };
          return Math.min(...["p.quiet", "h2", ".chip small", ".badge", "td", "th"].map((name) => {
            const one = document.querySelector(name);
            const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
            return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
          }));
        })()"""  # noqa: E501
        assert await page.value(contrast) >= 4.5
        await page.picture(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 5000


async def test_the_page_comes_back_with_the_daemon() -> None:
    assert PROGRAM is not None
    async with browsing(PROGRAM) as page:
        async with serving(Scene()) as served:
            await open_scene(served, page, "one")
            served.engine.phase = "stopped"
            await page.until(
                "document.getElementById('state').textContent === 'the daemon stopped'"
            )
            served.engine.phase = "ready"
            await page.until("document.getElementById('state').textContent === 'ready'")
            port = served.port
        await page.until("document.getElementById('state').textContent === 'no answer'")
        async with serving(Scene(), port=port) as served:
            await page.until("document.getElementById('state').textContent === 'ready'")
            await page.until(f"{NAMES}.length === 0")  # of the earlier daemon
