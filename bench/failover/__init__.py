"""Linked engines under kills: how long a session stands still, which tokens are lost or wrong.

Three engines with one lane each serve the pocket model. Clients of the first read long answers with
a context that the first engine's memory does not hold, so its leading pages lie with the others.
Again and again one of the others is killed (the engine with its worker, or the worker alone), is
started again, and gets pages again. Every token is compared with those of an engine that holds
everything itself and is not disturbed.

`recovery_ms` is what a client sees: from the kill to its session's next token, of the sessions that
had pages with the killed engine. It includes the detection, and the computation of the lost range.
`others_gap_ms` is the same of sessions that had none there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench import report
from bench.crash import POCKET, words
from bench.processes.cluster import Cluster, ClusterPlan, NodePlan, cluster
from service.cli.local.cluster import page_bytes

HEAD, OTHERS = "a", ("b", "c")
CONTEXT = 16_384
STUCK_S = 60.0
SETTLE_S = 30.0  # until a session has pages with others again
POLL_S = 0.01
MIB = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Tokens and pages of a run."""

    clients: int
    prompt_tokens: int
    answer_tokens: int
    own_pages: int  # that the first engine keeps of its own sessions
    prompts: int


@dataclass
class Findings:
    """What the clients saw."""

    kills: int = 0
    answers: int = 0
    tokens: int = 0
    lost: int = 0
    wrong: int = 0
    recovery_ms: list[float] = field(default_factory=list[float])
    others_gap_ms: list[float] = field(default_factory=list[float])
    examples: list[str] = field(default_factory=list[str])

    def note(self, text: str) -> None:
        if len(self.examples) < 20:
            self.examples.append(text)
            print(f"  FINDING {text}", flush=True)


class Client:
    """Reads answers of one session after the other from the first engine."""

    def __init__(self, made: Cluster, number: int, sizes: Sizes, expected: Expected) -> None:
        self._made = made
        self._number = number
        self._sizes = sizes
        self._expected = expected
        self._rounds = 0
        self.session = ""
        self.times: list[float] = []  # of the tokens of this answer
        self.is_over = False

    async def live(self, findings: Findings) -> None:
        while not self.is_over:
            await self._answer(findings)

    async def _answer(self, findings: Findings) -> None:
        self._rounds += 1
        which = (self._number + self._rounds) % self._sizes.prompts
        expected, count = self._expected.answers[which], self._sizes.answer_tokens
        engine, times = self._made.engines[HEAD], list[float]()
        session = f"s{self._number}-{self._rounds}"
        stream = engine.ask(
            "submit", prompt=self._expected.prompts[which], n=count, session=session,
            tenant=f"client-{self._number}",
        )  # fmt: skip
        self.session, self.times = session, times
        while True:
            message = await asyncio.wait_for(stream.get(), STUCK_S)
            if "token" not in message:
                break
            if message["token"] != expected[len(times)]:
                findings.wrong += 1
                findings.note(f"{session}: token {len(times)} is {message['token']}")
            times.append(time.monotonic())
            findings.tokens += 1
            if self.is_over:
                break
        if not self.is_over:
            findings.answers += 1
            findings.lost += count - len(times)
            if len(times) < count:
                findings.note(f"{session}: {len(times)} of {count} tokens, then {message}")
            await engine.call("drop", session=session, tenant=f"client-{self._number}")

    async def next_token(self, after: float) -> float | None:
        """Time of this session's first token after a moment; None if its answer ended instead."""
        session, times = self.session, self.times
        due = after + STUCK_S
        while not times or times[-1] <= after:
            if self.session != session:
                return None
            if time.monotonic() > due:
                raise TimeoutError(f"{session} stands still")
            await asyncio.sleep(POLL_S / 10)
        return next(at for at in times if at > after)


class Expected:
    """Prompts, and their answers by an engine that has room for everything and no peer."""

    def __init__(self, sizes: Sizes) -> None:
        self.prompts = [words(seed, sizes.prompt_tokens) for seed in range(sizes.prompts)]
        self.answers: list[list[int]] = []

    async def compute(self, made: Cluster, count: int) -> None:
        for prompt in self.prompts:
            stream = made.engines["alone"].ask("submit", prompt=prompt, n=count)
            answer = list[int]()
            while "token" in (message := await stream.get()):
                answer.append(message["token"])
            if len(answer) != count:
                raise RuntimeError(f"the undisturbed engine ended with {message}")
            self.answers.append(answer)


