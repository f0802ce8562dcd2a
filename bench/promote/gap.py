"""What the reader of a running session sees of a promotion: the longest wait between two tokens.

A real engine with two CPU lanes of one thread each decodes streams at 8K and 32K tokens of context.
A stream is moved to the other lane and back; each move's gap is the longest time between two tokens
from the call on until the first token of the other lane was read, in units of the median time per
token before the call. Beside it, of as many tokens before the call, the same figure: on a machine
that is not quiet it is above 1. Two ways take turns: rows are copied while the session decodes, and
after it has stopped, as if it did not decode.

Four situations: nothing else computes; the open page fills up during the move; each lane decodes
another session, of 1K tokens, which the unit includes; with `--hosts`, the stream goes to another
daemon and back.

The KV is prepared once per length: pages that one prompt computed stand at every later position,
since no time depends on their values. The streams are forks of one session, one of which is not
moved, and must all have the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import kernels
from batchengine.config import Config, PeersConfig
from batchengine.core import PAGE_TOKENS, ErrorEvent, GenerationRequest, TokenEvent
from batchengine.engine import Engine
from batchengine.engine.placement import migration
from batchengine.peers import certificates
from bench import report
from bench.engine import synthetic_model
from bench.promote.moves import LANES, Stream, two_lanes
from kv_store import keys
from kv_store.pages.allocator import NoRoom

WAYS = {"decoding": migration.COPIES_MAX, "stopped": 0}  # COPIES_MAX of both
BASE_PAGES = 4  # computed; the pages after them have the same bytes
SHORT = 8  # tokens by which the prompt is shorter than whole pages
FIRST = 20  # tokens before the first move: the page that the prompt leaves open is full
ANSWER = 4096  # tokens asked for: more than any stream is read
BETWEEN = 10  # tokens between two moves;
BETWEEN_QUICK = 200  # of a model whose tokens take less time than a move
BEFORE = 8  # times per token before a move, of which the median is its unit
HOSTS = "other host"
POINTS = ("P2", "P4", "P5")
BUSY_TOKENS = 1024  # of context of the other session on each lane


@dataclass
class Gap:
    """One move: its gap and that of as many tokens before it, in tokens; and its parts in ms."""

    situation: str
    way: str
    gap_tpot: float
    still_tpot: float
    tpot_ms: float
    rows: int  # copied
    again: int  # rows computed again
    rows_ms: float  # P2 to P4: the session stands still, its rows are copied
    owner_ms: float  # P4 to P5: the commit of the new owner
    rest_ms: float  # the first step there
    total_ms: float


async def first_of(reading: asyncio.Future[None], waiting: Awaitable[None]) -> None:
    """Wait for `waiting`; raises the error of `reading` if that ends before."""
    waited = asyncio.ensure_future(waiting)
    await asyncio.wait([reading, waited], return_when=asyncio.FIRST_COMPLETED)
    if reading.done() and not waited.done():
        waited.cancel()
        reading.result()


class Situations:
    """One engine, and moves of streams of one length in each situation."""

    def __init__(self, config: Config, length: int, between: int) -> None:
        """`between`: tokens between two moves of a stream."""
        self.engine, self.length = Engine(config, on_point=self._at), length
        self.between = between
        self.gaps: list[Gap] = []
        self._streams: list[Stream] = []
        self._points: dict[str, float] = {}  # ms, of the last move
        self._rng = np.random.default_rng(length)
        self._prompt: list[int] = []
        self._forks = 0

    def _at(self, point: str) -> None:
        self._points[point] = time.perf_counter() * 1000

    def _words(self, n: int) -> list[int]:
        return self._rng.integers(3, self.engine.info.vocab_size, n).tolist()

    async def prepare(self) -> None:
        """Make a session of `length` tokens but SHORT, with pages that stand in for most."""
        prompt = self._prompt = self._words(self.length - SHORT)
        first = GenerationRequest("first", tuple(prompt[: BASE_PAGES * PAGE_TOKENS + 1]), 1)
        await self._read(first, Stream())
        pages = self.engine.running.store.pages
        while len(refs := pages.match_prefix(prompt, b"")) < BASE_PAGES:  # noqa: ASYNC110  no event
            await asyncio.sleep(0.01)
        bodies: list[tuple[bytes, bytes]] = []
        for ref in refs:
            body = await asyncio.wrap_future(pages.read_page(ref))
            bodies.append((body, pages.digest(ref)))
        chain = keys.chain_keys(prompt, pages.repr_id)
        for page in range(BASE_PAGES, len(chain)):
            ids = prompt[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            body, digest = bodies[page % BASE_PAGES]
            put = pages.import_page(chain[page - 1], ids, b"", digest, body, origin="bench")
            if isinstance(put, NoRoom):
                raise RuntimeError(f"no room for page {page}")
            pages.unpin(await asyncio.wrap_future(put))
        stream = Stream()
        await self._read(_asked("base", prompt, 1), stream)
        prompt += stream.tokens

    async def still(self, count: int) -> None:
        """Decode `count` tokens of a stream that is not moved."""
        await self._fork(self._tokens_of(Stream()), count)

    async def moved(self, situation: str, first: int, ways: Sequence[str]) -> None:
        """Decode a stream; move it once it has `first` tokens, and later once for each way."""
        stream = self._tokens_of(Stream())
        reading = asyncio.ensure_future(self._fork(stream, ANSWER))
        try:
            await first_of(reading, stream.until(first))
            for way in ways:
                self.gaps.append(await self._move(situation, way, stream, reading))
                await first_of(reading, stream.until(len(stream.tokens) + self.between))
        finally:
            reading.cancel()
            await asyncio.wait([reading])

    def _tokens_of(self, stream: Stream) -> Stream:
        self._streams.append(stream)
        return stream

    @property
    def identical(self) -> bool:
        """Whether all streams have the same tokens, as far as each was read."""
        longest = max((stream.tokens for stream in self._streams), key=len)
        return all(one.tokens == longest[: len(one.tokens)] for one in self._streams)

    def add(self, other: Situations) -> None:
        """Take over the streams and gaps of another engine with the same sessions."""
        self._streams += other._streams
        self.gaps += other.gaps

    async def beside_others(self, first: int, ways: Sequence[str]) -> None:
        """As `moved`, while each lane decodes another session."""
        others: list[asyncio.Future[None]] = []
        try:
            for lane in LANES:
                stream, name = Stream(), f"other-{lane}"
                asked = _asked(name, self._words(BUSY_TOKENS), ANSWER, "other")
                others.append(asyncio.ensure_future(self._read(asked, stream)))
                await first_of(others[-1], stream.until(1))
                await self.engine.promote("other", name, lane)
            await self.moved("beside others", first, ways)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _fork(self, stream: Stream, count: int) -> None:
        self._forks += 1
        await self.engine.fork("", "base", self._name)
        await self._read(_asked(self._name, self._prompt, count), stream)

    @property
    def _name(self) -> str:
        return f"fork-{self._forks}"

    async def _read(self, request: GenerationRequest, stream: Stream) -> None:
        generation = self.engine.submit(request)
        try:
            async for event in generation:
                if isinstance(event, TokenEvent):
                    stream.tokens.append(event.token)
                    stream.times.append(time.perf_counter())
                elif isinstance(event, ErrorEvent):
                    raise event.error
        finally:
            generation.cancel()

    async def _move(
        self, situation: str, way: str, stream: Stream, reading: asyncio.Future[None]
    ) -> Gap:
        """Move the session of `stream` to the other lane."""
        rows = [row for row in self.engine.sessions() if row["session_id"] == self._name]
        to, self._points = self._other(rows[0]["lane"]), dict.fromkeys(POINTS, 0.0)
        began = len(stream.times)
        migration.COPIES_MAX = WAYS[way]
        sent = await self.engine.promote("", self._name, to)
        await first_of(reading, stream.until(len(stream.times) + 1))
        intervals, at = stream.intervals(), self._points  # of a host: none
        near, before = intervals[began - 1 :], intervals[: began - 1]
        tpot = statistics.median(before[-BEFORE:])
        rows_ms, owner_ms = at["P4"] - at["P2"], at["P5"] - at["P4"]
        return Gap(
            situation,
            way,
            gap_tpot=round(max(near) / tpot, 3),
            still_tpot=round(max(before[-len(near) :]) / tpot, 3),
            tpot_ms=round(tpot * 1000, 2),
            rows=sent["rows_copied"],
            again=sent["rows_recomputed"],
            rows_ms=round(rows_ms, 2),
            owner_ms=round(owner_ms, 2),
            rest_ms=round(sent["gap_ms"] - rows_ms - owner_ms, 2),
            total_ms=sent["total_ms"],
        )

    def _other(self, lane: str) -> str:
        """Where a stream goes that computes on a lane."""
        return LANES[1 - LANES.index(lane)]


class Hosts(Situations):
    """Two engines with a lane each, and moves of streams between them."""

    def __init__(self, config: Config, length: int, between: int, folder: Path) -> None:
        """Their stores and their files of peers are in `folder`."""
        self._folders = {name: folder / name for name in LANES}
        configs = [self._of(config, name) for name in LANES]
        super().__init__(configs[0], length, between)
        self._engines = [self.engine, Engine(configs[1])]

    def _of(self, config: Config, name: str) -> Config:
        folder = self._folders[name]
        folder.mkdir()
        return replace(
            config,
            lanes=tuple(lane for lane in config.lanes if lane.name == name),
            store=replace(config.store, dir=str(folder)),
            peers=PeersConfig("127.0.0.1:0", name, str(folder), tls=False),
            router=replace(config.router, promote_auto=False),  # only the moves that are measured
        )

    def _other(self, lane: str) -> str:
        return LANES[1] if lane == LANES[0] else LANES[0]

    async def start(self) -> None:
        """Start both engines, and wait until they are linked."""
        for engine in self._engines:
            await engine.start(lambda _: None)
        for name, other, engine in zip(LANES, LANES[::-1], self._engines[::-1], strict=True):
            address = f"127.0.0.1:{engine.running.peers.port}"
            certificates.write_peer(self._folders[name], other, address)
        while any(engine.stats()["peers_up"] < 1 for engine in self._engines):  # noqa: ASYNC110  no event
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for engine in self._engines:
            await engine.stop(0.0)


def _asked(session: str, prompt: list[int], count: int, tenant: str = "") -> GenerationRequest:
    return GenerationRequest(
        session, tuple(prompt), count, ignore_eos=True, session_id=session, tenant=tenant
    )


async def _measure_hosts(
    path: Path, length: int, moves: int, between: int, folder: Path
) -> Situations:
    found = Hosts(two_lanes(path, length + 2 * ANSWER, ""), length, between, folder)
    try:
        await found.start()
        await found.prepare()
        await found.still(FIRST + moves * between)
        await found.moved(HOSTS, FIRST, ["decoding"] * moves)
        _print(found, HOSTS)
        return found
    finally:
        await found.stop()


async def _measure(path: Path, length: int, moves: int, between: int, folder: str) -> Situations:
    config = two_lanes(path, length + 2 * ANSWER, folder)
    found = Situations(config, length, between)
    # Both directions of each way: moves 0 and 1, 4 and 5, … of one way, the others of the other.
    ways = [list(WAYS)[move // 2 % 2] for move in range(moves)]
    await found.engine.start(lambda _: None)
    try:
        await found.prepare()
        await found.still(FIRST + moves * between)
        await found.moved("alone", FIRST, ways)
        _print(found, "alone")
        for move in range(moves // 2):
            await found.moved("page", SHORT - 4 + move // 2 % 4, [list(WAYS)[move % 2]])
        _print(found, "page")
        await found.beside_others(FIRST, ways)
        _print(found, "beside others")
        return found
    finally:
        await found.engine.stop(0.0)


KEYS = {
    "alone": "",
    "page": "_page",
    "beside others": "_busy",
    HOSTS: "_host",
}  # in the result, by situation


def _print(found: Situations, situation: str) -> None:
    for way, gaps in _by_way(found, situation):
        ratios = [gap.gap_tpot for gap in gaps]
        still = statistics.median(gap.still_tpot for gap in gaps)
        parts = ", ".join(
            f"{part} {statistics.median(getattr(gap, f'{part}_ms') for gap in gaps):.1f}"
            for part in ("tpot", "rows", "owner", "rest")
        )
        print(
            f"  {found.length:>6} tokens, {situation:<14}copied {way:<9} gap"
            f" {statistics.median(ratios):5.2f} [{min(ratios):.2f} … {max(ratios):.2f}] tokens,"
            f" without a move {still:.2f}; ms: {parts}",
            flush=True,
        )


def _by_way(found: Situations, situation: str) -> list[tuple[str, list[Gap]]]:
    mine = [gap for gap in found.gaps if gap.situation == situation]
    ways = [(way, [gap for gap in mine if gap.way == way]) for way in WAYS]
    return [(way, gaps) for way, gaps in ways if gaps]


def _figures(found: Situations) -> dict[str, Any]:
    """The medians and ranges of one length, for the result."""
    result: dict[str, Any] = {}
    for situation, name in KEYS.items():
        for way, gaps in _by_way(found, situation):
            key = f"gap_tpot_{found.length // 1024}k{name}" + "_stopped" * (way == "stopped")
            ratios = [gap.gap_tpot for gap in gaps]
            result[key] = round(statistics.median(ratios), 2)
            result[f"{key}_range"] = [min(ratios), max(ratios)]
    return result


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench promote --zero-pause", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model at 2K tokens")
    parser.add_argument("--moves", type=int, default=0, help="per situation: default 12, quick 4")
    parser.add_argument("--tokens", type=int, nargs="*", help="lengths: default 8192 32768")
    parser.add_argument("--hosts", action="store_true", help="two engines, too")
    parser.add_argument("--model", help="GGUF to serve (default: a synthetic 0.6B shape)")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    path = Path(args.model) if args.model else synthetic_model("0.1b" if args.quick else "0.6b")
    lengths: list[int] = args.tokens or ([2048] if args.quick else [8192, 32768])
    moves: int = args.moves or (4 if args.quick else 12)
    print(f"{path.name}, two lanes of one thread, {kernels.isa()}")
    began, result, rows = time.perf_counter(), dict[str, Any](), dict[int, Any]()
    identical = True
    for length in lengths:
        with (
            report.memory_folder("promote-", 10 << 30) as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            between = BETWEEN_QUICK if args.quick else BETWEEN
            found = runner.run(_measure(path, length, moves, between, str(folder)))
        if args.hosts:
            with (
                report.memory_folder("promote-", 10 << 30) as folder,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                measuring = _measure_hosts(path, length, moves, between, Path(folder))
                found.add(runner.run(measuring))
        identical &= found.identical
        result |= _figures(found)
        rows[length] = [asdict(gap) for gap in found.gaps]
    result["identical"] = identical
    seconds = round(time.perf_counter() - began, 1)
    print(f"  {seconds} s in all")
    details = {"gguf": path.name, "isa": kernels.isa(), "moves": rows, "bench_s": seconds}
    report.finish(result, details=details, json_path=args.json)
    return 0 if identical else 1
