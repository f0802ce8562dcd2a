"""Time from one worker to another: `python -m bench hop [--quick] [--json FILE]`.

Two workers have a data link over TCP on this host, two others one with TLS. The first of each pair
computes the same decode step of the pocket model three times: with its pages, with a super-page
that it holds for itself, and with the same one at the other worker. The last two differ in two
hops per layer: `hop_us` is half of that, from the call that sends to the call that has received,
with waking up. `layer_us` is what a layer takes longer with the page at the peer than with pages of
its own.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import secrets
import socket
import tempfile
from array import array
from pathlib import Path

from batchengine.config import PeersConfig
from batchengine.core import PAGE_TOKENS, Sampling
from batchengine.lanes.worker_process import Lane
from batchengine.peers import certificates
from batchengine.peers.identity import files_of, identity_of
from batchengine.wire import lane as wire
from bench import report
from bench.crash import POCKET
from kernels import SUPERPAGE_TOKENS
from kv_store.arenas.arena import Arena
from kv_store.layout import PageLayout

HELD_PAGES = SUPERPAGE_TOKENS // PAGE_TOKENS
LENGTH = SUPERPAGE_TOKENS + 40  # of the timeline, whose last token is computed again and again
CHUNK = 512
SPIN_US = 60  # as in a daemon
LINK, HOLD = 1, 7


@dataclasses.dataclass
class Worker:
    """A worker with the pages of one timeline in its arena."""

    lane: Lane
    n_layer: int

    async def compute(self, start: int, n_tokens: int, link: int | None = None) -> float:
        """Compute tokens of the timeline; returns the step's microseconds.

        `link`: to where the first super-page is held.
        """
        segments = () if link is None else (wire.Segment(link, HOLD, 0, HELD_PAGES),)
        n_pages = -(-(start + n_tokens) // PAGE_TOKENS)
        codes = array("Q", (wire.ARENA_BIT | slot for slot in range(n_pages)))
        for segment in segments:
            for page in range(segment.n_pages):
                codes[page] = wire.HELD_BIT | segment.link << 32 | page
        new = range(-(-start // PAGE_TOKENS), n_pages)
        reserve = tuple(wire.ReserveSlot(slot, 0, b"bench", 1, slot) for slot in new)
        is_decode = n_tokens == 1
        sampling = Sampling() if is_decode else None
        entry = wire.Entry(1, 1, start, n_tokens, n_pages, sampling, 0, segments)
        tokens = array("i", (20 + i * 37 % 1000 for i in range(start, start + n_tokens)))
        done = await self.lane.run(
            wire.Step((entry,), reserve=reserve), codes.tobytes() + tokens.tobytes(), deadline_s=60
        )
        if done.unreachable:
            raise RuntimeError("the peer did not answer")
        return float(done.elapsed_us + done.waited_us)


async def start_worker(folder: Path, identity: wire.LinkIdentity) -> Worker:
    """A worker that has computed the timeline."""
    lane = Lane(identity.name)
    cpu = wire.CpuResources(1, (), SPIN_US)
    load = wire.Load(str(POCKET), str(folder), cpu, CHUNK, 1, 2 * LENGTH, identity)
    facts = await lane.start(load)
    layout = PageLayout(facts.layers)
    slots = -(-LENGTH // PAGE_TOKENS)
    path = str(folder / f"{identity.name}.arena")
    Arena.create(path, layout, slots, lane.incarnation).close(delete=False)
    (folder / "ext").mkdir(exist_ok=True)
    await lane.attach(wire.Attach(path, slots, layout.page_bytes, str(folder / "ext")))
    worker = Worker(lane, facts.n_layer)
    for start in range(0, LENGTH, CHUNK):
        await worker.compute(start, min(CHUNK, LENGTH - start))
    return worker


async def link(owner: Worker, holder: Worker) -> None:
    """Connect two workers, and have both hold the first super-page."""
    changes: asyncio.Queue[wire.LaneEvent] = asyncio.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for one, other, sock in ((owner, holder, ours), (holder, owner, theirs)):
        one.lane.on_event = changes.put_nowait
        note = wire.OpenLink(LINK, other.lane.name, secrets.token_bytes(16), one is owner)
        with sock:
            one.lane.open_link(note, sock)
        one.lane.note(wire.Hold(HOLD, tuple(wire.ARENA_BIT | slot for slot in range(HELD_PAGES))))
    async with asyncio.timeout(20):
        seen = {await changes.get() for _ in range(4)}
    if seen != {wire.LinkChanged(LINK, True), wire.HoldChanged(HOLD, True)}:
        raise RuntimeError(f"no link: {seen}")


async def measure(folder: Path, repeats: int) -> dict[str, report.Samples]:
    """Microseconds of a hop and of a layer, by kind of link."""
    first = folder / "tls-a"
    certificates.create_authority(first, "tls-a")
    certificates.import_bundle(folder / "tls-b", certificates.issue_bundle(first, "tls-b"))
    identities = [wire.LinkIdentity("tcp-a"), wire.LinkIdentity("tcp-b")]
    for name in ("tls-a", "tls-b"):
        config = PeersConfig(dir=str(folder / name))
        identities.append(files_of(identity_of(config), config))
    workers: list[Worker] = []
    try:
        for identity in identities:
            workers.append(await start_worker(folder, identity))
        pairs = {"tcp": workers[:2], "tls": workers[2:]}
        for pair in pairs.values():
            await link(*pair)
        samples = {
            f"{name} {what}": report.Samples() for name in pairs for what in ("hop", "layer")
        }
        for _ in range(repeats):
            for name, (owner, _) in pairs.items():
                alone_us = await owner.compute(LENGTH - 1, 1)
                own_us = await owner.compute(LENGTH - 1, 1, wire.SELF)
                peer_us = await owner.compute(LENGTH - 1, 1, LINK)
                samples[f"{name} hop"].values.append((peer_us - own_us) / (2 * owner.n_layer))
                samples[f"{name} layer"].values.append((peer_us - alone_us) / owner.n_layer)
        return samples
    finally:
        await asyncio.gather(*(worker.lane.close() for worker in workers))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench hop", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default=None)
    asked = parser.parse_args(arguments)
    repeats = 20 if asked.quick else 500
    with tempfile.TemporaryDirectory() as folder:
        samples = asyncio.run(measure(Path(folder), repeats))
    print(f"{'microseconds':<24}{'median':>10}  [10 % … 90 %]")
    result: dict[str, object] = {}
    for name, found in samples.items():
        ordered = sorted(found.values)
        low, high = (ordered[len(ordered) * tenth // 10] for tenth in (1, 9))
        print(f"{name:<24}{found.median:10.1f}  [{low:.1f} … {high:.1f}]")
        key = name.replace(" ", "_") + "_us"
        result |= {key: round(found.median, 1), f"{key}_range": [round(low, 1), round(high, 1)]}
    report.finish(result, details=report.values(samples), json_path=asked.json)
    return 0
