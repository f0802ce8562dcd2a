"""The cost of moving a running session between two lanes, against computing its KV again.

A real engine with two CPU lanes of one thread each decodes a stream; the session is moved to the
other lane and back several times. Measured: the longest pause the reader sees around each move,
in medians of the undisturbed time per token; milliseconds of the whole hand-over as the engine
reports it, which includes the wait for the end of the step and for the first token after it; the
parts of the pause, by the rows that had to be copied (one more move has a nearly full open page);
the prefill of the same tokens on a lane that shares no KV with them (another tenant), which is
also the undisturbed run whose tokens must be the same.

The rival is llama.cpp's own way: save the sequence to a file, restore it in another
context. The file lies in memory where there is room, the other context exists already and the
better of two KV settings counts. KV is repeated to the length wanted: its values change no copy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import kernels
from batchengine.config import Config, LaneConfig, LimitsConfig, ModelConfig, StoreConfig
from batchengine.config.settings import RouterConfig
from batchengine.core import PAGE_TOKENS, DoneEvent, ErrorEvent, GenerationRequest, TokenEvent
from batchengine.engine import Engine
from bench import report
from bench.engine import DISK, synthetic_model
from bench.models.llama import LlamaContext, LlamaModel

LANES = ("a", "b")
BETWEEN = 12  # tokens between two moves, undisturbed
BRIM = 240  # rows of an open page that is nearly full
BASE = 512  # tokens the rival prefills; its longer KV repeats them
RIVAL_SETTINGS: tuple[dict[str, Any], ...] = (
    {"flash": True, "kv_type": "f16"},
    {"flash": True, "kv_type": "q8_0"},
)


@dataclass
class Stream:
    """The tokens of one reader, and when each came (s)."""

    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    prefill_ms: float = 0.0  # from the start of the computation to the first token
    lane: str = ""

    def intervals(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.times)]

    async def until(self, count: int) -> None:
        while len(self.tokens) < count:  # noqa: ASYNC110  a poll of 1 ms is far below a token
            await asyncio.sleep(0.001)


@dataclass
class Pause:
    """One move: rows copied, and ms from the last token on one lane to the first on the other."""

    open_rows: int
    rows_ms: float  # the session stands still, its rows are copied and proven
    owner_ms: float  # the commit of the new owner
    rest_ms: float  # the first step there, and the end of the last one here
    gap_ms: float


@dataclass
class Length:
    """The measurements at one number of tokens. Lists have one entry per move, the last for
    that of the nearly full page, which no median counts."""

    tokens: int
    tpot_ms: float = 0.0
    gap_tpot: list[float] = field(default_factory=list[float])
    total_ms: list[float] = field(default_factory=list[float])
    prefill_ms: float = 0.0
    reports: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    pauses: list[Pause] = field(default_factory=list[Pause])
    same_tokens: bool = False

    @property
    def promote_ms(self) -> float:
        return statistics.median(self.total_ms[:-1])


class Moves:
    """One engine, and sessions of several lengths moved between its lanes."""

    def __init__(self, config: Config, moves: int) -> None:
        self.engine, self.moves = Engine(config, on_point=self._at), moves
        self.points: dict[str, float] = {}  # ms, of the last move

    def _at(self, point: str) -> None:
        self.points[point] = time.perf_counter() * 1000

    async def read(self, stream: Stream, request: GenerationRequest) -> None:
        """Reads the whole answer into `stream`."""
        async for event in self.engine.submit(request):
            if isinstance(event, TokenEvent):
                stream.tokens.append(event.token)
                stream.times.append(time.perf_counter())
            elif isinstance(event, ErrorEvent):
                raise event.error
            elif isinstance(event, DoneEvent):
                stream.prefill_ms = event.usage.ttft_ms - event.usage.queue_ms
                stream.lane = event.usage.lane

    async def measure(self, length: int) -> Length:
        """A session of `length` tokens decodes, moves, and is compared with itself undisturbed."""
        rng = np.random.default_rng(length)
        prompt = tuple(rng.integers(3, self.engine.info.vocab_size, length).tolist())
        at = [BETWEEN * move for move in range(1, self.moves + 1)]
        at.append(at[-1] + BETWEEN + (BRIM - length - at[-1] - BETWEEN) % PAGE_TOKENS)
        count = at[-1] + 2 * BETWEEN
        asked = GenerationRequest(
            f"moved-{length}", prompt, count, ignore_eos=True, session_id=f"s{length}"
        )
        result, stream, spans = Length(length), Stream(), list[tuple[float, float]]()
        reading = asyncio.ensure_future(self.read(stream, asked))
        try:
            for tokens in at:
                await asyncio.wait(
                    [reading, asyncio.ensure_future(stream.until(tokens))],
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if reading.done():
                    reading.result()
                    raise RuntimeError("the answer ended before its moves: the machine is busy")
                spans.append(await self.move(asked, result))
            await reading
        finally:
            reading.cancel()
        _compare(stream, spans, result)
        alone = Stream()
        other = GenerationRequest(
            f"alone-{length}", prompt, count, ignore_eos=True, tenant="another"
        )
        await self.read(alone, other)
        result.prefill_ms = alone.prefill_ms
        result.same_tokens = alone.tokens == stream.tokens
        return result

    async def move(self, asked: GenerationRequest, result: Length) -> tuple[float, float]:
        """Moves the session to the other lane; returns when that began and ended."""
        session = str(asked.session_id)
        rows = [row for row in self.engine.sessions() if row["session_id"] == session]
        to = LANES[1 - LANES.index(rows[0]["lane"])]
        began = time.perf_counter()
        sent = await self.engine.promote("", session, to)
        result.total_ms.append(sent["total_ms"])
        result.reports.append(sent)
        rows_ms, owner_ms = (
            self.points[end] - self.points[start] for start, end in (("P2", "P4"), ("P4", "P5"))
        )
        gap_ms = float(sent["gap_ms"])
        rest_ms = gap_ms - rows_ms - owner_ms
        pause = rows_ms, owner_ms, rest_ms, gap_ms
        result.pauses.append(Pause(sent["rows_copied"], *(round(ms, 2) for ms in pause)))
        return began, time.perf_counter()


def _compare(stream: Stream, spans: list[tuple[float, float]], result: Length) -> None:
    """Time per token away from moves, and the longest pause around each move."""
    pairs = list(zip(stream.times, stream.times[1:], strict=False))
    near = [[b - a for a, b in pairs if b >= began and a <= ended] for began, ended in spans]
    calm = [b - a for a, b in pairs if not any(b >= s and a <= e for s, e in spans)]
    tpot = statistics.median(calm)
    result.tpot_ms = tpot * 1000
    result.gap_tpot = [max(gaps) / tpot for gaps in near if gaps]


# ----------------------------------------------------------------------------------- the rival


def rival(path: Path, lengths: list[int], repeats: int) -> dict[int, dict[str, float]]:
    """By length, by KV setting: ms of llama.cpp's save to a file and restore from it."""
    found: dict[int, dict[str, float]] = {length: {} for length in lengths}
    rng = np.random.default_rng(3)
    with LlamaModel(path) as model, report.memory_folder("promote-", 8 << 30) as folder:
        prompt = rng.integers(3, model.n_vocab, BASE).tolist()
        for setting in RIVAL_SETTINGS:
            with LlamaContext(model, n_ctx=BASE + 64, **setting) as context:
                context.prefill(prompt)
                state = context.save_sequence(0)
            for length in lengths:
                with (
                    LlamaContext(model, n_ctx=length + 64, **setting) as source,
                    LlamaContext(model, n_ctx=length + 64, **setting) as target,
                ):
                    source.load_sequence(0, state.repeated(length // BASE))
                    times = [_move(source, target, folder / "state") for _ in range(repeats)]
                found[length][f"kv {setting['kv_type']}"] = round(statistics.median(times), 2)
    return found


def _move(source: LlamaContext, target: LlamaContext, path: Path) -> float:
    """Milliseconds of one save and restore."""
    target.clear()
    start = time.perf_counter()
    source.save_file(0, path)
    target.load_file(0, path)
    elapsed_ms = (time.perf_counter() - start) * 1000
    path.unlink()
    return elapsed_ms


# ---------------------------------------------------------------------------------------- main


def two_lanes(path: Path, context_tokens: int, folder: str) -> Config:
    """A model on two lanes of one thread each, between which no session moves by itself."""
    cores = sorted(os.sched_getaffinity(0))
    lanes = tuple(
        LaneConfig(name, threads=1, cores=(cores[i],) if len(cores) > 1 else ())
        for i, name in enumerate(LANES)
    )
    return Config(
        model=ModelConfig(path=str(path), id="promote"),
        lanes=lanes,
        store=StoreConfig(dir=folder, budget_bytes=8 << 30, allow_volatile=True),
        limits=LimitsConfig(context_tokens=context_tokens),
        router=RouterConfig(promote_auto=False, demote_idle_s=0.0),
        cache_dir=str(DISK if DISK.is_dir() else folder),
    )


async def _moves(path: Path, lengths: list[int], moves: int, folder: str) -> list[Length]:
    config = two_lanes(path, max(lengths) + 1024, folder)
    bench, found = Moves(config, moves), list[Length]()
    await bench.engine.start(lambda _: None)
    try:
        for length in lengths:
            found.append(await bench.measure(length))
            _print(found[-1])
        return found
    finally:
        await bench.engine.stop(0.0)


def _print(row: Length) -> None:
    ratio = row.prefill_ms / row.promote_ms
    gaps = ", ".join(f"{gap:.2f}" for gap in row.gap_tpot)
    print(
        f"  {row.tokens:>6} tokens: hand-over {row.promote_ms:8.1f} ms, prefill"
        f" {row.prefill_ms:9.0f} ms, ratio {ratio:7.1f}; {row.tpot_ms:.1f} ms per token, pauses"
        f" in tokens {gaps}; tokens {'the same' if row.same_tokens else 'DIFFER'}",
        flush=True,
    )
    for pause in sorted(row.pauses, key=lambda pause: pause.open_rows):
        print(
            f"         {pause.open_rows:>4} open rows: {pause.gap_ms:7.1f} ms without a token ="
            f" rows {pause.rows_ms:.1f} + owner {pause.owner_ms:.1f} + rest {pause.rest_ms:.1f}"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="bench promote", description=__doc__, epilog="--zero-pause --help: the other bench"
    )
    parser.add_argument("--quick", action="store_true", help="a small model, under 40 s")
    parser.add_argument("--full", action="store_true", help="also 32K tokens: half an hour")
    parser.add_argument("--moves", type=int, default=0, help="default 8, quick 3")
    parser.add_argument("--model", help="GGUF to serve (default: a synthetic 0.6B shape)")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    path = Path(args.model) if args.model else synthetic_model("0.1b" if args.quick else "0.6b")
    lengths = [1024] if args.quick else [1024, 8192]
    if args.full:
        lengths.append(32768)
    print(f"{path.name}, two lanes of one thread, {kernels.isa()}")
    if not args.full:
        print("  32K tokens are left out (prefilling them twice takes too long): see --full")
    with tempfile.TemporaryDirectory(prefix="promote-") as folder:
        work = _moves(path, lengths, args.moves or (3 if args.quick else 8), folder)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(work)
    theirs = rival(path, lengths, 1 if args.quick else 3)
    result: dict[str, Any] = {}
    for row in rows:
        name, rival_ms = f"{row.tokens // 1024}k", min(theirs[row.tokens].values())
        result |= {
            f"gap_tpot_{name}": round(statistics.median(row.gap_tpot[:-1]), 2),
            f"gap_tpot_{name}_max": round(max(row.gap_tpot[:-1]), 2),
            f"brim_gap_tpot_{name}": round(row.gap_tpot[-1], 2),
            f"promote_ms_{name}": round(row.promote_ms, 2),
            f"prefill_ms_{name}": round(row.prefill_ms, 1),
            f"promote_vs_prefill_{name}": round(row.prefill_ms / row.promote_ms, 1),
            f"rival_ms_{name}": rival_ms,
        }
        kinds = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in theirs[row.tokens].items())
        print(f"  {row.tokens:>6} tokens: llama.cpp save + restore through a file: {kinds}")
    result["same_tokens"] = all(row.same_tokens for row in rows)
    details = {
        "gguf": path.name,
        "isa": kernels.isa(),
        "rows": [asdict(row) for row in rows],
        "rival_ms": theirs,
        "bench_s": round(time.perf_counter() - began, 1),
    }
    print(f"  {details['bench_s']} s in all")
    report.finish(result, details=details, json_path=args.json)
    return 0 if result["same_tokens"] else 1
