"""A daemon under ten minutes of mixed hostile clients, while another tenant's agent streams.

A real daemon with real lanes serves the pocket model to two keys. The victim, a well-behaved agent,
streams short answers of known requests one after another, while the other key attacks (`clients`:
a flood in the highest class, cancelled streams, slow readers, pipelining, half requests, key
guesses, foreign ids, the worst texts known). Counted: ends of the daemon and of its workers,
answers of the victim that differ from those it got alone, gaps of its streams, and the growth of
the daemon's memory. A 500 to any client, too, fails the run.

The victim's time to the first token under attack is divided by two others of the same daemon:
  victim_ttft_ratio              by that of the victim alone on an idle machine;
  victim_ttft_ratio_equal_share  by that of the victim alone on its daemon, while the same attack
                                 runs against a second daemon beside it: the other tenant has the
                                 processors as before, and shares no daemon with the victim.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench import report
from bench.attack import clients
from service.cli.local.child import ChildDaemon

MODEL = Path(__file__).resolve().parents[2] / "pocket" / "pocket-q4_0.gguf"
PROMPTS = 12
STALL_MS = 100.0
WARM_UP_SECONDS = 2.0  # of an attack, before the victim is measured
VICTIM_SECONDS_MAX = 120.0  # an answer that takes longer is a crash of the victim


@dataclass
class Answer:
    """One answer of the victim: its text, and its times in ms."""

    text: str = ""
    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list[float])
    failure: str = ""


class Victim:
    """An agent that streams the same requests again and again, each in a session of its own."""

    def __init__(self, url: str, key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self.hostile: Connection | None = None  # the process of the hostile clients

    async def ask(self, session: aiohttp.ClientSession, number: int) -> Answer:
        """Streams the answer to one of the requests."""
        name = f"agent-{secrets.token_hex(4)}"
        if self.hostile is not None:
            self.hostile.send(name)
        body = {
            "messages": [{"role": "user", "content": f"Tell me story number {number}."}],
            "stream": True, "max_tokens": 24, "ignore_eos": True, "seed": number,
            "temperature": 0.8, "batchengine": {"session_id": name, "class": "interactive"},
        }  # fmt: skip
        answer, asked, last = Answer(), time.perf_counter(), 0.0
        try:
            async with (
                asyncio.timeout(VICTIM_SECONDS_MAX),
                session.post(
                    f"{self._url}/v1/chat/completions", json=body, headers=self._headers
                ) as reply,
            ):
                if reply.status != 200:
                    answer.failure = f"{reply.status} {(await reply.text())[:200]}"
                    return answer
                async for line in reply.content:
                    text = _delta(line)
                    if not text:
                        continue
                    now = time.perf_counter()
                    if last:
                        answer.gaps_ms.append((now - last) * 1000)
                    else:
                        answer.ttft_ms = (now - asked) * 1000
                    last, answer.text = now, answer.text + text
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            answer.failure = f"{type(error).__name__}: {error}"
        return answer

    async def run(self, seconds: float) -> list[tuple[int, Answer]]:
        """Requests in turn for so long, each at least once."""
        found: list[tuple[int, Answer]] = []
        began = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while time.monotonic() - began < seconds or len(found) < PROMPTS:
                number = len(found) % PROMPTS
                found.append((number, await self.ask(session, number)))
        return found


def _delta(line: bytes) -> str:
    if not line.startswith(b"data: {"):
        return ""
    choices = json.loads(line[6:]).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


@dataclass
class Watch:
    """The daemon's processes: whether they stay the same, and their memory."""

    daemon: ChildDaemon
    url: str
    victim_key: str

    async def incarnations(self) -> dict[str, int]:
        """Lane -> how often its worker was started."""
        headers = {"Authorization": f"Bearer {self.victim_key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.url}/health", headers=headers) as reply,
        ):
            lanes: list[dict[str, Any]] = (await reply.json())["lanes"]
        return {lane["name"]: lane["incarnation"] for lane in lanes}

    def rss_mb(self) -> float:
        """Resident memory of the daemon's engine process."""
        return psutil.Process(self.daemon.pid).memory_info().rss / 2**20

    def is_alive(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.daemon.pid).status() != psutil.STATUS_ZOMBIE
        return False


class Attack:
    """The process of the hostile clients of one daemon, which learns the victim's sessions."""

    def __init__(self, port: int, key: str, victim: Victim) -> None:
        self._victim = victim
        spawn = multiprocessing.get_context("spawn")
        self._link, theirs = spawn.Pipe()
        spawn.Process(target=clients.attack, args=(port, key, theirs), daemon=True).start()
        theirs.close()

    async def begin(self) -> None:
        """Returns when the clients have been at work for a moment."""
        await asyncio.to_thread(self._link.recv)
        self._victim.hostile = self._link
        await asyncio.sleep(WARM_UP_SECONDS)

    async def end(self) -> Counter[str]:
        """Ends the clients; returns the statuses of the answers they got."""
        self._victim.hostile = None
        self._link.send("")
        return await asyncio.to_thread(self._link.recv)


