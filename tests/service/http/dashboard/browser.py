"""Headless Chromium over its DevTools protocol: as much of it as the tests of the dashboard use."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--remote-debugging-port=0", "--window-size=1200,900",
)  # fmt: skip
START_S = 60.0
WAIT_S = 30.0


def path_of_chromium() -> str | None:
    """The program, if it is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page of a browser. `problems` are what scripts threw and what the policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(found["params"]["exceptionDetails"])[:500])
            elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["level"] == (
                "error"
            ):
                self.problems.append(found["params"]["entry"]["text"])
            elif found["method"] == "Network.requestWillBeSent":
                self.requested.append(found["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            found = await answer
        assert "error" not in found, found
        return found["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        await self.call("Page.navigate", url=url)
        await self.until(
            f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        )

    async def value(self, script: str) -> Any:
        """What an expression gives, awaited if it is a promise."""
        found = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Waits until an expression is true; returns its value."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not (found := await self.value(script)):
            if asyncio.get_running_loop().time() > deadline:
                text = await self.value("document.body && document.body.innerText")
                raise AssertionError(f"never true: {script}; {self.problems}; {text}")
            await asyncio.sleep(0.05)
        return found

    async def press(self, key: str, text: str = "", code: int = 0) -> None:
        """`code` is the number of keys such as Tab (9), which move the focus by it."""
        for kind, typed in (("keyDown", text), ("keyUp", "")):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind, key=key, text=typed, windowsVirtualKeyCode=code,
            )  # fmt: skip

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    async def scheme(self, name: str) -> None:
        """Has pages prefer "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> None:
        """Saves the whole page as a PNG."""
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))

    async def close(self) -> None:
        await self._socket.close()
        await self._reading


@asynccontextmanager
async def browsing(program: str) -> AsyncIterator[Page]:
    """A new browser with one empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        null = subprocess.DEVNULL
        child = await asyncio.create_subprocess_exec(*words, stdout=null, stderr=null)
        try:
            port = await asyncio.to_thread(_port, Path(folder) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as client:
                async with client.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    pages = [one for one in await reply.json() if one["type"] == "page"]
                url = pages[0]["webSocketDebuggerUrl"]
                page = Page(await client.ws_connect(url, max_msg_size=64 << 20))
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            child.terminate()
            await child.wait()


def _port(file: Path) -> str:
    """The port of the protocol, once the browser has written it."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if file.exists() and (lines := file.read_text().splitlines()):
            return lines[0]
        time.sleep(0.05)
    raise AssertionError("the browser did not start")
