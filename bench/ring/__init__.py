"""Decode over two linked engines of one core each, against one engine, and against sharding.

`tpot_vs_local_8k`, `_32k`: time per token of a session whose KV lies about half with the peer,
against the same session in an engine that holds all of it; both take turns on the same core, and
continue the same conversation. `throughput_vs_sharding`: each engine owns the same number of
sessions and has about half of their KV with the other, against two engines that share nothing;
both kinds take turns. `context_vs_one_node`: tokens of the longest session that ran, against the
longest that one engine with the same memory takes. All tokens are compared.

`margin`: as in docs, time that a holder computes over time that its hop takes, over a link limited
to what 10 Gb/s are for a node that reads KV at 150 GB/s: 10 Gb/s times the rate at which this core
reads KV over 150 GB/s. It needs root, for namespaces; without, the row is left out.

The model has layers of the 0.6B shape, but 7 instead of 28, and a smaller vocabulary: the cost of a
ring is per layer, and prefill of 32K tokens takes a quarter of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from batchengine.core import PAGE_TOKENS
from batchengine.gguf import GgufFile
from batchengine.weights import read_spec
from bench import report
from bench.engine import DISK, synthetic_model
from bench.models.synthetic import PRESETS, Shape
from bench.processes.cluster import Cluster, ClusterPlan, NodePlan, cluster
from bench.processes.networks import Namespaces, namespaces_work
from service.cli.local.cluster import page_bytes

SHAPE: Shape = dataclasses.replace(PRESETS["0.6b"], n_layer=7, n_vocab=32_000)
QUICK: Shape = dataclasses.replace(PRESETS["0.1b"], n_layer=4)
SPARE_PAGES = 3  # of every budget: open pages being sealed, the answer
STUCK_S = 900.0
ANSWER = 64  # tokens of the longest session's answer
NODE_READ_GB_S = 150.0  # the node and the link for which a margin is known by calculation
NODE_LINK_MBIT = 10_000.0


@dataclasses.dataclass
class Talk:
    """One session that is continued turn by turn: its tokens, and the times of its last answer."""

    engine: str
    session: str
    tokens: list[int]
    times: list[float] = dataclasses.field(default_factory=list[float])
    answer: list[int] = dataclasses.field(default_factory=list[int])

    async def turn(self, made: Cluster, count: int) -> None:
        """Generate `count` tokens after the tokens so far. Raises RuntimeError."""
        stream = made.engines[self.engine].ask(
            "submit", prompt=self.tokens, n=count, session=self.session
        )
        self.times, self.answer = [], []
        while "token" in (message := await asyncio.wait_for(stream.get(), STUCK_S)):
            self.times.append(time.perf_counter())
            self.answer.append(message["token"])
        if len(self.answer) != count:
            raise RuntimeError(f"{self.engine}, {len(self.tokens)} tokens: {message}")
        self.tokens = [*self.tokens, *self.answer]

    @property
    def tpot_ms(self) -> float:
        """Median time per token of the last answer."""
        return 1000 * statistics.median(
            b - a for a, b in zip(self.times, self.times[1:], strict=False)
        )


def prompt(seed: int, count: int, vocab: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(count)]


@dataclasses.dataclass
class Bench:
    """The model and the machine of all parts."""

    path: Path
    folder: Path
    vocab: int
    cores: Sequence[int]
    context: int
    tls: bool
    parts: int = 0

    def plan(self) -> ClusterPlan:
        self.parts += 1
        folder = self.folder / str(self.parts)
        cache = DISK if DISK.is_dir() else self.folder
        return ClusterPlan(self.path, folder, cache, self.context, tls=self.tls)

    async def against_local(self, length: int, rounds: int, count: int) -> dict[str, Any]:
        """Time per token on two engines and on one, by turns; whether the tokens are the same."""
        size, pages = page_bytes(self.path), -(-length // PAGE_TOKENS)
        total = pages + -(-(rounds * count + PAGE_TOKENS) // PAGE_TOKENS) + SPARE_PAGES
        half = pages // 2 + SPARE_PAGES
        ring = [
            NodePlan("a", (self.cores[0],), half * size, size),
            NodePlan("b", (self.cores[-1],), size * 2 * SPARE_PAGES, total * size),
        ]
        local = [NodePlan("alone", (self.cores[0],), total * size, size)]
        words = prompt(length, length, self.vocab)
        async with (
            cluster(self.plan(), ring) as linked,
            cluster(self.plan(), local) as alone,
        ):
            there = Talk("a", "long", words)
            here = Talk("alone", "long", words)
            for talk, made in ((there, linked), (here, alone)):
                await talk.turn(made, 8)
            samples: dict[str, list[float]] = {"ring": [], "local": []}
            identical = True
            for _ in range(rounds):
                await there.turn(linked, count)
                await here.turn(alone, count)
                identical &= there.tokens == here.tokens
                samples["ring"].append(there.tpot_ms)
                samples["local"].append(here.tpot_ms)
            held = (await linked.engines["a"].call("held"))["held"]["long"]
        ratios = [a / b for a, b in zip(samples["ring"], samples["local"], strict=True)]
        return {
            "tokens": length,
            "held": held,
            "tpot_ms": samples,
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "identical": identical,
        }

    async def against_sharding(
        self, sessions: int, length: int, rounds: int, count: int
    ) -> dict[str, Any]:
        """Tokens per second of all sessions on two engines, linked and apart, by turns."""
        size, pages = page_bytes(self.path), -(-length // PAGE_TOKENS)
        more = -(-(rounds * count + PAGE_TOKENS) // PAGE_TOKENS)
        all_pages = sessions * (pages + more) + SPARE_PAGES
        half = sessions * pages // 2 + sessions * more + SPARE_PAGES
        names = ("a", "b")
        by_core = list(zip(names, (self.cores[0], self.cores[-1]), strict=True))
        ring = [NodePlan(n, (c,), half * size, all_pages * size) for n, c in by_core]
        apart = [NodePlan(n, (c,), all_pages * size, size) for n, c in by_core]
        async with (
            cluster(self.plan(), ring) as linked,
            cluster(self.plan(), apart) as shards,
        ):
            kinds = {"ring": linked, "shards": shards}
            talks = {
                kind: [
                    Talk(name, f"{name}{i}", prompt(100 * i + ord(name), length, self.vocab))
                    for name in names
                    for i in range(sessions)
                ]
                for kind in kinds
            }
            for kind, made in kinds.items():
                await asyncio.gather(*(talk.turn(made, 8) for talk in talks[kind]))
            rates: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, made in kinds.items():
                    await asyncio.gather(*(talk.turn(made, count) for talk in talks[kind]))
                    first = min(talk.times[0] for talk in talks[kind])
                    last = max(talk.times[-1] for talk in talks[kind])
                    rates[kind].append(len(talks[kind]) * (count - 1) / (last - first))
            held = [(await linked.engines[name].call("held"))["held"] for name in names]
        ratios = [a / b for a, b in zip(rates["ring"], rates["shards"], strict=True)]
        pairs = zip(talks["ring"], talks["shards"], strict=True)
        return {
            "sessions": 2 * sessions,
            "tokens": length,
            "held": held,
            "tokens_per_s": rates,
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "identical": all(ours.tokens == theirs.tokens for ours, theirs in pairs),
        }

    async def margin(self, length: int, rounds: int, count: int) -> dict[str, Any]:
        """Time per token over a limited link, half of the KV with the peer, and the hop's margin.

        The attention to half of the tokens costs what a local session of `length` tokens takes
        longer than one of half as many; the hop's bytes are counted by the kernel.
        """
        size, pages = page_bytes(self.path), -(-length // PAGE_TOKENS)
        more = -(-(rounds * count + PAGE_TOKENS) // PAGE_TOKENS) + SPARE_PAGES
        local = [NodePlan("alone", (self.cores[0],), 2 * (pages + more) * size, size)]
        words = prompt(length, length, self.vocab)
        async with cluster(self.plan(), local) as alone:
            whole, part = Talk("alone", "long", words), Talk("alone", "half", words[: length // 2])
            samples = dict[str, list[float]](whole=[], half=[], limited=[])
            for talk in (whole, part):
                await talk.turn(alone, 8)
            for _ in range(rounds):
                for talk, name in ((whole, "whole"), (part, "half")):
                    await talk.turn(alone, count)
                    samples[name].append(talk.tpot_ms)
            with GgufFile(str(self.path)) as gguf:
                n_layer = read_spec(gguf).n_layer
            whole_ms, half_ms = (statistics.median(samples[name]) for name in ("whole", "half"))
            compute_us = 1000 * (whole_ms - half_ms) / n_layer
            read_gb_s = size * (length / 2 / PAGE_TOKENS) / n_layer / compute_us / 1000
            network = Namespaces(NODE_LINK_MBIT * read_gb_s / NODE_READ_GB_S)
            ring = [
                NodePlan("a", (self.cores[0],), (pages // 2 + SPARE_PAGES) * size, size),
                NodePlan("b", (self.cores[-1],), size * 2 * SPARE_PAGES, (pages + more) * size),
            ]
            async with cluster(self.plan(), ring, network) as linked:
                there = Talk("a", "long", words)
                await linked.has_room("a", length + rounds * count)
                await there.turn(linked, 8)
                sent = 0
                for _ in range(rounds):
                    before = network.bytes_sent("a") + network.bytes_sent("b")
                    await there.turn(linked, count)
                    sent += network.bytes_sent("a") + network.bytes_sent("b") - before
                    samples["limited"].append(there.tpot_ms)
                segments = (await linked.engines["a"].call("held"))["held"]["long"]
        lap_bytes = sent / (rounds * count * n_layer)
        transfer_us = 8 * lap_bytes / network.rate_mbit
        held = sum(pages for peer, pages in segments if peer)
        compute_us *= held * PAGE_TOKENS / (length / 2)
        return {
            "tokens": length,
            "held": held,
            "tpot_ms": samples,
            "read_gb_s": round(read_gb_s, 2),
            "rate_mbit": round(network.rate_mbit),
            "lap_bytes": round(lap_bytes),
            "compute_us": round(compute_us, 1),
            "transfer_us": round(transfer_us, 1),
            "margin": round(compute_us / transfer_us, 2),
            "ratio": round(statistics.median(samples["limited"]) / whole_ms, 3),
            "identical": there.tokens == whole.tokens,
        }

    async def longest(self, pages: int) -> dict[str, Any]:
        """The longest session that two engines of `pages` pages each serve, and one of them."""
        size = page_bytes(self.path)
        nodes = [NodePlan("alone", (self.cores[0],), pages * size, size)]
        async with cluster(self.plan(), nodes) as alone:
            one = (await alone.engines["alone"].call("context"))["tokens"]
        nodes = [NodePlan("a", (self.cores[0],), pages * size, size)]
        nodes += [NodePlan("b", (self.cores[-1],), size, pages * size)]
        for share in (2.0, 1.95, 1.9, 1.85, 1.8, 1.7, 1.6, 1.5, 1.25):
            length = int(share * one) - ANSWER
            async with cluster(self.plan(), nodes) as linked:
                talk = Talk("a", "long", prompt(7, length, self.vocab))
                await linked.has_room("a", length + ANSWER)
                try:
                    await talk.turn(linked, ANSWER)
                except RuntimeError as error:
                    print(f"  {length} tokens on two engines of {one}: {error}")
                    continue
            return {"one": one, "two": len(talk.tokens), "ratio": round(len(talk.tokens) / one, 3)}
        return {"one": one, "two": one, "ratio": 1.0}


async def run(bench: Bench, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    lengths = [1024 * k for k in (args.lengths or ([4] if args.quick else [8, 32]))]
    rounds, count = (3, 24) if args.quick else (7, 32)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        rows.append(await bench.against_local(length, rounds, count))
        print(f"  {length} tokens: {rows[-1]['ratio']} of a local token {rows[-1]['range']},"
              f" pages {rows[-1]['held']}", flush=True)  # fmt: skip
    sessions, each = (2, 2048) if args.quick else (8, 4096)
    shards = await bench.against_sharding(sessions, each, rounds, count)
    print(f"  {2 * sessions} sessions of {each} tokens: {shards['ratio']} of sharding"
          f" {shards['range']}", flush=True)  # fmt: skip
    limited = await bench.margin(lengths[0], rounds, count) if namespaces_work() else None
    if limited is not None:
        print("  limited link: {tokens} tokens, {held} pages there, {rate_mbit} Mbit/s, a hop"
              " computes {compute_us} us and sends {lap_bytes} bytes in {transfer_us} us: margin"
              " {margin}, {ratio} of a local token".format(**limited), flush=True)  # fmt: skip
    longest = await bench.longest(24)
    result = {
        "throughput_vs_sharding": shards["ratio"],
        **{f"tpot_vs_local_{row['tokens'] // 1024}k": row["ratio"] for row in rows},
        "context_vs_one_node": longest["ratio"],
        "margin": limited and limited["margin"],
        "identical": all(row["identical"] for row in [*rows, shards, limited or shards]),
    }
    details = {"local": rows, "sharding": shards, "limited": limited, "longest": longest}
    return result, details


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench ring", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="4K tokens, a small model")
    parser.add_argument("--lengths", type=int, nargs="*", help="thousands of tokens")
    parser.add_argument("--plain", action="store_true", help="links without TLS")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    shape, name = (QUICK, "ring-quick") if args.quick else (SHAPE, "ring")
    with report.memory_folder("ring-", 8 << 30) as folder:
        bench = Bench(
            synthetic_model(name, shape), folder, shape.n_vocab,
            sorted(os.sched_getaffinity(0)), 1 << 16, tls=not args.plain,
        )  # fmt: skip
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result, details = runner.run(run(bench, args))
    details["bench_s"] = round(time.perf_counter() - began, 1)
    details["tls"] = not args.plain
    report.finish(result, details=details, json_path=args.json)
    return 0 if result["identical"] else 1
