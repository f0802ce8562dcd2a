"""A served trace of agents: our daemon against llama-server, one after the other, over HTTP.

Each of `--agents` agents has the same system prompt and its own conversation of `--turns` turns: it
sends the whole conversation, reads the streamed answer to its end and goes on. Every second agent
is interactive (a class of our daemon; llama-server has none), the others are background. The
answers in the history are texts of the trace, not what the server said, so that both servers get
the same prompts. The words are random; in the synthetic models a character is a token.

`turns_per_min` counts turns over the whole trace; `ttft_p95_ms` is the time to the first text of a
turn; `tpot_p50_ms` the time per further token. `ratio` is ours / theirs of turns_per_min. Without a
`llama-server` on the PATH only our figures are measured, and `ratio` is null.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import kernels
from bench import report
from bench.engine import synthetic_model
from service.cli.local.child import ChildDaemon
from service.cli.local.cluster import free_ports

LETTERS = "abcdefgijklmnopqrsuvwxyz"  # without the pair that the synthetic vocabulary merges
TURN_SECONDS_MAX = 1800.0
START_SECONDS_MAX = 300.0


@dataclass(frozen=True)
class Trace:
    """The sizes of a trace, and its texts."""

    agents: int
    turns: int
    system_chars: int
    message_chars: int
    answer_tokens: int

    @property
    def context(self) -> int:
        """Tokens that hold one conversation, if a character is a token."""
        turn = self.message_chars + 2 * self.answer_tokens + 64
        return 256 * (2 + (self.system_chars + 64 + self.turns * turn) // 256)

    def text(self, name: str, chars: int) -> str:
        """Random words; the same name gives the same text."""
        rng = random.Random(name)
        return "".join(" " if rng.random() < 0.15 else rng.choice(LETTERS) for _ in range(chars))

    def messages(self, agent: int, turn: int) -> list[dict[str, str]]:
        """What an agent sends in a turn."""
        found = [{"role": "system", "content": self.text("system", self.system_chars)}]
        for i in range(turn + 1):
            said = self.text(f"{agent} asks {i}", self.message_chars)
            found.append({"role": "user", "content": said})
            if i < turn:
                heard = self.text(f"{agent} gets {i}", self.answer_tokens)
                found.append({"role": "assistant", "content": heard})
        return found


@dataclass(frozen=True)
class TurnTimes:
    """One turn as its client saw it."""

    interactive: bool
    ttft_ms: float
    tpot_ms: float


class Server:
    """An OpenAI-compatible server that runs the trace."""

    def __init__(self, url: str, model: str, *, has_classes: bool) -> None:
        self.url, self.model, self.has_classes = url, model, has_classes

    async def ask(
        self, session: aiohttp.ClientSession, messages: Any, tokens: int, interactive: bool
    ) -> TurnTimes:
        """Streams one answer of `tokens` tokens."""
        body: dict[str, Any] = {
            "model": self.model, "messages": messages, "max_tokens": tokens, "stream": True,
            "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        if self.has_classes:
            body["batchengine"] = {"class": "interactive" if interactive else "background"}
        asked, first, last = time.perf_counter(), 0.0, 0.0
        async with (
            asyncio.timeout(TURN_SECONDS_MAX),
            session.post(f"{self.url}/v1/chat/completions", json=body) as reply,
        ):
            if reply.status != 200:
                raise RuntimeError(f"{self.url}: {reply.status} {(await reply.text())[:300]}")
            async for line in reply.content:
                if has_text(line):
                    last = time.perf_counter()
                    first = first or last
        if not first:
            raise RuntimeError(f"{self.url}: an answer without text")
        per_token = (last - first) / max(1, tokens - 1)
        return TurnTimes(interactive, (first - asked) * 1000, per_token * 1000)

    async def run(self, trace: Trace) -> tuple[float, list[TurnTimes]]:
        """Seconds of the whole trace, and its turns."""
        found: list[TurnTimes] = []
        # A connection for every request: llama-server closes one after a stream, at times while
        # the next request is on its way.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=NO_TIMEOUT) as session:

            async def agent(number: int) -> None:
                for turn in range(trace.turns):
                    messages = trace.messages(number, turn)
                    tokens = trace.answer_tokens
                    found.append(await self.ask(session, messages, tokens, number % 2 == 0))

            await self.ask(session, [{"role": "user", "content": "wake up"}], 4, True)
            began = time.perf_counter()
            await asyncio.gather(*(agent(number) for number in range(trace.agents)))
            return time.perf_counter() - began, found


NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


def has_text(line: bytes) -> bool:
    """Whether a line of a stream brings text."""
    if not line.startswith(b"data: {"):
        return False
    choices = json.loads(line[6:]).get("choices") or [{}]
    return bool(choices[0].get("delta", {}).get("content"))


@contextlib.contextmanager
def our_daemon(model: Path, threads: int, context: int, verbose: bool) -> Iterator[Server]:
    def show(line: str) -> None:
        if verbose:
            print(line, file=sys.stderr)

    options = ("--threads", str(threads), "--ctx", str(context), "--model-id", "bench")
    with ChildDaemon(model, show, *options) as daemon:
        yield Server(daemon.wait_ready().removesuffix("/v1"), "bench", has_classes=True)


@contextlib.contextmanager
def llama_server(
    program: str, model: Path, threads: int, trace: Trace, verbose: bool
) -> Iterator[Server]:
    """llama-server with a slot for every agent."""
    (port,) = free_ports(1)
    command = [
        program, "--model", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--threads", str(threads), "--threads-batch", str(threads),
        "--parallel", str(trace.agents), "--ctx-size", str(trace.context * trace.agents),
    ]  # fmt: skip
    output = None if verbose else subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_healthy(url, process))
        yield Server(url, "bench", has_classes=False)
    finally:
        process.terminate()
        process.wait(30)


async def until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError("llama-server does not start: --verbose shows what it says")


def figures(seconds: float, turns: list[TurnTimes]) -> dict[str, float]:
    """The figures of one server."""
    ttft = [turn.ttft_ms for turn in turns]
    interactive = [turn.ttft_ms for turn in turns if turn.interactive]
    return {
        "turns_per_min": round(60 * len(turns) / seconds, 2),
        "ttft_p95_ms": round(float(np.percentile(ttft, 95)), 1),
        "ttft_p50_ms": round(float(np.percentile(ttft, 50)), 1),
        "ttft_p95_interactive_ms": round(float(np.percentile(interactive, 95)), 1),
        "tpot_p50_ms": round(float(np.median([turn.tpot_ms for turn in turns])), 2),
        "seconds": round(seconds, 2),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench agents", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model and a short trace")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--agents", type=int, default=0, help="default 8, quick 2")
    parser.add_argument("--turns", type=int, default=0, help="of each agent: 3, quick 2")
    parser.add_argument("--system", type=int, default=0, help="characters: 2048, quick 256")
    parser.add_argument("--message", type=int, default=0, help="characters: 256, quick 32")
    parser.add_argument("--answer", type=int, default=0, help="tokens: 64, quick 8")
    parser.add_argument("--model", help="GGUF to serve (default: a synthetic 0.6B shape)")
    parser.add_argument("--llama-server", default="llama-server", help="program to compare with")
    parser.add_argument("--verbose", action="store_true", help="the servers' output on stderr")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    sizes = (args.agents, args.turns, args.system, args.message, args.answer)
    usual = (2, 2, 256, 32, 8) if args.quick else (8, 3, 2048, 256, 64)
    trace = Trace(*(size or default for size, default in zip(sizes, usual, strict=True)))
    path = Path(args.model) if args.model else synthetic_model("0.1b" if args.quick else "0.6b")
    print(f"{path.name}, {args.threads} threads, {kernels.isa()}, {trace}")
    found: dict[str, dict[str, float]] = {}
    details: dict[str, Any] = {"gguf": path.name, "threads": args.threads, "trace": vars(trace)}

    def measure(name: str, server: Server) -> None:
        seconds, turns = asyncio.run(server.run(trace))
        found[name] = figures(seconds, turns)
        details[name] = {"figures": found[name], "turns": [vars(turn) for turn in turns]}
        print(f"  {name:<14}" + "   ".join(f"{k} {v}" for k, v in found[name].items()), flush=True)

    with our_daemon(path, args.threads, trace.context, args.verbose) as server:
        measure("ours", server)
    program = shutil.which(args.llama_server)
    if program is None:
        print(f"  {args.llama_server} is not on the PATH: our figures alone")
    else:
        with llama_server(program, path, args.threads, trace, args.verbose) as server:
            measure("llama-server", server)
    rows = ("turns_per_min", "ttft_p95_ms", "tpot_p50_ms")
    result: dict[str, Any] = {
        row: {who: row_of[row] for who, row_of in found.items()} for row in rows
    }
    rates = result["turns_per_min"]
    theirs = rates.get("llama-server")
    result["ratio"] = round(rates["ours"] / theirs, 3) if theirs else None
    report.finish(result, details=details, json_path=args.json)
    return 0