class Killer:
    """Kills an engine or a worker that holds pages, and measures what the clients see."""

    def __init__(self, made: Cluster, clients: list[Client], findings: Findings) -> None:
        self._made = made
        self._clients = clients
        self._findings = findings
        self._rng = random.Random(1)

    async def kill(self) -> None:
        """One kill, and everything until the engine is linked again."""
        holders = await self._holders()
        name = self._rng.choice(sorted({peer for peers in holders.values() for peer in peers}))
        engine, is_engine = self._made.engines[name], self._rng.random() < 0.6
        began = time.monotonic()
        if is_engine:
            engine.kill()
        else:
            await self._made.kill_worker(name)
        self._findings.kills += 1
        waits = [self._wait(client, began, name in holders.get(client.session, ()))
                 for client in self._clients]  # fmt: skip
        await asyncio.gather(*waits)
        if is_engine:
            await self._made.restart(name)
        else:
            await self._made.linked(name)

    async def _holders(self) -> dict[str, set[str]]:
        """By session who else has pages of it, once at least one session has."""
        due = time.monotonic() + SETTLE_S
        while True:
            held = (await self._made.engines[HEAD].call("held"))["held"]
            running = {client.session for client in self._clients if client.times}
            found = {
                session: {peer for peer, _ in rows if peer}
                for session, rows in held.items()
                if session in running
            }
            if any(found.values()):
                return found
            if time.monotonic() > due:
                raise TimeoutError(f"no session has pages with others: {held}")
            await asyncio.sleep(POLL_S)

    async def _wait(self, client: Client, began: float, has_lost: bool) -> None:
        at = await client.next_token(began)
        if at is not None:
            findings = self._findings
            gaps = findings.recovery_ms if has_lost else findings.others_gap_ms
            gaps.append((at - began) * 1000)


async def run(sizes: Sizes, kills: int, folder: Path, cache_dir: Path) -> Findings:
    """The whole bench."""
    core = sorted(os.sched_getaffinity(0))
    size = page_bytes(POCKET)
    nodes = [NodePlan(HEAD, (core[0],), sizes.own_pages * size, 8 * size)]
    nodes += [NodePlan(name, (core[-1],), 8 * size, 512 * size) for name in OTHERS]
    findings, expected = Findings(), Expected(sizes)
    plan = ClusterPlan(POCKET, folder / "alone", cache_dir, CONTEXT)
    async with cluster(plan, [NodePlan("alone", core[:1], 1024 * size, size)]) as made:
        await expected.compute(made, sizes.answer_tokens)
    plan.folder = folder / "linked"
    async with cluster(plan, nodes) as made:
        clients = [Client(made, i, sizes, expected) for i in range(sizes.clients)]
        lives = [asyncio.ensure_future(client.live(findings)) for client in clients]
        killing = asyncio.ensure_future(_kill(Killer(made, clients, findings), kills))
        try:
            await asyncio.wait([killing, *lives], return_when=asyncio.FIRST_COMPLETED)
            for ended in (killing, *lives):
                if ended.done():
                    ended.result()
        finally:
            killing.cancel()
            for client in clients:
                client.is_over = True
            for life in lives:
                life.cancel()
            await asyncio.gather(killing, *lives, return_exceptions=True)
    return findings


async def _kill(killer: Killer, kills: int) -> None:
    for number in range(kills):
        await killer.kill()
        if number % 10 == 9:
            print(f"  {number + 1} kills", flush=True)


def percentile(values: list[float], share: float) -> float | None:
    """The value that `share` of the values do not exceed; None of no values."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench failover", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="6 kills")
    parser.add_argument("--kills", type=int, default=0, help="default 120")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    kills = args.kills or (6 if args.quick else 120)
    sizes = Sizes(clients=2, prompt_tokens=5000, answer_tokens=600, own_pages=28, prompts=3)
    began = time.perf_counter()
    with report.memory_folder("failover-", 2 << 30) as folder:
        cache_dir = folder / "cache"
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(run(sizes, kills, folder, cache_dir))
    ms = found.recovery_ms
    result = {
        "kills": found.kills,
        "recovery_p50_ms": percentile(ms, 0.5),
        "recovery_p99_ms": percentile(ms, 0.99),
        "others_gap_p50_ms": percentile(found.others_gap_ms, 0.5),
        "lost_tokens": found.lost,
        "wrong_tokens": found.wrong,
    }
    details: dict[str, Any] = {
        "recoveries": len(ms),
        "recovery_mean_ms": round(statistics.mean(ms), 1) if ms else None,
        "recovery_ms": [round(value, 1) for value in ms],
        "others_gap_ms": [round(value, 1) for value in found.others_gap_ms],
        "answers": found.answers,
        "tokens": found.tokens,
        "examples": found.examples,
        "bench_s": round(time.perf_counter() - began, 1),
    }
    print(f"  {found.tokens} tokens, {found.answers} whole answers, {details['bench_s']} s")
    report.finish(result, details=details, json_path=args.json)
    return 0 if found.kills >= kills and not (found.lost or found.wrong) else 1
