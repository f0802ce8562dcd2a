"""Sessions of a model that is asked much, with and without memory of a daemon that serves another.

Two engines of one core each: `hot`, whose KV budget has room for a few of its sessions, and `cold`,
which serves a smaller model and has room to spare. Every session of `hot` is continued in each
round. Kinds take turns, on the same cores:

- `alone`: the two are not linked; sessions that do not fit are computed again when they go on;
- `offload`: they are linked, so pages lie with `cold`, which attends to them;
- `room`: `hot` has a budget for all of its sessions: what more memory would give.

`hot_vs_alone`, `hot_vs_room`: tokens per second of all sessions of `hot`, median of the rounds'
ratios. `cold_tpot_vs_alone`: time per token of a session of `cold` that decodes all the while. The
tokens of every kind are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop

from batchengine.core import PAGE_TOKENS
from bench import report
from bench.engine import DISK, synthetic_model
from bench.models.synthetic import PRESETS, Shape
from bench.processes.cluster import Cluster, ClusterPlan, NodePlan, cluster
from bench.ring import SPARE_PAGES, Talk, prompt
from service.cli.local.cluster import page_bytes

HOT: Shape = dataclasses.replace(PRESETS["0.6b"], n_layer=7, n_vocab=32_000)
COLD: Shape = dataclasses.replace(PRESETS["0.1b"], n_layer=8)
KINDS = ("alone", "offload", "room")
COLD_TOKENS = 512


@dataclasses.dataclass
class Bench:
    """The models, the sessions of `hot`, and how many of them fit its budget."""

    hot: Path
    cold: Path
    folder: Path
    cores: list[int]
    sessions: int
    fitting: int
    length: int
    rounds: int
    count: int

    def nodes(self, kind: str) -> list[NodePlan]:
        """The engines of one kind."""
        size = page_bytes(self.hot)
        grown = self.length + self.rounds * self.count + COLD_TOKENS
        pages = -(-grown // PAGE_TOKENS) + 1
        held = self.sessions * pages * size if kind == "offload" else size
        fits = self.sessions if kind == "room" else self.fitting
        own = (fits * pages + SPARE_PAGES) * size
        cold_own = 16 * page_bytes(self.cold) + size
        return [
            NodePlan("hot", (self.cores[0],), own, size),
            NodePlan("cold", (self.cores[-1],), cold_own, held, self.cold),
        ]

    async def turns(self, made: Cluster, talks: list[Talk], cold: Talk) -> tuple[float, float]:
        """Continue every session once; returns tokens/s of `hot` and the TPOT of `cold` in ms."""
        is_over = asyncio.Event()
        times: list[float] = []

        async def decode() -> None:
            while not is_over.is_set():
                await cold.turn(made, 16)
                times.append(cold.tpot_ms)
                if len(cold.tokens) > COLD_TOKENS:  # its context stays short
                    cold.session, cold.tokens = f"{cold.session}+", cold.tokens[:16]

        beside = asyncio.create_task(decode())
        began = time.perf_counter()
        await asyncio.gather(*(talk.turn(made, self.count) for talk in talks))
        seconds = time.perf_counter() - began
        is_over.set()
        await beside
        return len(talks) * self.count / seconds, statistics.median(times)

    async def run(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        tpots: dict[str, list[float]] = {kind: [] for kind in KINDS}
        talks = {
            kind: [
                Talk("hot", f"s{i}", prompt(100 + i, self.length, 31_000))
                for i in range(self.sessions)
            ]
            for kind in KINDS
        }
        async with contextlib.AsyncExitStack() as stack:
            made = {
                kind: await stack.enter_async_context(cluster(self.plan(kind), self.nodes(kind)))
                for kind in KINDS
            }
            cold = {kind: Talk("cold", "c", prompt(1, 64, 31_000)) for kind in KINDS}
            await made["offload"].has_room("hot", self.sessions * self.length)
            for kind in KINDS:
                for talk in talks[kind]:  # one after the other: the first answer is prefill
                    await talk.turn(made[kind], 8)
            for _ in range(self.rounds):
                for kind in KINDS:
                    rate, tpot = await self.turns(made[kind], talks[kind], cold[kind])
                    rates[kind].append(round(rate, 2))
                    tpots[kind].append(round(tpot, 2))
                    print(f"  {kind}: {rate:.1f} tokens/s, cold {tpot:.2f} ms a token", flush=True)
            held = (await made["offload"].engines["hot"].call("held"))["held"]
        first, *others = ([talk.tokens for talk in talks[kind]] for kind in KINDS)
        result = {
            "hot_vs_alone": _ratio(rates["offload"], rates["alone"]),
            "hot_vs_room": _ratio(rates["offload"], rates["room"]),
            "cold_tpot_vs_alone": _ratio(tpots["offload"], tpots["alone"]),
            "identical": all(other == first for other in others),
        }
        details = {
            "sessions": self.sessions, "fitting": self.fitting, "tokens": self.length,
            "tokens_per_s": rates, "cold_tpot_ms": tpots, "held": held,
        }  # fmt: skip
        return result, details

    def plan(self, kind: str) -> ClusterPlan:
        """What the engines of one kind have in common."""
        cache = DISK if DISK.is_dir() else self.folder
        context = self.length + self.rounds * self.count + 2 * COLD_TOKENS
        folder = self.folder / kind
        return ClusterPlan(self.hot, folder, cache, context, is_linked=kind == "offload")


def _ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the rounds' ratios."""
    return round(statistics.median([a / b for a, b in zip(ours, theirs, strict=True)]), 3)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench offload", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter sessions, fewer rounds")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    with report.memory_folder("offload-", 4 << 30) as folder:
        bench = Bench(
            synthetic_model("ring", HOT), synthetic_model("offload-cold", COLD), folder, cores,
            *((4, 2, 2560, 2, 16) if args.quick else (6, 3, 3840, 3, 48)),
        )  # fmt: skip
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result, details = runner.run(bench.run())
    details["bench_s"] = round(time.perf_counter() - began, 1)
    report.finish(result, details=details, json_path=args.json)
    return 0 if result["identical"] else 1
