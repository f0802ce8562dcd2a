"""The time to the first token of a long session after a restart, against computing its KV again.

An engine process of its own serves a session of 8K tokens. It is stopped cleanly, then killed -9
amid an answer, and its worker is killed -9 amid another. Measured: from the moment the next run
serves to the first new token of the session; tokens whose KV existed at the kill and was computed
again; the prefill of as many tokens that share no KV with the session (another
tenant), which is also the undisturbed run whose tokens must be the same.

The page cache cannot be dropped here: after a restart pages come from memory, as they do after a
crash of the daemon, and not as after a reboot. They are read and verified in both cases.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from batchengine.gguf import GgufFile
from batchengine.weights import read_spec
from bench import report
from bench.engine import DISK, synthetic_model
from bench.processes.engine_child import EngineProcess, engine_zygote
from bench.processes.zygote import Zygote

ANSWER = 24  # tokens of each turn
AMID = 12  # tokens sent before a kill
NEW = 8  # tokens that the client adds in each turn
SILENCE_S = 600.0


@dataclass
class Turn:
    """The tokens and times of one request as its client saw them."""

    tokens: list[int] = field(default_factory=list[int])
    first_ms: float = 0.0  # from asking to the first token
    pause_ms: float = 0.0  # the longest one between two tokens
    done: dict[str, Any] = field(default_factory=dict[str, Any])


async def read(
    engine: EngineProcess,
    at_most: int = 1 << 30,
    at_first: Callable[[], None] | None = None,
    **fields: Any,
) -> Turn:
    """Send a request and read to its end, to the engine's end, or `at_most` tokens; `at_first` is
    called when the first one has come."""
    turn, asked = Turn(), time.perf_counter()
    op = fields.pop("op", "submit")
    stream = engine.ask(op, **fields)
    last = asked
    while len(turn.tokens) < at_most:
        message = await asyncio.wait_for(stream.get(), SILENCE_S)
        if "token" not in message:
            turn.done = message
            break
        now = time.perf_counter()
        if turn.tokens:
            turn.pause_ms = max(turn.pause_ms, (now - last) * 1000)
        else:
            turn.first_ms = (now - asked) * 1000
        last = now
        turn.tokens.append(message["token"])
        if at_first is not None and len(turn.tokens) == 1:
            at_first()
    return turn


def kill_worker(engine: EngineProcess) -> None:
    if not engine.kill_worker(0):
        raise RuntimeError("no worker to kill")


class Restart:
    """One session through several runs, then the same undisturbed."""

    def __init__(self, zygote: Zygote, settings: dict[str, Any], length: int) -> None:
        self.zygote, self.settings = zygote, settings
        with GgufFile(settings["model"]) as gguf:
            self.vocab = read_spec(gguf).n_vocab
        self.rng = np.random.default_rng(17)
        self.timeline = self.new_tokens(length)
        self.turns: list[tuple[list[int], list[int]]] = []  # prompt, answer
        self.figures: dict[str, float] = {}

    def new_tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.vocab, count).tolist()

    async def start(self) -> EngineProcess:
        engine = EngineProcess(self.zygote, self.settings)
        began = time.perf_counter()
        if not await engine.is_ready():
            raise RuntimeError("the engine does not start")
        self.figures.setdefault("start_ms", (time.perf_counter() - began) * 1000)
        return engine

    async def turn(self, engine: EngineProcess, at_most: int = 1 << 30) -> Turn:
        """The next turn: what the client adds, and an answer or its beginning."""
        if self.turns:
            self.timeline += self.new_tokens(NEW)
        prompt = list(self.timeline)
        turn = await read(engine, at_most, prompt=prompt, n=ANSWER, session="s")
        self.turns.append((prompt, turn.tokens))
        self.timeline += turn.tokens
        return turn

    async def resume(self, engine: EngineProcess) -> Turn:
        """The rest of the answer that was cut off."""
        prompt, sent = self.turns[-1]
        rest = await read(engine, op="resume", session="s", from_token=len(sent))
        sent += rest.tokens
        self.timeline = prompt + sent
        return rest

    async def computed_again(self, engine: EngineProcess, had: int) -> int:
        """Tokens computed in this run whose KV had been computed before; `had` tokens had KV."""
        stats = await engine.call("stats")
        last = len(self.timeline) - 1  # the KV of the last token is not needed
        return int(stats["tokens_computed"]) - (last - had)

    async def run(self) -> None:
        """Measures all runs in order."""
        engine = await self.start()
        first = await self.turn(engine)
        self.figures["prefill_ms"] = first.first_ms
        await engine.stop()

        engine = await self.start()
        had = len(self.timeline) - 1
        after = await self.turn(engine)
        self.figures["first_token_after_stop_ms"] = after.first_ms
        self.figures["again_after_stop"] = await self.computed_again(engine, had)

        await self.turn(engine, AMID)
        engine.kill()
        await engine.over()
        engine = await self.start()
        record = await engine.call("record", session="s")
        had = max(len(self.timeline), len(record["tokens"])) - 1
        self.figures["tokens_in_ledger_beyond_told"] = len(record["tokens"]) - len(self.timeline)
        after = await self.resume(engine)
        self.figures["first_token_after_kill_ms"] = after.first_ms
        self.figures["again_after_kill"] = await self.computed_again(engine, had)

        before = await engine.call("stats")
        await self.worker_kill(engine)
        after_stats = await engine.call("stats")
        self.figures["again_after_worker_kill"] = (
            after_stats["tokens_recomputed"] - before["tokens_recomputed"]
        )
        await self.undisturbed(engine)
        await engine.stop()

    async def worker_kill(self, engine: EngineProcess) -> None:
        """A turn whose worker is killed amid the answer; the stream goes on."""
        self.timeline += self.new_tokens(NEW)
        prompt = list(self.timeline)
        turn = await read(
            engine,
            at_first=lambda: kill_worker(engine),
            prompt=prompt,
            n=ANSWER,
            session="s",
        )
        self.turns.append((prompt, turn.tokens))
        self.timeline += turn.tokens
        self.figures["pause_of_worker_kill_ms"] = max(turn.pause_ms, turn.first_ms)

    async def undisturbed(self, engine: EngineProcess) -> None:
        """Repeats the turns as a tenant that shares no KV, to compare prefill and tokens."""
        same = True
        for index, (prompt, answer) in enumerate(self.turns):
            turn = await read(engine, prompt=prompt, n=ANSWER, session="s", tenant="another")
            same = same and turn.tokens == answer and len(answer) == ANSWER
            if not index:
                self.figures["prefill_again_ms"] = turn.first_ms
        self.figures["same_tokens"] = same


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench restart", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and 1K tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=0, help="of the session: 8192, quick 1100")
    parser.add_argument("--model", help="GGUF to serve (default: a synthetic 0.6B shape)")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    path = Path(args.model) if args.model else synthetic_model("0.1b" if args.quick else "0.6b")
    length = args.tokens or (1100 if args.quick else 8192)
    print(f"{path.name}, {length} tokens, {args.threads} threads, {kernels.isa()}")
    print("  the page cache cannot be dropped here: pages come from memory, and are verified")
    zygote = engine_zygote()
    try:
        with tempfile.TemporaryDirectory(prefix="restart-") as folder:
            settings = {
                "model": str(path),
                "folder": folder,
                "cache_dir": str(DISK if DISK.is_dir() else folder),
                "compute": "cpu",
                "lanes": [{"name": "cpu", "threads": args.threads}],
                "overrides": {"store.budget_bytes": 4 << 30},
            }
            bench = Restart(zygote, settings, length)
            asyncio.run(bench.run())
    finally:
        zygote.close()
    return _finish(bench.figures, length, path, args, time.perf_counter() - began)


def _finish(
    figures: dict[str, float], length: int, path: Path, args: argparse.Namespace, seconds: float
) -> int:
    prefill_ms = min(figures["prefill_ms"], figures["prefill_again_ms"])
    for name, value in figures.items():
        print(f"  {name:<32}{value:>12.1f}")
    name = f"{length // 1024}k"
    result = {
        f"restart_vs_prefill_{name}": round(prefill_ms / figures["first_token_after_kill_ms"], 1),
        f"stop_vs_prefill_{name}": round(prefill_ms / figures["first_token_after_stop_ms"], 1),
        "tokens_reprefilled": int(figures["again_after_kill"]),
        "tokens_reprefilled_stop": int(figures["again_after_stop"]),
        "tokens_reprefilled_worker": int(figures["again_after_worker_kill"]),
        "same_tokens": bool(figures["same_tokens"]),
    }
    details = {
        "gguf": path.name,
        "isa": kernels.isa(),
        "threads": args.threads,
        "tokens": length,
        "figures": {key: round(float(value), 2) for key, value in figures.items()},
        "bench_s": round(seconds, 1),
    }
    print(f"  {details['bench_s']} s in all")
    report.finish(result, details=details, json_path=args.json)
    return 0 if result["same_tokens"] else 1