async def measure(
    daemon: ChildDaemon, start_twin: Callable[[], ChildDaemon], keys: dict[str, str], seconds: float
) -> tuple[dict[str, Any], Counter[str]]:
    """The figures of one run, and the statuses of the answers to the attack.

    `start_twin` makes a daemon like `daemon`, for the time of the second baseline.
    """
    port = _port(daemon)
    url = f"http://127.0.0.1:{port}"
    victim, watch = Victim(url, keys["victim"]), Watch(daemon, url, keys["victim"])
    await victim.run(0.0)  # processes and pools come up
    baseline_seconds = min(30.0, seconds / 4)
    alone = await victim.run(baseline_seconds)
    wanted = {number: answer.text for number, answer in alone if not answer.failure}
    with start_twin() as twin:
        await asyncio.to_thread(twin.wait_ready)
        beside = Attack(_port(twin), keys["hostile"], victim)
        await beside.begin()
        equal_share = await victim.run(baseline_seconds)
        statuses = await beside.end()
    before, rss = await watch.incarnations(), watch.rss_mb()
    attack = Attack(port, keys["hostile"], victim)
    await attack.begin()
    attacked = await victim.run(seconds)
    statuses += await attack.end()
    crashes = 0 if watch.is_alive() else 1
    growth_mb = 0.0
    if watch.is_alive():
        await asyncio.sleep(5.0)  # what was under way ends
        growth_mb = watch.rss_mb() - rss
        after = await watch.incarnations()
        crashes += sum(after[name] - before[name] for name in before)
    good = [answer for _, answer in attacked if not answer.failure]
    failures = [answer.failure for _, answer in attacked if answer.failure]
    for failure in failures[:10]:
        print(f"  the victim was refused: {failure}")
    print(f"  answers of the victim: {len(alone)} alone, {len(attacked)} under attack")
    for name, answers in (("alone", alone), ("equal share", equal_share), ("attacked", attacked)):
        print(f"  TTFT {name:<11} ms {report.Samples(_ttft_ms(answers) or [0.0])}")
    print(f"  answers to the attack: {dict(statuses.most_common())}")
    figures = {
        "crashes": crashes,
        "stalls_over_100ms": sum(gap > STALL_MS for answer in good for gap in answer.gaps_ms),
        "victim_ttft_ratio": _ratio(attacked, alone),
        "victim_ttft_ratio_equal_share": _ratio(attacked, equal_share),
        "victim_wrong_tokens": sum(
            number in wanted and answer.text != wanted[number]
            for number, answer in attacked
            if not answer.failure
        ),
        "victim_refused": len(failures),
        "victim_answers": len(good),
        "rss_growth_mb": round(growth_mb, 1),
        "seconds": seconds,
    }
    return figures, statuses


def _port(daemon: ChildDaemon) -> int:
    return int(daemon.url.rpartition(":")[2].partition("/")[0])


def _ttft_ms(answers: list[tuple[int, Answer]]) -> list[float]:
    return [answer.ttft_ms for _, answer in answers if not answer.failure]


def _ratio(attacked: list[tuple[int, Answer]], baseline: list[tuple[int, Answer]]) -> float | None:
    """Median TTFT under attack by that of a baseline; None if every request was refused."""
    ttft, without = _ttft_ms(attacked), _ttft_ms(baseline)
    if not (ttft and without):
        return None
    return round(statistics.median(ttft) / statistics.median(without), 2)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench attack", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="30 seconds")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--verbose", action="store_true", help="the daemon's log on stderr")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    keys = {name: secrets.token_hex(16) for name in ("victim", "hostile")}
    machine = report.machine()
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        config = Path(folder) / "attack.toml"
        config.touch(0o600)
        config.write_text("".join(f'[auth.keys.{n}]\nkey = "{key}"\n' for n, key in keys.items()))

        def show(line: str) -> None:
            if args.verbose:
                print(line, file=sys.stderr)

        def start() -> ChildDaemon:
            return ChildDaemon(args.model, show, "--config", str(config), "--lanes", "2")

        with start() as daemon:
            daemon.wait_ready()
            seconds = 30.0 if args.quick else args.seconds
            figures, statuses = asyncio.run(measure(daemon, start, keys, seconds))
            if args.verbose:
                print(*daemon.rest(), sep="\n", file=sys.stderr)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": machine, **figures}, indent=1))
    print("RESULT " + json.dumps(figures))
    return 1 if figures["crashes"] or figures["victim_wrong_tokens"] or statuses["500"] else 0
